"""The assistant's work for several rows at once.

An engine does not call the assistant: it is a coroutine that asks for forwards and projections and is sent the results.
So what the engines of a batch ask for at the same time is done in one go, in which weights are read once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .assistant import AssistantModel, Forward

T = TypeVar("T")


@dataclass(frozen=True)
class Projection:
    """Asks for the logits of hidden states over the whole vocabulary."""

    hidden: torch.Tensor


Work = Generator["Forward | Projection", torch.Tensor, T]


@torch.inference_mode()
def work_together(assistant: AssistantModel, works: Sequence[Work[T]]) -> list[T]:
    """Runs coroutines to their ends, and in each round does what all of them ask for.

    Returns:
        What each of them returns.
    """
    results: list[Any] = [None] * len(works)
    asked: dict[int, Forward | Projection] = {}

    def advance(index: int, answer: torch.Tensor | None) -> None:
        try:
            asked[index] = works[index].send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(works)):
        advance(index, None)
    while asked:
        current = dict(asked)
        asked.clear()
        answers: dict[int, torch.Tensor] = {}
        forwards = {index: each for index, each in current.items() if isinstance(each, Forward)}
        if forwards:
            answers.update(zip(forwards, assistant.forward_all(list(forwards.values())), strict=True))
        projections = {index: each for index, each in current.items() if isinstance(each, Projection)}
        if projections:
            sizes = [len(each.hidden) for each in projections.values()]
            logits = assistant.logits(torch.cat([each.hidden for each in projections.values()]))
            answers.update(zip(projections, logits.split(sizes), strict=True))
        for index in current:
            advance(index, answers[index])
    return results
