"""One forward for tokens of several rows, each of which attends to a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import sdpa_mask

from ..tree_attention import tree_attention, unknown_arguments
from .tree_cache import SlabCache, SlabLayer

NAME = "hf_ssd_packed"


@dataclass(frozen=True)
class Segment:
    """The tokens of one row in a packed forward.

    Args:
        num_tokens: How many follow those of the segment before.
        cache: Of the row.
        tail_mask: What they see, as [`tree_attention`] takes it.
    """

    num_tokens: int
    cache: SlabCache
    tail_mask: torch.Tensor


class PackedCache(DynamicCache):
    """The caches of several rows, as a model's forward sees them: tokens of all rows follow each other as one row.

    What `update` returns for keys is a list of each row's, which only [`register`]ed attention can read.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        Cache.__init__(self, layer_class_to_replicate=SlabLayer)
        self.segments = segments

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Sequence[Segment]]:
        sizes = [segment.num_tokens for segment in self.segments]
        parts = zip(self.segments, key_states.split(sizes, dim=2), value_states.split(sizes, dim=2), strict=True)
        return [segment.cache.update(key, value, layer_idx) for segment, key, value in parts], self.segments


def register() -> None:
    """Makes the attention known to transformers as `NAME`."""
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: list[tuple[torch.Tensor, torch.Tensor]],
    value: Sequence[Segment],
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call; `key` and `value` are what [`PackedCache`] returned.

    Raises:
        NotImplementedError: If the model wants more than this can do.
    """
    unknown = unknown_arguments(kwargs)
    if unknown:
        raise NotImplementedError(f"Packed attention is for plain scores, but got {unknown}.")
    queries = query.split([segment.num_tokens for segment in value], dim=2)
    outputs = [
        tree_attention(part, keys, values, segment.tail_mask, scaling)
        for part, (keys, values), segment in zip(queries, key, value, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None
