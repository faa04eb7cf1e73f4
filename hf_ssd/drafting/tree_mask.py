"""Attention masks for branches that share a prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig


class TreeMask:
    """Makes additive 4D masks (0 where a token sees, -inf where it does not), sliding windows included.

    A boolean mask would be silently wrong under eager attention. A 4D mask overrides a model's own window, so it is
    written in here, per layer type where layers differ.

    Args:
        config: The assistant's text config.
        dtype: Dtype of the masks, the model's.
        device: Device of the masks, the model's.

    Attributes:
        omits_prefix: Whether masks leave out the slots that all tokens see, as [`tree_attention`] wants them.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.omits_prefix = False
        window = getattr(config, "sliding_window", None)
        layer_types = set(getattr(config, "layer_types", None) or ())
        self.layer_types = layer_types if len(layer_types) > 1 else set()
        uses_window = "sliding_attention" in layer_types or (not layer_types and _slides(config))
        self.window: int | None = window if uses_window else None

    def build(
        self, *, num_trunk: int, num_slots: int, visible: Sequence[tuple[int, Sequence[int]]], positions: Sequence[int]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask for tokens that extend a trunk and the branches on it.

        Args:
            num_trunk: Cache slots of the trunk; slot i holds position i.
            num_slots: All cache slots, those of the new tokens included.
            visible: For each new token the number of trunk slots it sees, and the later slots it sees: its ancestors
                on the branch and itself.
            positions: Position of each new token.

        Returns:
            A mask of shape `(1, 1, num_tokens, num_slots)`, or one for each layer type. If `omits_prefix`, those whose
            window does not cut are for the slots from the first one on that some token does not see.
        """
        first = min(num_visible for num_visible, _ in visible) if self.omits_prefix else 0
        full = windowed = self._finish(_additive(first, num_slots, visible))
        if self.window is not None and max(positions) >= self.window:
            mask = _additive(0, num_slots, visible)
            for row, position in enumerate(positions):
                mask[row, : max(min(position - self.window + 1, num_trunk), 0)] = -np.inf
                # On a branch the position is not the slot, but each ancestor is one position before the next.
                mask[row, list(visible[row][1][: -self.window])] = -np.inf
            windowed = self._finish(mask)
        if self.layer_types:
            return {kind: windowed if kind == "sliding_attention" else full for kind in self.layer_types}
        return windowed

    def chain(self, num_cached: int, num_tokens: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask for `num_tokens` that follow the `num_cached` of a trunk."""
        positions = range(num_cached, num_cached + num_tokens)
        visible = [(position + 1, ()) for position in positions]
        num_trunk = num_cached + num_tokens
        return self.build(num_trunk=num_trunk, num_slots=num_trunk, visible=visible, positions=positions)

    def _finish(self, mask: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(mask)[None, None].to(device=self.device, dtype=self.dtype)


def _additive(first: int, num_slots: int, visible: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
    """The mask for the slots from `first` on. In numpy, whose calls take a tenth of the time on arrays this small."""
    mask = np.full((len(visible), num_slots - first), -np.inf, dtype=np.float32)
    for row, (num_visible, slots) in enumerate(visible):
        mask[row, : num_visible - first] = 0.0
        for slot in slots:
            if slot >= first:
                mask[row, slot - first] = 0.0
    return mask


def _slides(config: PreTrainedConfig) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
