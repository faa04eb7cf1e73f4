"""What tells whether a model is still as a worker knows it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLE_BYTES = 64  # of each tensor: most of the time it takes is spent on fetching them from memory


@dataclass(frozen=True)
class ModelState:
    """What a model was like at some time.

    Args:
        places: Address and size of each tensor. Others mean that weights have been replaced.
        values: What differs once weights have been changed in place: version counters, and a sample of each tensor,
            because changes through `.data`, as PEFT makes them to merge adapters, are not counted.
        adapters: Which PEFT adapters are in use. They are switched without touching a tensor.
    """

    places: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, ...], bytes]
    adapters: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state of `model` now. It takes a few milliseconds for a model of some hundred tensors."""
        tensors = list(plain_tensors(model))
        return cls(_places(tensors), (_versions(tensors), _sample(tensors)), _adapters(model))


def plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that hold a model's weights: those inside of quantised ones too."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield from _inner_tensors(tensor)


def weight_places(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """What tells whether a model's weights have been replaced, rather than changed in place."""
    return _places(list(plain_tensors(model)))


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def _places(tensors: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)


def _versions(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    # Tensors made under inference mode count none.
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _sample(tensors: list[torch.Tensor]) -> bytes:
    """A digest of some bytes of each tensor, spread over it."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_meta or tensor.layout is not torch.strided:
            continue
        storage = tensor.detach().untyped_storage()
        # An odd step, so that it is not the same byte of each number.
        step = storage.nbytes() // SAMPLE_BYTES | 1
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        parts.setdefault(tensor.device, []).append(whole[::step])
    digest = hashlib.blake2b(digest_size=16)
    for each in parts.values():
        digest.update(torch.cat(each).cpu().numpy().tobytes())
    return digest.digest()


def _adapters(model: nn.Module) -> tuple[Any, ...]:
    """Of each of PEFT's layers what is active, whether that is disabled, what is merged, and the scales."""
    return tuple(
        (
            str(getattr(module, "_active_adapter", None)),
            module._disable_adapters,
            tuple(getattr(module, "merged_adapters", ())),
            tuple(getattr(module, "scaling", {}).items()),
        )
        for module in model.modules()
        if hasattr(module, "_disable_adapters")
    )
