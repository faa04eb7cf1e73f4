"""A grammar that raises wherever a logits processor should not ask it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def words_only(words: list[list[int]], num_prompt_tokens: int) -> Callable[[int, torch.Tensor], list[int]]:
    """For `prefix_allowed_tokens_fn`: allows `words`. Raises `KeyError` off them, and after their end."""
    trie: dict[int, dict] = {}
    for word in words:
        node = trie
        for token in word:
            node = node.setdefault(token, {})

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        node = trie
        for token in ids[num_prompt_tokens:].tolist():
            node = node[token]
        if not node:
            raise KeyError("after the end")
        return list(node)

    return allowed
