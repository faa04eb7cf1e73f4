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
    given = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
    if given is None and kwargs.get("encoder_outputs") is not None:
        given = kwargs["encoder_outputs"][0]
    return None if given is None else len(given)


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


def by_name(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], after: type) -> dict[str, Any]:
    """Positional arguments by their names, and the others.

    Args:
        model: The target.
        args: Positional arguments, without the model.
        kwargs: The others.
        after: The class whose `generate()` was called, and calls that of the next one.

    Raises:
        TypeError: If there are too many, or one is given twice.
    """
    if not args:
        return kwargs
    mro = type(model).__mro__
    signatures = (
        inspect.signature(vars(each)["generate"]) for each in mro[mro.index(after) + 1 :] if "generate" in vars(each)
    )
    # A class of the caller's own may name them as it likes, or pass them on.
    named = next(
        each for each in signatures if not any(one.kind is one.VAR_POSITIONAL for one in each.parameters.values())
    )
    named.bind_partial(None, *args, **kwargs)  # raises for surplus ones, and for those that are given twice
    return {**dict(zip([*named.parameters][1:], args, strict=False)), **kwargs}
