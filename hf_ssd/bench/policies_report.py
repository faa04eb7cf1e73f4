"""What `hf-ssd policies` measured, as a report in Markdown, a plot and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .markdown import estimate, number, table
from .plots import ARM_COLOURS, BLUE, DPI, GREEN, GREY, RED, new_figure
from .policies import Course, PolicyResult
from .settings import AR_ALL_CORES, AUTO, SSD
from .titles import title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECTIONS = ("records", "random letters", "records")
SMOOTHED_TOKENS = 24  # that the speed is over
SMOOTHED_ROUNDS = 16  # that the hit rate is over
MODE_COLOURS = {"ssd": BLUE, "sd": GREEN, "ar": GREY}
COURSE_COLOURS = {AR_ALL_CORES: GREY, SSD: ARM_COLOURS[SSD], AUTO: RED}
NOTES = """\
- **Unrelated assistant**: the arms take turns on the same prompts, greedy. Plain `generate()` and mode "auto" may use
  all cores. Everything counts: the calls in which mode "auto" finds out, trials, and switches. In brackets is the
  interval that a figure spans when prompts and repeats are drawn anew (bootstrap, 95 %).
- **Changing text**: one call per arm, its text forced token by token (a logits processor that the assistant does not
  have). Milliseconds per token, by part of the text.
"""


def write_policies(result: PolicyResult, has_plot: bool = False) -> str:
    """The report; `has_plot` if `policies.png` lies beside it."""
    machine = result.environment
    parts = [
        f"# Policies: {result.pair['target']} with {result.pair['assistant']}, {result.dtype}",
        f"{machine['processor']}, {machine['available_cores']} cores, torch {machine['torch']}, transformers "
        f"{machine['transformers']}.",
        "## An assistant that is no help",
        table(
            ("arm", "tokens/s", "x AR, all cores", "tokens by mode", "trials"),
            [
                (
                    title_of(name),
                    estimate(arm.tokens_per_s, 1),
                    estimate(arm.ratio),
                    ", ".join(f"{mode} {num}" for mode, num in arm.tokens_by_mode.items()) or "-",
                    str(arm.num_trials),
                )
                for name, arm in result.unrelated.items()
            ],
        ),
        "## A text that changes",
        table(
            ("arm", *(f"{number + 1}. {name}" for number, name in enumerate(SECTIONS)), "all"),
            [
                (title_of(name), *(number(each, 1) for each in section_ms(course, result.section_tokens)))
                for name, course in result.courses.items()
            ],
        ),
    ]
    if has_plot:
        parts.append("![Mode, speed and hit rate over the text](policies.png)")
    switches = result.courses[AUTO].switches
    parts += [
        'What mode "auto" did:',
        table(("tokens", "switch"), [(str(tokens), text) for tokens, text, _ in switches]),
        "## How to read this",
        NOTES,
    ]
    return "\n\n".join(parts)


def section_ms(course: Course, section_tokens: int) -> tuple[float, ...]:
    """Milliseconds per token in each part of the text, without the first token of all, and over all parts."""
    ends = [0, *(section_tokens * (part + 1) - 1 for part in range(len(SECTIONS)))]
    seconds = course.token_s
    parts = [(seconds[end] - seconds[start]) / (end - start) * 1e3 for start, end in pairwise(ends)]
    return (*parts, (seconds[ends[-1]] - seconds[0]) / ends[-1] * 1e3)


def plot_policies(result: PolicyResult) -> Figure:
    """Three panels over the tokens of the changing text: the mode, milliseconds per token, and the hit rate."""
    figure, (modes, speed, hits) = new_figure(9.0, 6.4, heights=(0.7, 3.0, 1.6))
    auto = result.courses[AUTO]
    _draw_modes(modes, auto)
    modes.set_title('Mode of the rounds in mode "auto", speed and hit rate', fontsize="medium")
    for name, course in result.courses.items():
        width = 2.0 if name == AUTO else 1.2
        speed.plot(*_speed(course), color=COURSE_COLOURS[name], linewidth=width, label=title_of(name))
    for name in (SSD, AUTO):
        hits.plot(*_hit_rate(result.courses[name]), color=COURSE_COLOURS[name], linewidth=1.5)
    speed.set_ylabel("ms per token")
    # The first tokens of a call may take as long as whatever else the machine had to do.
    speed.set_ylim(0, 3 * float(np.median(_speed(result.courses[AR_ALL_CORES])[1])))
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    hits.set_ylabel("hit rate")
    hits.set_ylim(-0.05, 1.05)
    hits.set_xlabel("tokens")
    for part, name in enumerate(SECTIONS):
        start = part * result.section_tokens
        speed.text(start + result.section_tokens / 2, speed.get_ylim()[1] * 0.97, name, ha="center", va="top")
        for panel in (modes, speed, hits):
            panel.axvline(start, color="black", linewidth=0.8, linestyle=":")
            panel.set_xlim(0, len(SECTIONS) * result.section_tokens)
    return figure


def _draw_modes(axes: Axes, course: Course) -> None:
    """A strip for each mode, as far as rounds were in it."""
    names = list(MODE_COLOURS)
    for start, mode, num_tokens, _ in course.rounds:
        axes.barh(names.index(mode), num_tokens, left=start, height=0.8, color=MODE_COLOURS[mode], linewidth=0)
    axes.set_yticks(range(len(names)), [name.upper() for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(labelbottom=False)


def _speed(course: Course) -> tuple[Sequence[float], Sequence[float]]:
    """Milliseconds per token over the latest tokens. Tokens of a round come at once, so this is no smaller window."""
    seconds = np.array(course.token_s)
    tokens = np.arange(SMOOTHED_TOKENS, len(seconds))
    return tokens.tolist(), ((seconds[tokens] - seconds[tokens - SMOOTHED_TOKENS]) / SMOOTHED_TOKENS * 1e3).tolist()


def _hit_rate(course: Course) -> tuple[Sequence[float], Sequence[float]]:
    """The hit rate over the latest outcomes that were looked up; a gap where none was for long."""
    tokens, rates, latest = list[float](), list[float](), list[bool]()
    for start, _, _, is_hit in course.rounds:
        if is_hit is None:
            if latest and len(latest) >= SMOOTHED_ROUNDS:
                tokens.append(start)
                rates.append(float("nan"))
            latest = []
            continue
        latest = [*latest[1 - SMOOTHED_ROUNDS :], is_hit]
        tokens.append(start)
        rates.append(sum(latest) / len(latest) if len(latest) >= SMOOTHED_ROUNDS // 2 else float("nan"))
    return tokens, rates


def write_policy_files(result: PolicyResult, folder: Path) -> tuple[str, ...]:
    """Writes `policies.json`, `policies.png` and `policies.md` into a folder that exists.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If one cannot be written.
    """
    # The figures first: whatever fails after that, they are not lost.
    (folder / "policies.json").write_text(json.dumps(result.to_dict()) + "\n", encoding="utf-8")
    plot_policies(result).savefig(folder / "policies.png", dpi=DPI)
    (folder / "policies.md").write_text(write_policies(result, has_plot=True), encoding="utf-8")
    return ("policies.json", "policies.png", "policies.md")
