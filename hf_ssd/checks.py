"""What is refused before the first token, and what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, SynthIDTextWatermarkingConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)
from transformers.generation import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS, GenerationMode
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from .compat import CACHE_KEY, CHECKPOINTING_DROPS_CACHE, DUMMY_LAYERS, MEDIA_KEYS
from .eagle3 import Eagle3Head, check_head
from .encoder_inputs import check_encoders, shares_encoder
from .translation import Translation, check_tokenizers, translation_between
from .vocabulary import UnsupportedError, check_vocab_sizes

REMEDY = 'Change that, or use `ssd_config={"mode": "ar"}` for plain generation.'

# All others of transformers' are functions of the tokens before and the scores, which may be asked in any order.
STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)

# Families whose forward adds tokens to the input, so that a cache has more entries than there are tokens.
OWN_PROMPTS = ("cpmant",)

# Families whose decoder takes one token at a time once there is a cache.
ONE_BY_ONE = ("prophetnet", "xlm-prophetnet")

# What is kept per layer and can be rolled back entry by entry; other layers are of a family's own making.
KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *DUMMY_LAYERS)


def check_pair(
    target: PreTrainedModel, assistant: PreTrainedModel, tokenizer: Any = None, assistant_tokenizer: Any = None
) -> Translation | None:
    """Raises [`UnsupportedError`] unless `assistant` can draft for `target`.

    Args:
        target: The model whose output is wanted.
        assistant: The model that drafts.
        tokenizer: The target's, needed where the assistant has another one.
        assistant_tokenizer: The assistant's. Without it, it is the target's.

    Returns:
        The translation between their tokenizers, where these are not the same.
    """
    check_model("target", target)
    check_model("assistant", assistant)
    check_encoders(target, assistant)
    if isinstance(assistant, Eagle3Head):
        check_head(target, assistant)
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, assistant)]
    if assistant_tokenizer is None:
        check_vocab_sizes(*sizes)
        return None
    check_tokenizers(tokenizer, assistant_tokenizer)
    translation = translation_between(tokenizer, assistant_tokenizer, *sizes)
    if translation is not None and isinstance(assistant, Eagle3Head):
        _refuse("An EAGLE-3 head must read the target's tokens, but `assistant_tokenizer` has others. Leave it out.")
    return translation


def check_model(role: str, model: PreTrainedModel) -> None:
    """Raises [`UnsupportedError`] unless a model can be a target, or an assistant."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"The {role} must be a transformers model, but got {name}.")
    owner = generate_owner(type(model))
    if role == "target" and owner is not GenerationMixin and owner is not WhisperGenerationMixin:
        _refuse(f"The {role} must generate as transformers' models do, but {name} has a `generate()` of its own.")
    layers = _cache_layers(model)
    if getattr(model, "_is_stateful", False) or any(
        isinstance(each, LinearAttentionCacheLayerMixin) for each in layers
    ):
        _refuse(f"The {role} must be able to take tokens back, but {name} keeps a recurrent state.")
    unknown = sorted({type(each).__name__ for each in layers if type(each) not in KNOWN_LAYERS})
    if unknown:
        _refuse(f"The {role} must be able to take tokens back, but {name} keeps what it read in {unknown[0]}.")
    if not _takes_cache(model):
        _refuse(f"The {role} must keep what it computed in a cache, but {name} takes none.")
    if model.config.model_type in ONE_BY_ONE:
        _refuse(f"The {role} must read several tokens at once, but {name} takes one after the other.")
    if model.config.model_type in OWN_PROMPTS:
        _refuse(f"The {role} must read the tokens it is given, but {name} puts others of its own before them.")


def generate_owner(model_class: type[PreTrainedModel]) -> type:
    """The class of transformers that has the `generate()` of a model class; subclasses elsewhere pass on to it."""
    owners = [each for each in model_class.__mro__ if "generate" in vars(each)]
    return next((each for each in owners if each.__module__.startswith("transformers.")), GenerationMixin)


def _cache_layers(model: PreTrainedModel) -> list[Any]:
    """What each layer of the model would keep; nothing where only the model's own code knows."""
    try:
        return list(DynamicCache(config=model.config).layers)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _takes_cache(model: PreTrainedModel) -> bool:
    # Of transformers' own classes: a class made from one need not name what it passes on.
    forwards = [
        inspect.signature(vars(each)["forward"]).parameters
        for each in type(model).__mro__
        if each.__module__.startswith("transformers.models.") and "forward" in vars(each)
    ]
    return not forwards or any({CACHE_KEY, "past_key_values"} & each.keys() for each in forwards)


def check_call(config: GenerationConfig, arguments: dict[str, Any]) -> None:
    """Raises [`UnsupportedError`] unless a call with these settings can be decoded speculatively.

    Args:
        config: The call's generation config, its keyword arguments merged in.
        arguments: The other arguments of `generate()`.
    """
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        _refuse(f"SSD decodes greedily or by sampling, but these arguments ask for {mode.value.replace('_', ' ')}.")
    if config.use_cache is False:
        _refuse("`use_cache` must be True, but got False: drafting keeps what was computed.")
    if config.cache_implementation == "quantized" or (
        config.cache_implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS and not StaticLayer.is_croppable
    ):
        _refuse(f'`cache_implementation` must allow taking tokens back, but got "{config.cache_implementation}".')
    if config.assistant_ensemble_weight is not None:
        _refuse(
            f"`assistant_ensemble_weight` must be None, but got {config.assistant_ensemble_weight}: it changes the "
            "output, and SSD is lossless."
        )
    if config.guidance_scale is not None and config.guidance_scale != 1:
        _refuse(
            f"`guidance_scale` must be None, but got {config.guidance_scale}: classifier-free guidance keeps a cache "
            "of its own that cannot be rolled back."
        )
    if isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig):
        _refuse("`watermarking_config` must not be SynthID, which remembers tokens that verification takes back.")
    for processor in arguments.get("logits_processor") or []:
        if isinstance(processor, STATEFUL_PROCESSORS):
            _refuse(
                f"`logits_processor` holds {type(processor).__name__}, which remembers tokens that verification takes "
                "back."
            )
    if arguments.get("synced_gpus"):
        _refuse("`synced_gpus` must be False: rounds differ between processes.")


def check_encoder_outputs(target: PreTrainedModel, assistant: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raises [`UnsupportedError`] if the assistant's encoder has nothing to read."""
    if not target.config.is_encoder_decoder or arguments.get("encoder_outputs") is None:
        return
    if not shares_encoder(target, assistant):
        _refuse(
            f"`encoder_outputs` must be None, as {type(assistant).__name__} has an encoder of its own and they do not "
            "say what that should read. Pass the encoder's input."
        )


def check_whole_recording(target: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raises [`UnsupportedError`] for a part of a recording, as a folder in `custom_generate` gets it from Whisper."""
    if generate_owner(type(target)) is not GenerationMixin and arguments.get("inputs") is not None:
        _refuse(
            f"`custom_generate` must not be a folder for {type(target).__name__}, which decodes a recording in parts. "
            "Call `enable_ssd`, or pass what `make_custom_generate` returns."
        )


def check_seeds(seed: int | tuple[int, ...] | None, target: PreTrainedModel) -> None:
    """Raises [`UnsupportedError`] for seeds of single rows where a call decodes several times."""
    if isinstance(seed, tuple) and generate_owner(type(target)) is not GenerationMixin:
        _refuse(
            f"`seed` must be one number for {type(target).__name__}, which decodes a recording in parts, but got "
            f"{len(seed)}."
        )


def check_media(target: PreTrainedModel, num_rows: int, arguments: dict[str, Any]) -> None:
    """Raises [`UnsupportedError`] for images and the like in several rows: which are whose is for the model to know."""
    given = sorted(name for name in MEDIA_KEYS if arguments.get(name) is not None)
    if num_rows > 1 and given and not target.config.is_encoder_decoder:
        _refuse(f"`{given[0]}` must be of one row, but the call has {num_rows}. Generate for one after the other.")


def check_batch(num_rows: int, config: GenerationConfig, *, has_cache: bool, has_streamer: bool) -> None:
    """Raises [`UnsupportedError`] for what works with one row only."""
    if num_rows == 1:
        return
    if has_streamer:
        _refuse(f"`streamer` must be None for {num_rows} rows, which end at different times.")
    if has_cache:
        _refuse(f"A cache of your own must be for one row, but the call has {num_rows}, which grow differently.")
    if config.max_time is not None:
        _refuse(f"`max_time` must be None for {num_rows} rows, which may run one after the other.")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        _refuse(f"`output_attentions` and `output_hidden_states` must be False for {num_rows} rows.")


def check_training(target: PreTrainedModel) -> None:
    """Raises [`UnsupportedError`] if the target is being trained in a way that leaves it without a cache."""
    if not (CHECKPOINTING_DROPS_CACHE and target.training):
        return
    if any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        _refuse(
            f"The target must keep what it computed in a cache, but {type(target).__name__} is in training mode with "
            "gradient checkpointing, which drops it. Call `eval()` on it before."
        )


def check_embeddings(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
    """Raises [`UnsupportedError`] unless the assistant can read what the target reads as embeddings."""
    if inputs_embeds is None:
        return
    if input_ids is None or input_ids.shape[1] == 0:
        _refuse("`inputs_embeds` has no tokens that the assistant could read: give it `input_ids` as well.")
    if input_ids.shape != inputs_embeds.shape[:2]:
        _refuse(
            f"`inputs_embeds` must have an embedding for each of `input_ids`, of shape {tuple(input_ids.shape)}, but "
            f"is of shape {tuple(inputs_embeds.shape)}."
        )


def check_static_cache(model: PreTrainedModel, config: GenerationConfig, prompt_length: int) -> None:
    """Raises [`UnsupportedError`] if the static cache that a call asks for would lose tokens that may be taken back."""
    if config.cache_implementation not in ALL_STATIC_CACHE_IMPLEMENTATIONS:
        return
    if model.config.is_encoder_decoder:
        _refuse(
            f"`cache_implementation` must be unset for {type(model).__name__}, which takes tokens back from dynamic "
            f'caches only, but got "{config.cache_implementation}".'
        )
    max_length = prompt_length + (config.max_new_tokens or config.max_length or 0)
    # As `generate()` sizes it.
    known = (getattr(config, "max_cache_len", None), getattr(model, "_previous_max_cache_length", None))
    length = max(max_length - 1, 1, *(each or 0 for each in known))
    for layer in StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length).layers:
        if not layer.is_croppable:
            _refuse(
                f'`cache_implementation` must allow taking tokens back, but a "{config.cache_implementation}" one of '
                f"{length} tokens keeps only the latest {layer.get_max_length()} in some layers of "
                f"{type(model).__name__}. Leave it unset: a dynamic cache keeps what may be needed."
            )


def check_caches(caches: Iterable[Cache]) -> None:
    """Raises [`UnsupportedError`] if one of the caches cannot be rolled back."""
    for cache in caches:
        for layer in getattr(cache, "layers", ()):
            if not layer.is_croppable:
                _refuse(f"The cache must allow taking tokens back, but {type(layer).__name__} does not.")


def _refuse(problem: str) -> NoReturn:
    raise UnsupportedError(f"{problem} {REMEDY}")
