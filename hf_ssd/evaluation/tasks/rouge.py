"""Summaries and copies, scored by ROUGE-L (F-measure) against a reference, with the package `rouge_score`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from .task import Item, Score, Task, text_of

SUMMARISE, COPY = "Summarize: ", "Repeat the following text word for word.\n\n"
SUMMARISATION_CATEGORY = "summarization"  # as Spec-Bench spells it
# What can be copied, the first field that a row has.
COPY_FIELDS = ("text", "article", "question", "prompt", "turns")


@cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ImportError('ROUGE needs the package `rouge_score`: pip install "hf-ssd[eval]".') from None
    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(text: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, between 0 and 1."""
    return float(_scorer().score(reference, text)["rougeL"].fmeasure)


def _score(text: str, item: Item) -> Score:
    return Score(rouge_l(text, item.reference["text"]))


def _read_summarisation(row: Mapping[str, Any], index: int, where: str) -> Item | None:
    """Rows of CNN/DailyMail, or those of Spec-Bench that ask for a summary."""
    if "highlights" in row:
        return Item(
            "summarisation", str(index), SUMMARISE + text_of(row, "article", where), {"text": row["highlights"]}
        )
    if row.get("category") != SUMMARISATION_CATEGORY:
        return None
    prompt, reference = row["turns"][0], row["reference"][0]
    return Item("summarisation", str(row.get("question_id", index)), prompt, {"text": reference})


def _read_copying(row: Mapping[str, Any], index: int, where: str) -> Item:
    field = next((name for name in COPY_FIELDS if name in row), COPY_FIELDS[0])
    text = row[field][0] if field == "turns" else text_of(row, field, where)
    return Item("copying", str(row.get("question_id", index)), COPY + text, {"text": text})


SUMMARISATION = Task(
    "summarisation", "ROUGE-L", "hub:abisee/cnn_dailymail:3.0.0", _read_summarisation, _score, needs="rouge_score"
)
COPYING = Task("copying", "ROUGE-L", "hub:openai/gsm8k:main", _read_copying, _score, needs="rouge_score")
