"""Roll back, select and size: what speculation does to Hugging Face `Cache` objects. All of it in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .decoders import self_attention_cache


def checked_cache(cache: Cache | None, model: object) -> Cache:
    """The cache of a model after its prefill.

    Raises:
        ValueError: If it cannot be rolled back.
    """
    if cache is None or not cache.is_croppable:
        raise ValueError(
            f"The cache of {type(model).__name__} ({type(cache).__name__}) cannot be rolled back, which drafting "
            'needs. Leave `cache_implementation` unset, or use `ssd_config={"mode": "ar"}`.'
        )
    return cache


def start_recording(cache: Cache) -> None:
    """Makes layers with a fixed window keep what `roll_back` may need.

    Call it after the prefill, which would otherwise keep the whole prompt.
    """
    cache.activate_past_recording()


def stop_recording(cache: Cache) -> None:
    """Undoes `start_recording`, for a cache that is handed back to the caller."""
    for layer in self_attention_cache(cache).layers:
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
    for layer in self_attention_cache(cache).layers:
        if layer.keys is None:
            continue
        if not is_in_place:
            if index is None or index.device != layer.keys.device:
                index = torch.tensor(slots, dtype=torch.long, device=layer.keys.device)
            # Gathered before it is written: an entry may be due where another one still lies.
            layer.keys[..., num_prefix:end, :] = layer.keys.index_select(-2, index)
            layer.values[..., num_prefix:end, :] = layer.values.index_select(-2, index)
        layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
        if getattr(layer, "indexer_keys", None) is not None:  # of sparse attention, shape (batch, slots, head_dim)
            if index is not None:
                layer.indexer_keys[:, num_prefix:end] = layer.indexer_keys.index_select(1, index)
            layer.indexer_keys = layer.indexer_keys[:, :end]


def keeps_everything(cache: Cache | None) -> bool:
    """Whether entries stay until they are taken back, and where they are: windows, fixed sizes and states give some up.

    Those of an offloaded cache are on their way to another device while nobody looks, so they may be cut, not moved.
    """
    if cache is None:
        return True
    layers = self_attention_cache(cache).layers
    return not _is_offloaded(cache) and all(type(layer) is DynamicLayer for layer in layers)


def has_windows(cache: Cache | None) -> bool:
    """Whether layers keep everything, or the latest entries of it."""
    is_empty = cache is None or _is_offloaded(cache)
    kinds = set() if is_empty else {type(layer) for layer in self_attention_cache(cache).layers}
    return DynamicSlidingWindowLayer in kinds and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def _is_offloaded(cache: Cache) -> bool:
    return getattr(cache, "offloading", False)


def open_windows(cache: Cache) -> None:
    """Lets the layers of an empty cache keep everything. What a layer sees is still up to the model's mask."""
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]


def select_rows(cache: Cache, mask: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Keeps some rows of a batch.

    Args:
        cache: A dynamic cache with full-attention layers.
        mask: 1 for each slot that holds a token, of shape `(num_rows, num_slots)`.
        rows: Indices of the rows to keep, in order.

    Returns:
        Their mask.
    """
    indices = torch.tensor(rows, dtype=torch.long, device=mask.device)
    cache.batch_select_indices(indices)
    return mask[indices]


def compact_rows(cache: Cache, mask: torch.Tensor) -> torch.Tensor:
    """Moves the tokens of each row together, to the last slots of as few as the longest row needs.

    Args:
        cache: A dynamic cache with full-attention layers.
        mask: 1 for each slot that holds a token, of shape `(num_rows, num_slots)`.

    Returns:
        The mask for what is left of the cache.
    """
    lengths = mask.sum(dim=1)
    longest = int(lengths.max())
    # Holes first, tokens in order after them.
    slots = (mask != 0).long().argsort(dim=1, stable=True)[:, -longest:]
    for layer in cache.layers:
        if layer.keys is None:
            continue
        for name in ("keys", "values"):
            entries = getattr(layer, name)
            index = slots.to(entries.device)[:, None, :, None].expand(-1, entries.shape[1], -1, entries.shape[3])
            setattr(layer, name, entries.gather(2, index))
    return mask.gather(1, slots)


def bytes_per_token(cache: Cache) -> int:
    """Memory of the keys and values of one token of one row, in bytes; 0 before the first."""
    tensors = [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 4
    ]
    return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in tensors)
