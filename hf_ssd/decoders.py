"""The part of a model that decodes: a whole decoder-only model, or the decoder behind an encoder."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config that the decoder's layers hold, `_attn_implementation` included.

    Not `get_text_config(decoder=True)`: of most encoder-decoder models that is a copy.
    """
    if model.config.is_encoder_decoder:
        config: PreTrainedConfig = getattr(model.get_decoder(), "config", model.config)
        return config
    return model.config.get_text_config(decoder=True)


def argument(model: PreTrainedModel, name: str) -> str:
    """What `model.forward` calls an argument about the tokens: `decoder_input_ids` behind an encoder, and so on."""
    return f"decoder_{name}" if model.config.is_encoder_decoder else name


def self_attention_cache(cache: Cache) -> Cache:
    """The part of a cache that grows with the tokens. What an encoder read stays as it is."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def attends_to_encoder(model: PreTrainedModel) -> bool:
    """Whether the decoder attends to what an encoder read: its own, or the target's as `WhisperForCausalLM` does."""
    return bool(model.config.is_encoder_decoder) or "encoder_outputs" in _parameters(model)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether each token can be given its position."""
    return names_positions(model) or _position_embedding(model) is not None


def names_positions(model: PreTrainedModel) -> bool:
    """Whether `model.forward` has an argument for positions."""
    return argument(model, "position_ids") in _parameters(model)


def trial_states(model: PreTrainedModel) -> torch.Tensor | None:
    """What an encoder might have read, of shape `(1, 6, hidden_size)`, to try a decoder on; `None` without one."""
    if not attends_to_encoder(model):
        return None
    size = encoder_size(model)
    return torch.sin(torch.arange(6 * size, device=model.device)).view(1, 6, size).to(model.dtype)


def encoder_size(model: PreTrainedModel) -> int:
    """Size of the states that the decoder attends to."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    size: int = getattr(encoder, "config", model.config).hidden_size
    return size


@dataclass
class EncoderStates(BaseModelOutput):
    """What an encoder returned, as far as a decoder needs it. Those with experts look for the routers' part."""

    router_logits: tuple[torch.Tensor, ...] | None = None
    router_probs: tuple[torch.Tensor, ...] | None = None


@contextmanager
def at_positions(model: PreTrainedModel, positions: torch.Tensor) -> Iterator[None]:
    """Within it the tokens of a forward are at these positions. For models that count positions by themselves.

    Args:
        model: Its decoder has an `embed_positions` that takes positions, as BART and its kin have.
        positions: Of shape `(num_tokens,)`, on the model's device.
    """
    embedding = _position_embedding(model)
    assert embedding is not None

    thread = threading.get_ident()

    def replace(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        # Other threads may run the same model meanwhile.
        return (args, {**kwargs, "position_ids": positions}) if threading.get_ident() == thread else None

    hook = embedding.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _position_embedding(model: PreTrainedModel) -> nn.Module | None:
    embedding = getattr(model.get_decoder(), "embed_positions", None)
    if isinstance(embedding, nn.Embedding) and "position_ids" in _parameters(embedding):
        return embedding
    return None


def _parameters(module: nn.Module) -> frozenset[str]:
    return _parameters_of(type(module).forward)


@cache  # asked for in every round
def _parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
