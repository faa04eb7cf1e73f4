"""What the arguments of a call of `generate()` say, whatever its model's own `generate()` calls them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from .checks import generate_owner


def num_prompts(model: PreTrainedModel, kwargs: dict[str, Any]) -> int | None:
    """Number of prompts or recordings; `None` where the model makes its own."""
    names = ("inputs", "input_ids", model.main_input_name)
    return next((len(kwargs[name]) for name in names if kwargs.get(name) is not None), None)


def may_sample(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether tokens may be sampled."""
    # Whisper's `generate()` samples where a temperature is above 0, whatever `do_sample` says.
    temperature = kwargs.get("temperature") if "temperature" in _parameters(model) else None
    temperatures = temperature if isinstance(temperature, (list, tuple)) else [temperature]
    return bool(call_config(model, kwargs).do_sample) or any(each for each in temperatures)


def call_config(model: PreTrainedModel, kwargs: dict[str, Any]) -> GenerationConfig:
    """The call's generation config, its keyword arguments merged in."""
    known = set(_parameters(model)) - {"return_dict_in_generate"}
    overrides = {key: value for key, value in kwargs.items() if key not in known and key != "assistant_model"}
    config: GenerationConfig = model._prepare_generation_config(kwargs.get("generation_config"), **overrides)[0]
    return config


def _parameters(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """Those of the model's own `generate()`, in order."""
    return inspect.signature(vars(generate_owner(type(model)))["generate"]).parameters


def by_name(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by their names, and the others."""
    signature = inspect.Signature(list(_parameters(model).values()))
    arguments = signature.bind_partial(None, *args, **kwargs).arguments
    del arguments["self"]
    others = arguments.pop("kwargs", {})
    return {**arguments, **others}
