"""Every difference between the supported transformers versions (5.17 to 5.24), and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.functional import pad
from transformers import GenerationMixin, cache_utils
from transformers.cache_utils import Cache
from transformers.generation import candidate_generator
from transformers.generation import utils as generation_utils
from transformers.modeling_layers import GradientCheckpointingLayer

# The argument and output field that holds the cache: renamed from `past_key_values` to `cache` on the way to 5.24.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Arguments that hold images, videos or sounds.
MEDIA_KEYS: frozenset[str] = frozenset(generation_utils.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)

# Stands in a cache for a layer that reads another one's keys and values; 5.17 has nothing there.
DUMMY_LAYERS: tuple[type, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)

# In 5.17 a layer under gradient checkpointing drops the cache even where there are no gradients.
CHECKPOINTING_DROPS_CACHE = "is_grad_enabled" not in inspect.getsource(GradientCheckpointingLayer)


def output_cache(outputs: Any) -> Cache | None:
    """The cache in a model's output, under whichever name this version gives it."""
    return outputs.get(CACHE_KEY)


def extend_model_kwargs(
    model_kwargs: dict[str, Any], num_tokens: int, new_length: int, is_encoder_decoder: bool = False
) -> dict[str, Any]:
    """A copy of `model_kwargs` whose mask, token types and positions cover draft tokens.

    Args:
        model_kwargs: Keyword arguments of the next forward without them.
        num_tokens: Number of draft tokens.
        new_length: Length of the sequence with them.
        is_encoder_decoder: Whether the tokens are a decoder's. Mask and token types are of its encoder's input then.
    """
    extended = dict(model_kwargs)
    # 5.17 expects no mask at all where 5.24 accepts `None`.
    prefix = "decoder_" if is_encoder_decoder else ""
    if extended.get(f"{prefix}attention_mask") is not None:
        extended = candidate_generator._prepare_attention_mask(extended, new_length, is_encoder_decoder)
    if not is_encoder_decoder:
        extended = candidate_generator._prepare_token_type_ids(extended, new_length)
        for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
            types = extended.get(name)
            if types is not None:  # draft tokens are text
                extended[name] = pad(types, (0, new_length - types.shape[1]))
    position_ids = extended.get(f"{prefix}position_ids")
    if position_ids is not None and num_tokens > 0:
        length = position_ids.shape[-1] + num_tokens
        extended = candidate_generator._prepare_position_ids(extended, length, is_encoder_decoder)
    return extended
