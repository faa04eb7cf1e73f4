"""What is around a model: wrappers of `torch.compile`, PEFT and distributed training, and hooks of accelerate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .vocabulary import UnsupportedError


def unwrap(model: Any) -> Any:
    """The transformers model inside of wrappers; anything else as it is.

    A wrapper's `generate()` is that of the model inside, and so are its weights: adapters are layers in that model.

    Raises:
        UnsupportedError: If the wrapper puts virtual tokens before the prompt, as prompt tuning does.
    """
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        inner = _inner(model)
        if inner is model:
            break
        model = inner
    return model


def input_device(model: nn.Module) -> torch.device:
    """Where a model computes, and takes its inputs: weights that accelerate offloads are on "meta" meanwhile."""
    devices = (parameter.device for parameter in model.parameters())
    device = next((each for each in devices if each.type != "meta"), None)
    if device is None:
        device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")
    return device


def _inner(model: nn.Module) -> nn.Module:
    from accelerate.utils import extract_model_from_parallel  # imports much

    adapters: dict[str, Any] | None = getattr(model, "peft_config", None)
    if adapters is None:
        inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
        return inner
    for name, config in adapters.items():
        if config.is_prompt_learning:
            raise UnsupportedError(
                f"A PEFT adapter must change layers, as LoRA does, but `{name}` is {config.peft_type.value}, which "
                "puts virtual tokens before the prompt. Use transformers' own `generate()` for it."
            )
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    return base
