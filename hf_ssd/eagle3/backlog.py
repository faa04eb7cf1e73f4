"""What a head will want to know of a row when it comes back, while something else drafts or nothing does."""

from __future__ import annotations

from collections import deque

import torch

MAX_KEPT_BYTES = 2**26  # about a head's usual context: 2,730 tokens of a target of hidden size 4096 in bfloat16


class FeatureBacklog:
    """The features of a row's latest tokens, as far as a head may not have read them.

    Those of the latest outcome are kept even if they have been told: the row may end for the head before it looks.

    Args:
        layer_ids: Which of the target's states the head reads.
    """

    def __init__(self, layer_ids: tuple[int, ...]) -> None:
        self.layer_ids = layer_ids
        self._parts: deque[torch.Tensor] = deque()
        self._num_bytes = 0

    def add(self, features: torch.Tensor) -> None:
        """Takes in the features of the latest outcome, of shape `(num_tokens, feature_size)`."""
        most = max(MAX_KEPT_BYTES // features[0].nbytes, 1)
        features = features if len(features) <= most else features[-most:].clone()
        self._parts.append(features)
        self._num_bytes += features.nbytes
        while self._num_bytes - self._parts[0].nbytes >= MAX_KEPT_BYTES:
            self._num_bytes -= self._parts.popleft().nbytes

    def all(self) -> torch.Tensor:
        """All that is kept, of shape `(num_tokens, feature_size)`."""
        return torch.cat(tuple(self._parts))

    def told(self) -> None:
        """The head has been told everything."""
        self._parts = deque([self._parts[-1]])
        self._num_bytes = self._parts[0].nbytes
