"""Assistants that go wrong. In a module of its own, so that the assistant's process can import it."""

from __future__ import annotations

import random
import time

import torch
from transformers import LlamaForCausalLM


class RaisesLater(LlamaForCausalLM):
    """Works while it is tried out and for a few rounds, then raises in each forward."""

    num_forwards_left = 40

    def forward(self, *args, **kwargs):
        self._count()
        return super().forward(*args, **kwargs)

    def _count(self) -> None:
        type(self).num_forwards_left -= 1
        if type(self).num_forwards_left < 0:
            raise ArithmeticError("the assistant broke")

    @property
    def base_model(self):
        return self  # run whole, through the forward above


class RaisesOnceTold(RaisesLater):
    """Works until the class is told to break."""

    is_told = False

    def _count(self) -> None:
        if self.is_told:
            raise ArithmeticError("the assistant broke")


class RaisesAtOnce(LlamaForCausalLM):
    """Cannot even be moved to its device."""

    def eval(self):
        raise ArithmeticError("the assistant broke at once")


class HasNoMemory(LlamaForCausalLM):
    """Does not fit where it is moved to, some times; it is moved in the assistant's process."""

    def eval(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class TakesItsTime(LlamaForCausalLM):
    """Gives what Llama does, after a different time in each forward."""

    def forward(self, *args, **kwargs):
        time.sleep(random.random() * 0.004)
        return super().forward(*args, **kwargs)

    @property
    def base_model(self):
        return self  # run whole, through the forward above
