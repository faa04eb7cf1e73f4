"""The page, and how it is served."""

from __future__ import annotations

from collections.abc import Callable

import gradio as gr

from .models import Models, Sessions
from .options import DemoOptions
from .race_tab import STATE_LIFE_S, RaceTab
from .theme import DemoTheme, css, head
from .what_if import what_if_tab

LOOPBACK = "127.0.0.1"

INTRODUCTION = """# AR, SD and SSD, side by side
**AR** is plain decoding. In speculative decoding (**SD**) a small assistant drafts and the target verifies: one of
them always waits. In **SSD** the assistant guesses how the verification will end and drafts on from there meanwhile.
All three give the target's own text."""


def build(models: Models) -> gr.Blocks:
    """The page.

    Args:
        models: Whose target runs; they may still be loading.
    """
    sessions = Sessions()
    with gr.Blocks(title="hf_ssd: the race", analytics_enabled=False) as page:
        last_stats = gr.State(None, time_to_live=STATE_LIFE_S)
        gr.Markdown(INTRODUCTION, elem_id="introduction")
        with gr.Tabs():
            with gr.Tab("Race", id="race-tab"):
                tab = RaceTab(models, sessions, last_stats)
            with gr.Tab("What if", id="what-if-tab"):
                what_if_tab(last_stats)
        watch, news = tab.watch_loading()
        page.load(watch, None, news, show_progress="hidden", concurrency_limit=None, api_visibility="private")

        def leave(request: gr.Request) -> None:
            sessions.stop(str(request.session_hash))

        page.unload(leave)
    # For what is quick. The race has a limit of its own.
    return page.queue(default_concurrency_limit=8, max_size=32, api_open=False)


def serve(
    options: DemoOptions,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    open_browser: bool = False,
    announce: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves the page until it is interrupted. It is there at once and says how loading goes.

    Args:
        options: Which pair, and what the controls start with.
        host: Address to listen on. The default can only be reached from this machine.
        port: Port to listen on; `None` takes the first free one from 7860 on.
        open_browser: Whether to open it in a browser.
        announce: Called with the page's address.

    Raises:
        OSError: If there are no such models, or the port is taken. What loading raises ends the page.
    """
    models = Models(options)
    page = build(models)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        share=False,
        show_error=True,
        quiet=True,
        theme=DemoTheme(),
        css=css(),
        head=head(),
        footer_links=[],
        run_history=False,  # prompts stay in the page
        enable_monitoring=False,
        allowed_paths=[],
        max_file_size=1,  # byte: the page takes no files
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
    )
    announce(address)
    try:
        models.submit(models.pair).result()
        page.block_thread()
    finally:
        page.close(verbose=False)
        models.close()
