"""The assistant's cache: appending to it and keeping a branch of it cost what is new, not what is there."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicIndexedLayer, EncoderDecoderCache

MIN_SPARE_TOKENS = 512  # a few megabytes for a small model, untouched until used


class SlabLayer(DynamicIndexedLayer):
    """Keys and values of one layer, as views of slabs with room for more.

    `DynamicLayer` concatenates: each step of a draft copies the whole context. Here a step writes its own entries. A
    slab that is full is copied once to one half as large again.

    `keys` and `values` always start where their slabs start, so shortening the views, as `crop` and
    [`~kv_cache.keep_branch`] do, is all it takes to drop entries. What an indexer of sparse attention keeps beside them
    is concatenated as everywhere.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._slabs: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values of shape `(batch_size, num_heads, num_tokens, head_dim)`.

        Returns:
            All keys and values, as views that later updates leave alone but `keep_branch` may write to.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._slabs is None or end > self._slabs[0].shape[-2]:
            capacity = end + max(end // 2, MIN_SPARE_TOKENS)
            self._slabs = (
                _grown(self.keys, key_states, start, capacity),
                _grown(self.values, value_states, start, capacity),
            )
        key_slab, value_slab = self._slabs
        key_slab[..., start:end, :] = key_states
        value_slab[..., start:end, :] = value_states
        self.keys, self.values = key_slab[..., :end, :], value_slab[..., :end, :]
        return self.keys, self.values


class SlabCache(DynamicCache):
    """A `DynamicCache` of [`SlabLayer`]s for one row. All layers keep everything: windows are written into masks."""

    def __init__(self) -> None:
        Cache.__init__(self, layer_class_to_replicate=SlabLayer)

    @property
    def capacity(self) -> int:
        """Entries that there is memory for."""
        slabs = [layer._slabs for layer in self.layers if isinstance(layer, SlabLayer)]
        return max((slab[0].shape[-2] for slab in slabs if slab is not None), default=0)


class CrossCache(SlabCache):
    """The cache of a row whose tokens also attend to what an encoder read.

    Args:
        states: That, of shape `(1, num_states, hidden_size)`.
        mask: 1 for each state that may be attended to, of shape `(1, num_states)`; `None` for all.
    """

    def __init__(self, states: torch.Tensor, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.states, self.mask = states, mask
        self._cross = DynamicCache()  # keys and values of the states, computed in the first forward

    @property
    def for_model(self) -> EncoderDecoderCache:
        """As models want it; it writes to this cache."""
        return EncoderDecoderCache(self, self._cross)


def _grown(old: torch.Tensor, new: torch.Tensor, num_old: int, capacity: int) -> torch.Tensor:
    """A slab for `capacity` entries shaped like those of `new`, of which the first `num_old` are those of `old`."""
    slab = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
    if num_old:
        slab[..., :num_old, :] = old
    return slab
