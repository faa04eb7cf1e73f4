"""HumanEval: Python functions to write, scored by their unit tests (pass@1), which run in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..sandbox import run_checks
from .task import Item, Score, Task, text_of

REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}```"
# A block that the token limit cut off has no end.
CODE_BLOCK = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)


def program_of(text: str, item: Item) -> str:
    """The program that an answer stands for: the first code block, or all of it, after what was asked.

    What was asked is valid by itself (a function with a docstring) and holds the imports. An answer that has the whole
    function replaces it, one that does not goes on from there.
    """
    block = CODE_BLOCK.search(text)
    code = block.group(1) if block else text
    return f"{item.reference['code']}\n{code}\n"


def _read(row: Mapping[str, Any], index: int, where: str) -> Item:
    code = text_of(row, "prompt", where)
    reference = {"code": code, "test": text_of(row, "test", where), "entry_point": text_of(row, "entry_point", where)}
    return Item("humaneval", str(row.get("task_id", index)), REQUEST.format(code), reference)


def _score(text: str, item: Item) -> Score:
    checks = f"{item.reference['test']}\ncheck({item.reference['entry_point']})\n"
    outcome = run_checks(program_of(text, item), checks)
    return Score(float(outcome.passed), outcome.error or "")


HUMANEVAL = Task("humaneval", "pass@1", "hub:openai/openai_humaneval", _read, _score)
