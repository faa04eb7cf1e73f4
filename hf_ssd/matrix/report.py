"""The table of families, for people and for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .trials import FAILS, PASSES, REFUSED, SKIPPED, FamilyResult

HEADINGS = ("family", "class", "what is special", "attention", "verifies", "drafts ahead", "rows", "right", "result")
COLOURS = {PASSES: "green", REFUSED: "yellow", FAILS: "bold red", SKIPPED: "dim"}

KINDS = {
    "decoder-only": "Decoder-only models",
    "encoder-decoder": "Encoder-decoder models",
    "vision-language": "Vision-language models",
}

_EXPLANATION = """\
Each family is a tiny model with random weights, made from its config class. Its assistant has the same weights with
noise. Under each attention, for one row and for three rows of different lengths, the text of greedy decoding is
compared with plain `generate()`, and that of coupled sampling with mode `"ar"` and the same seed. A copy of the target
must also draft for it with hardly a rejection. What is refused must be refused by name, before the first token, as a
target and as an assistant.

The encoder of an encoder-decoder model reads a text or speech features. Its assistant reads them too, or takes the
states of the target's encoder. A vision-language target gets an image; its assistant is a text model with the weights
of its language model, which does not see the image.

- *attention*: those of eager and sdpa that transformers has for the family.
- *verifies*: whether a target verifies trees of draft tokens when decoding greedily, or chains.
- *drafts ahead*: whether an assistant drafts for several outcomes at once; otherwise it drafts just in time.
- *rows*: whether a target decodes the rows of a batch together.
- *right*: share of the assistant's tokens that were right, greedily, with one row.

`hf-ssd arguments` does the same for random arguments of `generate()`.
"""


def summary(results: Sequence[FamilyResult]) -> str:
    """How many came to what."""
    counts = Counter(each.result for each in results)
    parts = [f"{counts[name]} {word}" for name, word in ((PASSES, "pass"), (REFUSED, "are refused"), (FAILS, "fail"))]
    if counts[SKIPPED]:
        parts.append(f"{counts[SKIPPED]} are skipped")
    num_families = len({each.model_type for each in results})
    return f"{len(results)} models of {num_families} families: {', '.join(parts)}."


def rich_table(results: Sequence[FamilyResult]) -> Table:
    """For a terminal."""
    table = Table(box=SIMPLE_HEAD, title=f"transformers {transformers.__version__}", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading == "right" else "left", overflow="fold")
    for each in results:
        table.add_row(*_cells(each), style=COLOURS[each.result] if each.result != PASSES else None)
    return table


def write_markdown(results: Sequence[FamilyResult], path: Path, command: str) -> None:
    """Writes the table as a page of the documentation.

    Args:
        results: One per model.
        path: The file; it is replaced.
        command: What printed it.

    Raises:
        OSError: If it cannot be written.
    """
    parts = [
        "# Model families",
        _EXPLANATION.rstrip(),
        f"`{command}` printed this page, with transformers {transformers.__version__}. {summary(results)}",
    ]
    for kind, title in KINDS.items():
        rows = [_cells(each) for each in results if each.kind == kind]
        if rows:
            table = [HEADINGS, ("---",) * len(HEADINGS), *rows]
            lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
            parts += [f"## {title}", "\n".join(lines)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _cells(result: FamilyResult) -> tuple[str, ...]:
    ahead = {None: "", True: "yes", False: "no"}[result.drafts_ahead]
    right = "" if result.acceptance is None else f"{result.acceptance:.2f}"
    outcome = result.result if result.reason is None else f"{result.result}: {_short(result.reason)}"
    return (
        result.model_type,
        result.architecture or "",
        result.remark,
        ", ".join(result.attentions),
        result.drafts or "",
        ahead,
        result.rows or "",
        right,
        outcome,
    )


def _short(reason: str) -> str:
    """The part of a refusal that says what the family does."""
    return reason.split(", but ")[-1].split(". ")[0]
