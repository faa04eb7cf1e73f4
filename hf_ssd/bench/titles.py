"""What arms and temperatures are called where people read of them."""

from __future__ import annotations

from .settings import ALL_CORES, AR, AUTO, HF_ASSISTED, HF_INT8, PROMPT_LOOKUP, SD, SSD

_TITLES = {
    AR: "AR",
    HF_ASSISTED: "HF assisted",
    HF_INT8: "HF assisted, int8",
    PROMPT_LOOKUP: "Prompt lookup",
    SD: "SD",
    SSD: "SSD",
    AUTO: "auto",
}


def title_of(name: str) -> str:
    """The title of an arm: `"AR, all cores"` of `"ar_all_cores"`; that of an SSD arm with other settings names them."""
    base, _, variant = name.partition(": ")
    title = _TITLES[base.removesuffix(ALL_CORES)]
    if base.endswith(ALL_CORES):
        title += ", all cores"
    return f"{title}, {variant}" if variant else title


def name_temperature(value: float) -> str:
    """`"greedy"`, or the temperature."""
    return "greedy" if value == 0 else f"temperature {value:g}"
