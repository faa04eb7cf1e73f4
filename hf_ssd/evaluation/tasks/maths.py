"""GSM8K: word problems, scored by exact match on the final number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .task import Item, Score, Task, text_of

MARK = "####"  # GSM8K's own mark of the final answer
REQUEST = f"\n\nThink step by step. End with a line that holds {MARK} and the answer as a number."
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def final_number(text: str) -> str | None:
    """The first number after the last mark, or the last number where there is no mark; `None` if there is none.

    Currency signs, thousands separators and zeros after the point are left out: `"$1,200.00"` is `"1200"`.

    >>> final_number("5 + 7 = 12. #### $1,200.00")
    '1200'
    """
    _, mark, after = text.rpartition(MARK)
    found = NUMBER.findall(after) if mark else []
    number = found[0] if found else next(reversed(NUMBER.findall(text)), None)
    if number is None:
        return None
    number = number.replace(",", "").replace("$", "")
    return number.rstrip("0").rstrip(".") or "0" if "." in number else number


def _read(row: Mapping[str, Any], index: int, where: str) -> Item:
    answer = final_number(text_of(row, "answer", where))
    if answer is None:
        raise ValueError(f"`suite` must hold a number in `answer` in every row, but {where} has none.")
    return Item("gsm8k", str(index), text_of(row, "question", where) + REQUEST, {"answer": answer})


def _score(text: str, item: Item) -> Score:
    found = final_number(text)
    return Score(float(found == item.reference["answer"]), f"{found} for {item.reference['answer']}")


GSM8K = Task("gsm8k", "exact match", "hub:openai/gsm8k:main", _read, _score)
