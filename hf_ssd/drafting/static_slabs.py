"""Slabs of a fixed size for keys and values, and what reads and writes them at the same addresses every time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from ..tree_attention import masked_attention, unknown_arguments
from .tree_cache import SlabCache, SlabLayer

ATTENTION = "hf_ssd_static"

Slabs = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer


def make_slabs(like: SlabCache, capacity: int) -> Slabs:
    """Slabs for `capacity` entries shaped like those of `like`. Zeros: what a mask hides must still be finite."""

    def slab(entries: torch.Tensor) -> torch.Tensor:
        return entries.new_zeros((*entries.shape[:-2], capacity, entries.shape[-1]))

    return [(slab(layer.keys), slab(layer.values)) for layer in like.layers]


class RowCache(SlabCache):
    """The cache of a row, whose slabs static steps write to as well. Only the latest one on the same slabs is valid.

    Args:
        slabs: Where it begins. If they become too small it grows out of them as any [`SlabCache`] does, and can be
            moved to others.
    """

    layers: list[SlabLayer]

    def __init__(self, slabs: Slabs) -> None:
        super().__init__()
        self.layers = [SlabLayer() for _ in slabs]
        self.move(slabs)

    def move(self, slabs: Slabs) -> None:
        """Copies all entries to other slabs, which must have room, and goes on there."""
        length = self.get_seq_length()
        self._slabs = slabs
        for layer, slab in zip(self.layers, slabs, strict=True):
            if length:
                slab[0][..., :length, :], slab[1][..., :length, :] = layer.keys, layer.values
            layer.lazy_initialization(*slab)
            layer._slabs = slab
        self.show(length)

    def is_on(self, slabs: Slabs) -> bool:
        """Whether these hold its entries now."""
        return self._slabs is slabs and self.layers[0]._slabs is slabs[0]

    def show(self, length: int) -> None:
        """Takes the first `length` entries of the slabs for the row's."""
        for layer, (keys, values) in zip(self.layers, self._slabs, strict=True):
            layer.keys, layer.values = keys[..., :length, :], values[..., :length, :]


class _StaticLayer(CacheLayerMixin):
    """Writes to given slots of its slabs and shows all of them; what is seen is for the mask to say."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(-2, self._slots, key_states)
        self.values.index_copy_(-2, self._slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2], 0

    def get_seq_length(self) -> int:
        return 0  # nothing goes by it: positions and masks are given

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class StaticCache(Cache):
    """The cache that a static step hands to the model.

    Args:
        slabs: Written in place.
        slots: Where the step's entries go, int64 of shape `(num_tokens,)`, read at each step.
    """

    def __init__(self, slabs: Slabs, slots: torch.Tensor) -> None:
        super().__init__(layers=[_StaticLayer(keys, values, slots) for keys, values in slabs])


def register_attention() -> None:
    """Makes the attention known to transformers as `ATTENTION`."""
    AttentionInterface.register(ATTENTION, _attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one row to all slots of a slab, through a full mask.

    Always by the same kernel: a graph has one.

    Raises:
        NotImplementedError: If the model wants more than this can do.
    """
    unknown = unknown_arguments(kwargs)
    if unknown or attention_mask is None or query.shape[0] != 1 or attention_mask.shape[-1] != key.shape[-2]:
        raise NotImplementedError(f"Static attention is for single rows, full masks and plain scores ({unknown}).")
    return masked_attention(query, key, value, attention_mask[0, 0], scaling).transpose(1, 2), None
