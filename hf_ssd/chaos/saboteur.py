"""An assistant that goes wrong from inside. In a module of its own, so that the assistant's process can import it."""

from __future__ import annotations

import gc
import os
import pickle
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

HANG_S = 4.0  # longer than a call waits; a thread cannot be ended, and has to come back to leave
NUM_STARTING_FORWARDS = 12  # in which an assistant is tried out when it is loaded, at most


class Saboteur(LlamaForCausalLM):
    """Drafts as its weights say until a certain forward, at which something happens.

    Attributes:
        mischief: What happens; a key of `MISCHIEFS`.
        num_good_forwards: Forwards before that.
    """

    mischief = "raises"
    num_good_forwards = 0

    @classmethod
    def of(cls, model: PreTrainedModel, mischief: str, num_good_forwards: int) -> Saboteur:
        """A saboteur with a copy of a model's weights."""
        saboteur = cls(model.config).eval()
        saboteur.load_state_dict(model.state_dict())
        saboteur.mischief = mischief
        saboteur.num_good_forwards = NUM_STARTING_FORWARDS + num_good_forwards
        return saboteur

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_good_forwards -= 1
        outputs = super().forward(*args, **kwargs)
        # A hang is over once.
        if self.num_good_forwards == -1 or (self.num_good_forwards < -1 and self.mischief != "hangs"):
            MISCHIEFS[self.mischief](outputs)
        return outputs

    @property
    def base_model(self) -> Saboteur:
        return self  # run whole, through the forward above


def _raise(kind: type[Exception], message: str) -> Callable[[Any], None]:
    def mischief(outputs: Any) -> None:
        raise kind(message)

    return mischief


def _write(data: bytes) -> None:
    """Writes to the caller, out of turn. In the assistant's process there is one connection."""
    for each in gc.get_objects():
        if type(each) is Connection:
            each.send_bytes(data)


def _write_without_end(outputs: Any) -> None:
    for each in gc.get_objects():
        if type(each) is Connection:
            os.write(each.fileno(), struct.pack("!iQ", -1, 2**60))


class FromAnotherVersion:
    """Stands for a message that this version does not know."""


def _scores_of_nothing(outputs: Any) -> None:
    outputs.logits.fill_(float("nan"))


MISCHIEFS: dict[str, Callable[[Any], None]] = {
    "raises": _raise(ArithmeticError, "the assistant broke"),
    "is out of memory": _raise(MemoryError, "no memory left"),
    "is out of device memory": _raise(torch.OutOfMemoryError, "CUDA out of memory"),
    "scores are NaN": _scores_of_nothing,
    "dawdles": lambda outputs: time.sleep(0.02),
    "hangs": lambda outputs: time.sleep(HANG_S),
    "leaves": lambda outputs: os._exit(3),
    "aborts": lambda outputs: os.abort(),
    "answers with rubbish": lambda outputs: _write(b"\x80rubbish"),
    "answers with nothing": lambda outputs: _write(b""),
    "answers with a message without end": _write_without_end,
    "answers from another version": lambda outputs: _write(pickle.dumps(FromAnotherVersion())),
}
