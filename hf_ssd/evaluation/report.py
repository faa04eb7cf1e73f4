"""An evaluation as a report in Markdown, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from ..bench.markdown import estimate, number, table
from ..bench.titles import name_temperature, title_of
from .results import ClockFigures, Difference, Evaluation, TaskFigures

MAX_SHOWN_DIFFERENCES = 40
NOTES = """\
- **AR** is transformers' `generate()`; **SD** and **SSD** are hf_ssd. **Score** is the mean over the items, **- AR**
  the mean difference to AR on the same item; in brackets is the interval that it spans when items are drawn anew
  (bootstrap, 95 %). Speeds are medians over the answers.
- **Same text** counts answers that are AR's token for token, end of text included; **same tokens** is the share of AR's
  tokens before a difference.
- Scores, texts and differences come out the same when the run is repeated in float32, or was interrupted; what is
  under *Speed* depends on the clock. In low precision how a near-tie falls depends on how many tokens are verified at
  once, and that on the clock too: there, samples that were finished are the same.
"""
GAP_NOTES = """\
**Gap** is that between the two highest logits that AR chose from at the first token that differs, **to the arm's
token** how far that token is below AR's. **Steps** is this over the distance between neighbouring numbers of the
precision at that size: a few steps are what rounding does.
"""
DRAW_NOTES = """\
- **p, score** is the chance of a score this far from AR's by permutation of the samples of each item, **p, first
  tokens** that of first tokens this different (total variation, by permutation). Both are for one comparison each.
"""


def write_evaluation(result: Evaluation) -> str:
    """The report."""
    parts = [
        f"# Accuracy: {result.pair['target']} with {result.pair['assistant']}, {result.dtype}",
        _conditions(result),
    ]
    is_greedy = not result.generation["do_sample"]
    for task in dict.fromkeys(figures.task for figures in result.tasks):
        of_task = [figures for figures in result.tasks if figures.task == task]
        parts += [f"## {task}: {of_task[0].measure}", _scores(of_task, is_greedy)]
    if result.differences:
        parts += ["## First differences", _summary(result.differences), _differences(result.differences), GAP_NOTES]
    parts += ["## Speed", _clock(result.clock)]
    parts += [
        f"{title_of(figures.arm)} went on without its assistant: {figures.degraded}"
        for figures in result.clock
        if figures.degraded
    ]
    return "\n\n".join([*parts, "## How to read this", NOTES if is_greedy else NOTES + DRAW_NOTES])


def write_files(result: Evaluation, folder: Path) -> tuple[str, ...]:
    """Writes `evaluation.json` and `report.md` into a folder that exists.

    Raises:
        OSError: If one cannot be written.
    """
    (folder / "evaluation.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(write_evaluation(result), encoding="utf-8")
    return ("samples.jsonl", "evaluation.json", "report.md")


def _conditions(result: Evaluation) -> str:
    machine, generation = result.environment, result.generation
    temperature = generation["temperature"] if generation["do_sample"] else 0
    seeds = f", {generation['seeds']} sample(s) per item" if generation["do_sample"] else ""
    sources = "; ".join(f"{name} from {source}" for name, source in result.suites.items())
    return (
        f"{name_temperature(temperature).capitalize()}{seeds}, up to {generation['max_new_tokens']} new tokens; "
        f"{sources}. {machine['processor']}, {machine['available_cores']} cores; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, Python {machine['python']}, {machine['system']}."
    )


def _scores(figures: list[TaskFigures], is_greedy: bool) -> str:
    columns = ("same text", "same tokens") if is_greedy else ("p, score", "p, first tokens")
    rows = []
    for arm in figures:
        if is_greedy:
            cells = [" of ".join(map(str, arm.identical)) if arm.identical else "-", number(arm.token_share, 3)]
        else:
            first = arm.first_tokens
            cells = [number(arm.score_p_value, 3), number(first["permutation_p_value"] if first else None, 3)]
        rows.append(
            [title_of(arm.arm), str(arm.num_items), estimate(arm.score, 3), estimate(arm.difference, 3), *cells]
        )
    return table(("", "items", "score", "- AR", *columns), rows)


def _summary(differences: tuple[Difference, ...]) -> str:
    steps = [d.token_gap / d.step for d in differences if d.token_gap is not None and d.step]
    gaps = [d.token_gap for d in differences if d.token_gap is not None]
    if not gaps:
        return f"{len(differences)} texts end where AR's goes on, or go on where it ends."
    return (
        f"{len(differences)} texts leave AR's. There, the arm's token is at most {max(gaps):.3g} below AR's in AR's "
        f"own logits ({max(steps):.3g} steps), in the median {median(gaps):.3g} ({median(steps):.3g} steps)."
    )


def _differences(differences: tuple[Difference, ...]) -> str:
    shown = sorted(differences, key=lambda d: -(d.token_gap or 0))[:MAX_SHOWN_DIFFERENCES]
    rows = [
        [
            title_of(d.arm),
            d.task,
            d.item,
            str(d.position),
            number(d.top_two_gap, 4),
            number(d.token_gap, 4),
            number(d.token_gap / d.step if d.token_gap is not None and d.step else None, 1),
        ]
        for d in shown
    ]
    rest = len(differences) - len(shown)
    more = f"\n\n{rest} more with smaller gaps are in evaluation.json." if rest else ""
    return table(("", "task", "item", "token", "gap", "to the arm's token", "steps"), rows) + more


def _clock(clock: tuple[ClockFigures, ...]) -> str:
    rows = []
    for figures in clock:
        found = figures.acceptance or {}
        by_position = [f"{rate:.2f}" for rate in found.get("acceptance_by_position", ())[:4]]
        rows.append(
            [
                title_of(figures.arm),
                number(figures.tokens_per_s, 1),
                number(figures.ratio_to_ar),
                number(found.get("tokens_per_round")),
                number(found.get("acceptance")),
                " ".join(by_position) or "-",
                number(found.get("hit_rate")),
            ]
        )
    headings = ("", "tokens/s", "x AR", "tokens/round", "acceptance", "at positions 1 to 4", "hit rate")
    return table(headings, rows)
