"""What is refused before the first token, and what to do instead."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.configuration_utils import GenerationMode

from .vocabulary import check_vocab_sizes

PLAIN = 'or use `ssd_config={"mode": "ar"}` for plain generation'


class UnsupportedError(ValueError):
    """A model, a pair or an argument that cannot be decoded speculatively."""


def check_pair(target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Raises [`UnsupportedError`] unless `assistant` can draft for `target`."""
    for role, model in (("target", target), ("assistant", assistant)):
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(f"The {role} must be a transformers model, but got {name}.")
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"The {role} must be decoder-only, but {name} is an encoder-decoder model. Use transformers' own "
                "assisted generation, "
                f"{PLAIN}."
            )
        if getattr(model, "_is_stateful", False):
            raise UnsupportedError(
                f"The {role} must be able to take tokens back, but {name} keeps a recurrent state. Use a pure "
                f"attention model, {PLAIN}."
            )
    check_vocab_sizes(*(model.config.get_text_config(decoder=True).vocab_size for model in (target, assistant)))


def check_call(config: GenerationConfig, arguments: dict[str, Any]) -> None:
    """Raises [`UnsupportedError`] unless a call with these settings can be decoded speculatively.

    Args:
        config: The call's generation config, its keyword arguments merged in.
        arguments: The other arguments of `generate()`.
    """
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedError(
            f"SSD decodes greedily or by sampling, but these arguments ask for {mode.value.replace('_', ' ')}. Drop "
            f"them, {PLAIN}."
        )
    if config.use_cache is False:
        raise UnsupportedError(
            f"`use_cache` must be True, but got False: drafting keeps what was computed. Drop it, {PLAIN}."
        )
    if config.cache_implementation == "quantized":
        raise UnsupportedError(
            f'`cache_implementation` must allow taking tokens back, but got "quantized". Leave it unset, {PLAIN}.'
        )
    if config.assistant_ensemble_weight is not None:
        raise UnsupportedError(
            f"`assistant_ensemble_weight` must be None, but got {config.assistant_ensemble_weight}: it changes the "
            "output, and SSD "
            "is lossless. Drop it, or use transformers' own assisted generation."
        )
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise UnsupportedError(
            f"`guidance_scale` must be None, but got {config.guidance_scale}: classifier-free guidance keeps a cache "
            "of its own that "
            f"cannot be rolled back. Drop it, {PLAIN}."
        )
    processors = arguments.get("logits_processor") or []
    if any(isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in processors):
        raise UnsupportedError(
            f"`logits_processor` holds classifier-free guidance, which cannot be rolled back. Drop it, {PLAIN}."
        )
    if arguments.get("inputs_embeds") is not None:
        raise UnsupportedError(
            f"`inputs_embeds` has no tokens that the assistant could read. Pass `input_ids`, {PLAIN}."
        )
    if arguments.get("assistant_tokenizer") is not None:
        raise UnsupportedError(
            "`assistant_tokenizer` must be None: target and assistant must share a tokenizer. Use transformers' own "
            "assisted "
            "generation for a pair that does not."
        )
    if arguments.get("synced_gpus"):
        raise UnsupportedError(f"`synced_gpus` must be False: rounds differ between processes. Drop it, {PLAIN}.")


def check_batch(batch_size: int, *, has_cache: bool, has_streamer: bool) -> None:
    """Raises [`UnsupportedError`] for what works with one row only."""
    if batch_size == 1:
        return
    if has_streamer:
        raise UnsupportedError(
            f"`streamer` must be None for {batch_size} rows, which end at different times. Pass one row, {PLAIN}."
        )
    if has_cache:
        raise UnsupportedError(
            f"A cache of your own must be for one row, but the call has {batch_size}: rows accept different numbers "
            "of tokens. Pass one "
            f"row, {PLAIN}."
        )
