"""Streamers and criteria that look on, or interfere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class Listener(BaseStreamer):
    """Keeps what it is given.

    Args:
        act_at: After so many tokens `action` is called.
        action: May raise.
    """

    def __init__(self, act_at: int = -1, action: Callable[[], Any] = lambda: None) -> None:
        self.puts: list[list[int]] = []
        self.num_ends = 0
        self._act_at, self._action = act_at, action

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())
        if len(self.puts) == self._act_at + 1:  # the first is the prompt
            self._action()

    def end(self) -> None:
        self.num_ends += 1


class Criterion(StoppingCriteria):
    """Calls `action` with the ids of each step; stops a row where that gives True."""

    def __init__(self, action: Callable[[torch.Tensor], Any]) -> None:
        self._action = action

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), bool(self._action(input_ids)), device=input_ids.device)


def take_time() -> StoppingCriteriaList:
    """Criteria that make a tiny target as slow as a real one, so that its assistant has time to draft ahead."""
    return StoppingCriteriaList([Criterion(lambda ids: time.sleep(0.005))])
