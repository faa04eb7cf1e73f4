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

    Only the kept entries move, so it takes as long for a long prefix as for a short one.

    Args:
        cache: A dynamic cache with full-attention layers.
        num_prefix: Length of the shared prefix.
        slots: Positions in the cache, each at or after `num_prefix`.
    """
    end = num_prefix + len(slots)
    is_in_place = list(slots) == list(range(num_prefix, end))
    index = None
    for layer in cache.layers:
        if layer.keys is None:
            continue
        if not is_in_place:
            if index is None or index.device != layer.keys.device:
                index = torch.tensor(slots, dtype=torch.long, device=layer.keys.device)
            # Gathered before it is written: an entry may be due where another one still lies.
            layer.keys[..., num_prefix:end, :] = layer.keys.index_select(-2, index)
            layer.values[..., num_prefix:end, :] = layer.values.index_select(-2, index)
        layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
