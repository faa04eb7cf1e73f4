"""An assistant whose tokens attend to what an encoder read: its own encoder, or the target's."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import CACHE_KEY
from ..decoders import EncoderStates, argument, at_positions, names_positions, takes_positions, trial_states
from ..protocol import EncoderInputs
from .tree_cache import CrossCache


class EncoderReader:
    """The encoder's side of an assistant, and what its forwards need because of it.

    Args:
        model: An encoder-decoder model, or a decoder that takes an encoder's states (`WhisperForCausalLM`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.decoder: nn.Module = model.get_decoder()
        self._decoder_arguments = set(inspect.signature(self.decoder.forward).parameters)
        self._model_arguments = set(inspect.signature(model.forward).parameters)

    @torch.no_grad()
    def read(self, encoder: EncoderInputs | None) -> CrossCache:
        """A cache for a row, its encoder's input read.

        Args:
            encoder: The row's; by default something to try the model on.
        """
        if encoder is None:
            states = trial_states(self.model)
            assert states is not None
            return CrossCache(states, None)
        states, device, dtype = encoder.states, self.model.device, self.model.dtype
        if states is None:
            inputs = {
                name: tensor.to(device, dtype if tensor.is_floating_point() else None)
                for name, tensor in encoder.inputs.items()
            }
            states = self.model.get_encoder()(**inputs, return_dict=True).last_hidden_state
        mask = None if encoder.mask is None else encoder.mask.to(device)
        return CrossCache(states.to(device, dtype), mask)

    def arguments(self, kwargs: dict[str, Any], cache: CrossCache, *, of_decoder: bool) -> dict[str, Any]:
        """The arguments of a forward, from those of a decoder-only model's.

        Args:
            kwargs: Those, named as there.
            cache: The row's.
            of_decoder: Whether the decoder is called by itself; otherwise the model.
        """
        given = dict(kwargs)
        if CACHE_KEY in given:
            given[CACHE_KEY] = cache.for_model
        if of_decoder:
            if not names_positions(self.model):
                given.pop("position_ids", None)
            others = {"encoder_hidden_states": cache.states, "encoder_attention_mask": cache.mask}
            return {**given, **{name: each for name, each in others.items() if name in self._decoder_arguments}}
        for name in ("input_ids", "position_ids", "attention_mask"):
            if name in given:
                given[argument(self.model, name)] = given.pop(name)
        if not names_positions(self.model):
            given.pop(argument(self.model, "position_ids"), None)
        if self.model.config.is_encoder_decoder:
            given["attention_mask"] = cache.mask
        given["encoder_outputs"] = EncoderStates(last_hidden_state=cache.states)
        return given

    def at(self, positions: torch.Tensor | None) -> AbstractContextManager[None]:
        """Within it tokens are at these positions, of shape `(1, num_tokens)`, where that takes a hook."""
        if positions is None or names_positions(self.model) or not takes_positions(self.model):
            return nullcontext()
        return at_positions(self.model, positions[0])
