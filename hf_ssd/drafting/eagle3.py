"""An EAGLE-3 head as an assistant: beside tokens its forwards take the target's features, or its own states."""

from __future__ import annotations

from typing import Any

import torch

from ..eagle3 import Eagle3Head
from .assistant import AssistantModel
from .int8 import quantize_linears
from .tree_cache import SlabCache


class Eagle3Assistant(AssistantModel):
    """Runs an EAGLE-3 head on chains and trees of tokens.

    Its hidden states are what a head feeds back: the `states` of the tokens that follow. `logits` are over the head's
    own draft vocabulary.

    Args:
        model: The head, in evaluation mode.
    """

    model: Eagle3Head

    def __init__(self, model: Eagle3Head) -> None:
        super().__init__(model)
        self._is_quantized = False

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features of some tokens as `states`.

        Args:
            features: Of shape `(num_tokens, feature_size)`.

        Returns:
            Tensor of shape `(num_tokens, hidden_size)`.
        """
        return self.model.fuse(features.to(self.device, self.dtype))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, float32, of shape `(num_rows, draft_vocab_size)`."""
        return self.model.project(hidden).float()

    def quantize(self) -> None:
        """As in [`AssistantModel`]; the output projection too."""
        quantize_linears(self.model)
        self._is_quantized = True

    @property
    def is_quantized(self) -> bool:
        return self._is_quantized

    @property
    def drafted_tokens(self) -> torch.Tensor:
        """The target's ids for the columns of `logits`."""
        return self.model.draft_tokens

    def _run(self, kwargs: dict[str, Any], cache: SlabCache | None = None) -> torch.Tensor:
        others = {name: value for name, value in kwargs.items() if name not in ("states", "use_cache", "return_dict")}
        states = kwargs.get("states")
        if states is None:  # where the head is tried out
            states = self._some_states(kwargs["input_ids"])
        hidden: torch.Tensor = self.model(**others, hidden_states=states, return_logits=False).hidden_states
        return hidden[0]

    def _some_states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Something for each token, of shape `(1, num_tokens, hidden_size)`; the same for the same token."""
        columns = torch.arange(1, self.config.hidden_size + 1, device=self.device)
        return torch.sin(input_ids[..., None] + 0.1 * columns).to(self.dtype)
