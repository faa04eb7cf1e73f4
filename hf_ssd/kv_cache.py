"""Roll back, select and size: what speculation does to Hugging Face `Cache` objects. All of it in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache


def start_recording(cache: Cache) -> None:
    """Makes layers with a fixed window keep what `roll_back` may need.

    Call it after the prefill, which would otherwise keep the whole prompt.
    """
    cache.activate_past_recording()


def stop_recording(cache: Cache) -> None:
    """Undoes `start_recording`, for a cache that is handed back to the caller."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def roll_back(cache: Cache, num_tokens: int) -> None:
    """Removes the last `num_tokens` entries. Also due when that is 0: windowed layers shrink only here."""
    cache.crop(-num_tokens)


def keep_branch(cache: Cache, num_prefix: int, slots: Sequence[int]) -> None:
    """Keeps the first `num_prefix` entries and after them those in `slots`, in that order.

    Args:
        cache: A dynamic cache with full-attention layers.
        num_prefix: Length of the shared prefix.
        slots: Positions in the cache, each at or after `num_prefix`.
    """
    is_contiguous = list(slots) == list(range(num_prefix, num_prefix + len(slots)))
    for layer in cache.layers:
        if layer.keys is None:
            continue
        if is_contiguous:
            layer.keys = layer.keys[..., : num_prefix + len(slots), :]
            layer.values = layer.values[..., : num_prefix + len(slots), :]
            continue
        index = torch.tensor(slots, dtype=torch.long, device=layer.keys.device)
        layer.keys = torch.cat([layer.keys[..., :num_prefix, :], layer.keys.index_select(-2, index)], dim=-2)
        layer.values = torch.cat([layer.values[..., :num_prefix, :], layer.values.index_select(-2, index)], dim=-2)
