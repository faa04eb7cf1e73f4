"""What is remembered of which calls."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

from hf_ssd import SSDConfig
from hf_ssd.planning import PlanMemories
from hf_ssd.planning.memories import MAX_KINDS

AUTO = SSDConfig(mode="auto")


class Model:
    """Stands for one."""


def find(memories: PlanMemories, target: Model, *assistants: Model, config: SSDConfig = AUTO, num_rows: int = 1):
    return memories.find(target, assistants, config, num_rows=num_rows, samples=False)


def test_calls_of_one_kind_share_a_memory() -> None:
    memories, target, assistant = PlanMemories(), Model(), Model()
    memory = find(memories, target, assistant)
    for config in (replace(AUTO, seed=3), replace(AUTO, trace=True), replace(AUTO, token_budget=50)):
        assert find(memories, target, assistant, config=config) is memory
    others = [
        find(memories, Model(), assistant),
        find(memories, target, Model()),
        find(memories, target, assistant, Model()),
        find(memories, target, assistant, num_rows=2),
        find(memories, target, assistant, config=replace(AUTO, backend="stream")),
    ]
    assert len({id(each) for each in [memory, *others]}) == 6


def test_nothing_is_remembered_where_nothing_can_change() -> None:
    memories, target = PlanMemories(), Model()
    assert find(memories, target, Model(), config=SSDConfig()) is None
    assert not memories._kinds


def test_models_are_not_held_and_another_one_is_not_taken_for_one_that_is_gone() -> None:
    memories, target, assistant = PlanMemories(), Model(), Model()
    memory, gone = find(memories, target, assistant), weakref.ref(assistant)
    del assistant
    gc.collect()
    assert gone() is None
    # Among as many there is often one at the place of the old.
    assert all(find(memories, target, each) is not memory for each in [Model() for _ in range(100)])
    del target
    gc.collect()
    assert not memories._kinds


def test_the_latest_kinds_are_remembered() -> None:
    memories, target, assistant = PlanMemories(), Model(), Model()
    first, second = (find(memories, target, assistant, num_rows=num_rows) for num_rows in (1, 2))
    for num_rows in range(3, MAX_KINDS + 2):
        find(memories, target, assistant, num_rows=1)
        find(memories, target, assistant, num_rows=num_rows)
    assert len(memories._kinds[target]) == MAX_KINDS
    assert find(memories, target, assistant, num_rows=1) is first
    assert find(memories, target, assistant, num_rows=2) is not second
