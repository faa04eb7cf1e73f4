"""Tasks: what a model is asked, and how its answer is scored."""

from __future__ import annotations

from .humaneval import HUMANEVAL
from .maths import GSM8K
from .rouge import COPYING, SUMMARISATION
from .task import Item, Task, read_items

TASKS = {task.name: task for task in (GSM8K, HUMANEVAL, SUMMARISATION, COPYING)}

__all__ = ["TASKS", "Item", "Task", "read_items"]
