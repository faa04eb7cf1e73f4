"""The output projection: from a model's last hidden states to logits, of all tokens or of some."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..vocabulary import UnsupportedError


class Projection:
    """Logits of a model whose decoder ends in a linear layer, perhaps scaled and capped.

    It keeps that layer alone, so the model may be given up.

    Args:
        model: A decoder-only transformers model.
        dtype: Precision of the product; `None` is the layer's own.

    Attributes:
        scale: What the product is multiplied with.

    Raises:
        UnsupportedError: If the model's logits are something else.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        head, config = model.get_output_embeddings(), model.config
        if not isinstance(head, nn.Linear):
            raise UnsupportedError(
                f"`target` must end in a linear output projection, but {type(model).__name__} ends in "
                f"{type(head).__name__}. Its assistant cannot be distilled this way."
            )
        self._head = head
        self.dtype = dtype or head.weight.dtype
        # Cohere multiplies, Granite divides, Gemma caps.
        self.scale: float = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._check(model)

    @property
    def vocab_size(self) -> int:
        return self._head.weight.shape[0]

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits.

        Args:
            hidden: Of shape `(..., hidden_size)`.
            tokens: Token ids of shape `(num_tokens,)`; all in order if `None`.

        Returns:
            Float32 tensor of shape `(..., num_tokens)`.
        """
        weight: torch.Tensor = self._head.weight
        bias: torch.Tensor | None = self._head.bias
        if tokens is not None:
            weight, bias = weight[tokens], None if bias is None else bias[tokens]
        bias = None if bias is None else bias.to(self.dtype)
        logits = nn.functional.linear(hidden.to(weight.device, self.dtype), weight.to(self.dtype), bias).float()
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        input_ids = torch.arange(4, device=model.device)[None] % self.vocab_size
        whole = model(input_ids=input_ids, use_cache=False).logits.float()
        apart = self(last_hidden(model, {"input_ids": input_ids})).to(whole.device)
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.05
        if (apart - whole).norm() > tolerance * whole.norm():
            raise UnsupportedError(
                f"`target` must compute its logits from its last hidden state, but {type(model).__name__} does "
                "something that is not known here. Its assistant cannot be distilled this way."
            )


def last_hidden(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """The states that the output projection is given, of shape `(batch_size, sequence_length, hidden_size)`.

    The decoder is called by itself. `output_hidden_states` would leave hooks on the model, with which it can no longer
    be sent to another process.
    """
    states: torch.Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return states
