"""A diagnosis for people: a table and a line."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..bench.markdown import number
from .findings import Diagnosis, Status
from .probe import Probe

SIGNS = {Status.FINE: ("ok", "green"), Status.NOTE: ("note", "yellow"), Status.REFUSED: ("refused", "bold red")}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints everything that was found, and the verdict."""
    names = diagnosis.target + (f" with {diagnosis.assistant}" if diagnosis.assistant else "")
    table = Table(title=f"{names}, {diagnosis.dtype}", box=SIMPLE_HEAD, show_edge=False)
    for heading in ("", "", ""):
        table.add_column(heading, no_wrap=True)
    table.add_column("", overflow="fold")
    section = ""
    for finding in diagnosis.findings:
        sign, style = SIGNS[finding.status]
        heading = "" if finding.section == section else finding.section
        if heading and section:
            table.add_section()
        section = finding.section
        table.add_row(heading, finding.subject, f"[{style}]{sign}[/]", finding.text)
    if diagnosis.probe is not None:
        table.add_section()
        for index, (subject, text) in enumerate(probe_rows(diagnosis.probe)):
            table.add_row("" if index else "probe", subject, "", text)
    console.print(table, highlight=False, markup=True)
    style = "bold red" if diagnosis.is_refused else "bold"
    console.print(diagnosis.verdict, style=style, highlight=False, markup=False)


def probe_rows(probe: Probe) -> list[tuple[str, str]]:
    """What was measured, by name."""
    perfect = "" if probe.perfect_speed_up is None else f" (every round a hit, no wait: {probe.perfect_speed_up:.2f})"
    speeds = f"{probe.ar_tokens_per_s:.1f}, {probe.sd_tokens_per_s:.1f}, {probe.ssd_tokens_per_s:.1f}"
    return [
        ("tokens/s", f"generate() on all cores, SD, SSD: {speeds}"),
        ("expected speed-up", f"{probe.speed_up:.2f}{perfect}"),
        (
            "tokens per round",
            f"{number(probe.tokens_per_round)}, of the draft tokens {_share(probe.acceptance)} accepted",
        ),
        ("hit rate", _share(probe.hit_rate)),
        (
            "times",
            f"target's forward {_ms(probe.verify_ms)}, wait {_ms(probe.wait_ms)}, a draft step "
            f"{_ms(probe.draft_step_ms)}, on {probe.assistant_device or '-'}",
        ),
        ("same text", f"{probe.num_identical} of {probe.num_prompts}, {probe.max_new_tokens} tokens each"),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
