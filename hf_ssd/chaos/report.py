"""What runs and the soak came to, for people and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..bench.markdown import table
from .faults import FAULTS
from .soak import SoakResult
from .trials import ChaosResult

HEADINGS = ("fault", "runs", "equal to AR", "without the assistant", "longest call", "problems")

_EXPLANATION = """\
Each run is a call of `generate()` on tiny models, greedy or with a seed, with one to three rows, during which one
thing goes wrong at a random step, and then a call without a fault. Its tokens must be those of plain decoding. Where
the fault takes the assistant, the call goes on without it and says why in `ssd_stats.degraded`; the call after it must
have an assistant again. Then no process, thread or descriptor may be left that was not there before.
"""


def chaos_rows(results: Sequence[ChaosResult]) -> list[tuple[str, ...]]:
    """One row per fault: what it was, and what came of its runs."""
    rows: list[tuple[str, ...]] = []
    for fault in FAULTS:
        own = [each for each in results if each.run.fault is fault]
        if not own:
            continue
        problems = [each for each in own if each.problem is not None]
        ended = [each for each in own if fault.ending != "interrupted"]
        rows.append(
            (
                fault.name,
                str(len(own)),
                str(len(ended) - sum(each in problems for each in ended)) if ended else "ends by the exception",
                str(sum(each.degraded is not None for each in own)),
                f"{max(each.duration_s for each in own):.1f} s",
                str(len(problems)),
            )
        )
    return rows


def chaos_summary(results: Sequence[ChaosResult]) -> str:
    """How many runs went wrong."""
    failing = sum(each.problem is not None for each in results)
    degraded = sum(each.degraded is not None for each in results)
    return (
        f"{len(results)} runs: {len(results) - failing} as they should be, {failing} not. {degraded} went on without "
        f"the assistant. The longest took {max((each.duration_s for each in results), default=0.0):.0f} s."
    )


def chaos_table(results: Sequence[ChaosResult]) -> Table:
    """For a terminal."""
    grid = Table(box=SIMPLE_HEAD)
    for heading in HEADINGS:
        grid.add_column(heading, justify="left" if heading == "fault" else "right")
    for row in chaos_rows(results):
        grid.add_row(*row, style=None if row[-1] == "0" else "bold red")
    return grid


def soak_rows(result: SoakResult) -> list[tuple[str, ...]]:
    """One row per look at what the process has."""
    return [
        (
            str(each.num_calls),
            str(each.num_tokens),
            f"{each.caller_mb:.0f} MB",
            f"{each.worker_mb:.0f} MB",
            f"{each.shared_mb:.2f} MB",
            str(each.descriptors),
            str(each.threads),
            str(each.processes),
        )
        for each in result.looks
    ]


SOAK_HEADINGS = ("calls", "tokens", "caller", "worker", "shared", "descriptors", "threads", "processes")


def soak_table(result: SoakResult) -> Table:
    """For a terminal."""
    grid = Table(box=SIMPLE_HEAD)
    for heading in SOAK_HEADINGS:
        grid.add_column(heading, justify="right")
    for row in soak_rows(result):
        grid.add_row(*row)
    return grid


def write_chaos(results: Sequence[ChaosResult], path: Path, command: str) -> None:
    """Writes the table of faults as a page of the documentation. Raises `OSError` if it cannot."""
    page = ["# Faults", _EXPLANATION.rstrip(), f"`{command}` printed this page. {chaos_summary(results)}"]
    path.write_text("\n\n".join([*page, table(HEADINGS, chaos_rows(results))]) + "\n", encoding="utf-8")


def write_soak(result: SoakResult, path: Path, command: str) -> None:
    """Writes the table of a soak as a page of the documentation. Raises `OSError` if it cannot."""
    page = ["# Soak", f"`{command}` printed this page. {result.summary()}"]
    path.write_text("\n\n".join([*page, table(SOAK_HEADINGS, soak_rows(result))]) + "\n", encoding="utf-8")
