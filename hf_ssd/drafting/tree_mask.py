"""Attention masks for branches that share a prefix."""

from __future__ import annotations

from collections.abc import Sequence

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
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
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
            A mask of shape `(1, 1, num_tokens, num_slots)`, or one for each layer type.
        """
        mask = torch.full((len(visible), num_slots), float("-inf"))
        rows: list[int] = []
        slots: list[int] = []
        for row, (num_visible, branch) in enumerate(visible):
            mask[row, :num_visible] = 0.0
            rows += [row] * len(branch)
            slots += branch
        mask[rows, slots] = 0.0
        full = mask
        if self.window is not None:
            first_seen = torch.tensor(positions)[:, None] - self.window + 1
            trunk = torch.arange(num_slots)[None]
            # A branch is shorter than any sensible window, but for its own slots the position is not the slot.
            windowed = full.masked_fill((trunk < first_seen) & (trunk < num_trunk), float("-inf"))
            if not self.layer_types:
                return self._finish(windowed)
            return {kind: self._finish(windowed if kind == "sliding_attention" else full) for kind in self.layer_types}
        if self.layer_types:
            return {kind: self._finish(full) for kind in self.layer_types}
        return self._finish(full)

    def _finish(self, mask: torch.Tensor) -> torch.Tensor:
        return mask[None, None].to(device=self.device, dtype=self.dtype)


def _slides(config: PreTrainedConfig) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
