"""What configurations and tokenizers tell, before weights are loaded. The checks are those of `generate()` itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..call_arguments import call_config
from ..checks import check_call, check_model, check_pair
from ..eagle3 import Eagle3Config, Eagle3Head, read_config
from ..encoder_inputs import check_encoders
from ..pairs import check_memory, module_sizes
from ..runtime.placement import format_bytes, free_memory
from ..vocabulary import UnsupportedError
from .findings import Findings, Status

# Settings of `generate()` that callers ask about, as keyword arguments.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy decoding": {"do_sample": False},
    "sampling": {"do_sample": True},
    "a static cache": {"cache_implementation": "static"},
    "a quantised cache": {"cache_implementation": "quantized"},
    "beam search": {"num_beams": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "classifier-free guidance": {"guidance_scale": 1.5},
}


@dataclass(frozen=True)
class Checkpoint:
    """A model that has not been loaded.

    Args:
        name: Name or folder.
        model: The model without weights.
        tokenizer: Its tokenizer, if it has one.
        num_bytes: Memory of its weights; 0 if that is not known.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    num_bytes: int

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def is_causal(self) -> bool:
        """Whether it is a decoder-only model, which text alone can be put to."""
        return _is_causal(self.model.config)

    @property
    def max_length(self) -> int | None:
        return getattr(self.text_config, "max_position_embeddings", None)

    @property
    def num_parameters(self) -> int:
        return int(self.model.num_parameters())


def examine_checkpoint(role: str, name: str, dtype: str, findings: Findings) -> Checkpoint | None:
    """Reads a checkpoint without its weights and checks it alone; `None` if that is refused.

    Args:
        role: "target" or "assistant".
        name: Name or folder.
        dtype: Precision of its weights.
        findings: Extended.
    """
    with findings.refusals("checks", role) as found:
        _check_folder(name)
        head_config = read_config(name) if role == "assistant" else None
        config = head_config or AutoConfig.from_pretrained(name)
        sizes = module_sizes(config, getattr(torch, dtype)) if _is_causal(config) else {}
        tokenizer = _tokenizer_of(name) if head_config is None else None
        checkpoint = Checkpoint(name, _empty_model(config, name), tokenizer, sizes.get("", 0))
        check_model(role, checkpoint.model)
        found(f"{type(checkpoint.model).__name__}, {checkpoint.num_parameters / 1e6:,.1f} M parameters")
        return checkpoint
    return None


def examine_target(target: Checkpoint, findings: Findings) -> None:
    """What concerns the target alone: its cache, and what its checkpoint sets for `generate()`."""
    layers = Counter(type(layer).__name__ for layer in DynamicCache(config=target.model.config).layers)
    kinds = ", ".join(f"{number} {name}" for name, number in layers.items()) or "of the model's own making"
    window = getattr(target.text_config, "sliding_window", None)
    findings.add("checks", "cache", kinds + (f", window {window}" if window and len(layers) > 1 else ""))
    with findings.refusals("checks", "its own settings") as found:
        check_call(call_config(target.model, {}), {})
        found("calls that leave the checkpoint's settings as they are use SSD")
    refused = [name for name, settings in SETTINGS.items() if _refusal(target.model, settings)]
    taken = [name for name in SETTINGS if name not in refused]
    findings.add("checks", "calls with SSD", ", ".join(taken))
    findings.add("checks", "without", ", ".join(refused) + " (passed to transformers)", Status.NOTE)


def examine_pair(target: Checkpoint, assistant: Checkpoint, findings: Findings) -> bool:
    """Whether an assistant can draft for a target: vocabulary, tokenizer, context.

    Returns:
        Whether tokens are translated between two tokenizers.
    """
    num_before = len(findings.items)
    with findings.refusals("checks", "encoder"):
        check_encoders(target.model, assistant.model)
    if len(findings.items) > num_before:
        return False  # the vocabulary is the least of its troubles
    tokenizers = (target.tokenizer, assistant.tokenizer)
    translation = None
    with findings.refusals("checks", "vocabulary") as found:
        translation = check_pair(target.model, assistant.model, *(tokenizers if None not in tokenizers else ()))
        sizes = [each.text_config.vocab_size for each in (target, assistant)]
        found(f"{sizes[0]} tokens" if sizes[0] == sizes[1] else f"{sizes[0]} and {sizes[1]} tokens")
    if isinstance(assistant.model, Eagle3Head):
        findings.add("checks", "tokenizer", "an EAGLE-3 head reads the target's tokens and states")
    elif None in tokenizers:
        lacking = "target" if target.tokenizer is None else "assistant"
        findings.add("checks", "tokenizer", f"the {lacking} has none to compare; sizes must do", Status.NOTE)
    elif translation is not None:
        text = f"another one: {translation.num_shared} tokens are the same and can be drafted"
        findings.add("checks", "tokenizer", text, Status.NOTE)
    elif findings.refused is None:
        findings.add("checks", "tokenizer", "the same token ids")
    longest, reach = target.max_length, assistant.max_length
    if longest is not None and reach is not None and reach < longest:
        text = f"{longest} tokens, the assistant's {reach}: beyond, the target goes on alone"
        findings.add("checks", "context", text, Status.NOTE)
    else:
        findings.add("checks", "context", "no limit named" if longest is None else f"{longest} tokens")
    return translation is not None


def examine_memory(target: Checkpoint, assistant: Checkpoint | None, findings: Findings) -> None:
    """Whether the weights fit where `from_pretrained` puts them."""
    assistant_bytes = 0 if assistant is None else assistant.num_bytes
    with findings.refusals("checks", "memory") as found:
        check_memory({"": target.num_bytes}, assistant_bytes, None, free_memory())
        sizes = [f"target {format_bytes(target.num_bytes)}" if target.num_bytes else "target of unknown size"]
        if assistant is not None:
            sizes.append(
                f"assistant {format_bytes(assistant_bytes)}" if assistant_bytes else "assistant of unknown size"
            )
        found(f"{', '.join(sizes)}: fits")


def _refusal(model: PreTrainedModel, settings: dict[str, Any]) -> str | None:
    try:
        check_call(call_config(model, settings), {})
    except UnsupportedError as error:
        return str(error)
    return None


def _check_folder(name: str) -> None:
    """Says in fewer words than the hub's client that a folder is missing."""
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise OSError(f"It must be a name on the hub or a folder, but there is no folder {name!r}.")


def _is_causal(config: Any) -> bool:
    known = {*AutoModelForCausalLM._model_mapping.keys(), Eagle3Config}
    return type(config) in known and not getattr(config, "is_encoder_decoder", False)


def _empty_model(config: Any, name: str) -> PreTrainedModel:
    """The model of a configuration on the "meta" device, of the class that `from_pretrained` would load."""
    with init_empty_weights():
        if isinstance(config, Eagle3Config):
            model: PreTrainedModel = Eagle3Head._from_config(config)
        elif _is_causal(config):
            model = AutoModelForCausalLM.from_config(config)
        else:
            # Not one that we load; but what it is can be told by name.
            model = getattr(transformers, (config.architectures or ["PreTrainedModel"])[0])._from_config(config)
    model.tie_weights()
    # Without such a file, generate() takes what the configuration says, as the empty model does.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def _tokenizer_of(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
