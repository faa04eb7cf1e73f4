"""How the page looks: fonts of the system, colours that colour-blind people tell apart, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

ASSETS = Path(__file__).parent / "assets"


class DemoTheme(gr.themes.Base):
    """A calm theme in teal and slate, light and dark."""

    def __init__(self) -> None:
        super().__init__(
            primary_hue=gr.themes.colors.teal,
            secondary_hue=gr.themes.colors.sky,
            neutral_hue=gr.themes.colors.slate,
            radius_size=gr.themes.sizes.radius_md,
            font=("system-ui", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"),
            font_mono=("ui-monospace", "Menlo", "DejaVu Sans Mono", "monospace"),
        )
        self.set(
            body_text_color_subdued="*neutral_600",
            body_text_color_subdued_dark="*neutral_300",
            block_info_text_color="*neutral_600",
            block_info_text_color_dark="*neutral_300",
            body_background_fill="*neutral_50",
            body_background_fill_dark="*neutral_950",
            block_background_fill="white",
            block_background_fill_dark="*neutral_900",
            block_border_width="1px",
            block_border_color="*neutral_200",
            block_border_color_dark="*neutral_800",
            block_label_text_weight="600",
            block_title_text_weight="600",
            button_primary_background_fill="*primary_700",
            button_primary_background_fill_hover="*primary_800",
            button_primary_background_fill_dark="*primary_700",
            button_primary_background_fill_hover_dark="*primary_800",
            button_primary_text_color="white",
            button_cancel_background_fill="#b3400c",
            button_cancel_background_fill_hover="#8f330a",
            button_cancel_background_fill_dark="#b3400c",
            button_cancel_background_fill_hover_dark="#d0500f",
            button_cancel_text_color="white",
            button_cancel_text_color_dark="white",
            slider_color="*primary_600",
        )


def css() -> str:
    """The page's own styles."""
    return (ASSETS / "demo.css").read_text(encoding="utf-8")


def head() -> str:
    """The page's own script: the replay, and the keys of the token view."""
    return f"<script>{(ASSETS / 'race.js').read_text(encoding='utf-8')}</script>"
