"""What a task is, and how its items are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...bench.suites import read_rows


@dataclass(frozen=True)
class Item:
    """One thing to do.

    Args:
        task: Name of its task.
        name: Its name within the task.
        prompt: What the model is asked, without a chat template.
        reference: What the score needs to know.
    """

    task: str
    name: str
    prompt: str
    reference: Mapping[str, str] = field(compare=False)  # it follows from the others, and cannot be hashed


@dataclass(frozen=True)
class Score:
    """How good an answer is.

    Args:
        value: Between 0 and 1.
        note: What was found in it, or what went wrong.
    """

    value: float
    note: str = ""


@dataclass(frozen=True)
class Task:
    """A kind of item.

    Args:
        name: What `--suite` calls it.
        measure: What its score is called.
        source: Where its rows come from unless the user says otherwise, as `read_rows` takes it.
        read: Makes an item of a row, its index and what to call it in an error; `None` for a row of another task.
        score: Scores an answer.
        needs: A package that the score needs, beyond those of the library.
    """

    name: str
    measure: str
    source: str
    read: Callable[[Mapping[str, Any], int, str], Item | None]
    score: Callable[[str, Item], Score]
    needs: str | None = None


def read_items(task: Task, source: str | None = None, limit: int | None = None) -> tuple[Item, ...]:
    """The first items of a task.

    Args:
        task: Which task.
        source: A JSONL file, or `hub:` and a data set; `None` takes the task's own.
        limit: How many; `None` takes all.

    Raises:
        ValueError: If a row is no item of the task, or there is none.
        OSError: If the source cannot be read.
        ImportError: If a package is missing.
    """
    items: list[Item] = []
    for index, (row, where) in enumerate(read_rows(source or task.source)):
        item = task.read(row if isinstance(row, Mapping) else {}, index, where)
        if item is not None:
            items.append(item)
        if limit is not None and len(items) == limit:
            break
    if not items:
        raise ValueError(f"`suite` must hold items of {task.name!r}, but {source or task.source} has none.")
    return tuple(items)


def text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    """A field of a row that must be there.

    Raises:
        ValueError: If it is not.
    """
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`suite` must hold a text in `{field}` in every row, but {where} has {value!r}.")
    return value
