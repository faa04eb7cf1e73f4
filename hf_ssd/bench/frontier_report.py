"""The frontier as a report in Markdown, a plot and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from .frontier import Frontier, FrontierPoint
from .markdown import conditions, estimate, number, table
from .plots import DPI, plot_frontier
from .titles import name_temperature

HEADINGS = ("rule", "C", "acceptance", "hit rate", "/ greedy", "tokens/round", "tokens/s", "x AR", "rounds")
NOTES = """\
- **C** is the coefficient of Saguaro sampling; 1 is off. **/ greedy** is the hit rate over that of greedy decoding.
- **tokens/s** and **x AR** are after the first token, against plain `generate()` on the target's threads; in brackets
  is the interval that the figure spans when prompts are drawn anew (bootstrap, 95 %).
- Different rules draw different texts, which are harder or easier: differences of a few per cent mean nothing.
"""


def write_frontier(frontier: Frontier, has_plot: bool = False) -> str:
    """The report; `has_plot` if `frontier.png` lies beside it."""
    pair = frontier.bench.pair
    parts = [
        f"# Verification rules: {pair['target']} with {pair['assistant']}, {frontier.bench.dtype}",
        conditions(frontier.bench),
    ]
    for temperature in frontier.temperatures:
        rows = [_row(point) for point in frontier.at(temperature)]
        best = frontier.fastest(temperature)
        parts += [
            f"## {name_temperature(temperature).capitalize()}",
            table(HEADINGS, rows),
            f"Most tokens per second: {best.rule}, C = {best.coefficient:g}.",
        ]
    if frontier.greedy is not None:
        parts += ["## Greedy", table(HEADINGS, [["-", "-", *_row(frontier.greedy)[2:]]])]
    if has_plot:
        parts.append("![Acceptance against hit rate](frontier.png)")
    return "\n\n".join([*parts, "## How to read this", NOTES])


def write_frontier_files(frontier: Frontier, folder: Path) -> tuple[str, ...]:
    """Writes `frontier.json`, `frontier.png` and `frontier.md` into a folder that exists.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If one cannot be written.
    """
    # The figures first: whatever fails after that, they are not lost.
    (folder / "frontier.json").write_text(json.dumps(frontier.to_dict(), indent=2) + "\n", encoding="utf-8")
    plot_frontier(frontier).savefig(folder / "frontier.png", dpi=DPI)
    (folder / "frontier.md").write_text(write_frontier(frontier, has_plot=True), encoding="utf-8")
    return ("frontier.json", "frontier.png", "frontier.md")


def _row(point: FrontierPoint) -> list[str]:
    return [
        point.rule,
        f"{point.coefficient:g}",
        number(point.acceptance),
        number(point.hit_rate),
        number(point.hit_rate_to_greedy),
        number(point.tokens_per_round),
        estimate(point.tokens_per_s, 1),
        estimate(point.speed_up),
        str(point.num_rounds),
    ]
