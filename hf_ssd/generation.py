"""The public way in: `SSDGenerationMixin`, `enable_ssd`, and `custom_generate`."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from .checks import REMEDY, check_batch, check_caches, check_call, check_model, check_pair
from .compat import CACHE_KEY
from .config import SSDConfig
from .metrics import SSDStats
from .monitoring import Monitor
from .orchestration import SSDCall, SSDGenerateOutput, decode_plainly, decode_speculatively, with_stats
from .planning import ModePolicy
from .protocol import SpeculatorError
from .recorder import Recorder
from .runtime.pool import start_worker
from .vocabulary import UnsupportedError

logger = logging.get_logger(__name__)

SSDConfigLike = SSDConfig | Mapping[str, Any] | None


@dataclass(frozen=True)
class Attachment:
    """What `enable_ssd` left on a model."""

    assistant: PreTrainedModel | None
    config: SSDConfig

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self  # a copy of the target shares the assistant


class SSDGenerationMixin(GenerationMixin):
    """Adds `ssd_config` to `generate()`. It goes before the model class.

    ```python
    class MyModel(SSDGenerationMixin, LlamaForCausalLM): ...

    model.generate(**inputs, assistant_model=assistant, ssd_config=SSDConfig())
    ```

    Without `ssd_config`, and unless `enable_ssd` was called, `generate()` is transformers' own.

    Attributes:
        ssd_stats: Figures of the latest call ([`SSDStats`]), `None` before the first.
        ssd_monitor: Watches all calls ([`Monitor`]), where one was given to `enable_ssd` or set here.
    """

    ssd_stats: SSDStats | None = None
    ssd_monitor: Monitor | None = None

    def generate(self, *args: Any, ssd_config: SSDConfigLike = None, **kwargs: Any) -> Any:
        """`generate()` of transformers, by speculative speculative decoding.

        Args:
            ssd_config: Settings, as an [`SSDConfig`] or a dict of its fields.
            *args: As for `GenerationMixin.generate()`.
            **kwargs: As for `GenerationMixin.generate()`, `assistant_model` among them.

        Returns:
            What `GenerationMixin.generate()` returns. With `return_dict_in_generate=True` the output also has
            `ssd_stats`.

        Raises:
            UnsupportedError: Before the first token, if the models or arguments do not allow it.
        """
        kwargs = _by_name(args, kwargs)
        attached: Attachment | None = self.__dict__.get("_ssd_attachment")
        is_explicit = ssd_config is not None
        if kwargs.get("custom_generate") is not None or not (is_explicit or attached):
            return super().generate(**kwargs)
        config = SSDConfig.of(ssd_config) if is_explicit or attached is None else attached.config
        assistant = kwargs.get("assistant_model") or (attached.assistant if attached else None)
        if config.mode != "auto":
            return self._generate_in_mode(config, assistant, kwargs, is_explicit=is_explicit)
        policy = _POLICIES.setdefault(self, {}).setdefault(id(assistant), ModePolicy())
        kind = _kind_of_call(self, kwargs)
        mode = policy.choose(kind)
        output = self._generate_in_mode(replace(config, mode=mode), assistant, kwargs, is_explicit=is_explicit)
        if self.ssd_stats is not None and self.ssd_stats.mode == mode:
            change = policy.learn(kind, mode, self.ssd_stats.num_tokens, self.ssd_stats.duration_s)
            if change is not None:
                logger.info(f'mode="auto" for {kind[0]} row(s): {change}.')
                if self.ssd_monitor is not None:
                    self.ssd_monitor.on_switch(f"{kind[0]} row(s): {change}")
        return output

    def _generate_in_mode(
        self, config: SSDConfig, assistant: PreTrainedModel | None, kwargs: dict[str, Any], *, is_explicit: bool
    ) -> Any:
        is_ar = config.mode == "ar"
        if is_ar:
            assistant, kwargs = None, {**kwargs, "assistant_model": None}
            # Under the coupled rule a seed gives the same tokens in every mode, so this one has to add the noise too.
            is_as_drawn = config.rule != "coupled" and config.seed is None
            if is_as_drawn or not _generation_config(self, kwargs).do_sample:
                return self._generate_plainly(kwargs)
        try:
            _check(self, assistant, config, kwargs)
        except UnsupportedError as error:
            problem = str(error).removesuffix(REMEDY)
            if is_ar and config.seed is not None:
                raise UnsupportedError(f"`seed` must be None for this call, but got {config.seed}. {problem}") from None
            if is_explicit and not is_ar:
                raise
            # Whoever calls a model that `enable_ssd` was called on may not know of it.
            what = f"draws as transformers does. {problem}" if is_ar else f"runs without SSD. {error}"
            logger.warning_once(f"This call {what}")
            return self._generate_plainly(kwargs)
        recorder = self._recorder(config.mode, config.trace)
        output = super().generate(**{**kwargs, "assistant_model": SSDCall(assistant, config, recorder)})
        return self._finish(output, recorder)

    def _generate_plainly(self, kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder("ar")
        eos_token_id = _generation_config(self, kwargs).eos_token_id
        output = decode_plainly(super().generate, kwargs, recorder, eos_token_id)
        return self._finish(output, recorder)

    def _recorder(self, mode: str, trace: bool = False) -> Recorder:
        monitor = self.ssd_monitor
        return Recorder(mode, trace) if monitor is None else Recorder(mode, trace, monitor.on_round)

    def _finish(self, output: Any, recorder: Recorder) -> Any:
        self.ssd_stats = stats = recorder.close()
        if self.ssd_monitor is not None:
            self.ssd_monitor.on_call(stats)
        return with_stats(output, stats)

    # `generate()` prepares everything (special tokens, masks, caches, processors, stopping) and then comes here.
    def _assisted_decoding(
        self, input_ids: torch.LongTensor, *, assistant_model: Any = None, inputs_tensor: Any = None, **kwargs: Any
    ) -> Any:
        if isinstance(assistant_model, SSDCall):
            return decode_speculatively(self, input_ids, call=assistant_model, **kwargs)
        # Prompt lookup, early exit, multi-token prediction, and transformers' own assisted generation.
        return super()._assisted_decoding(
            input_ids, assistant_model=assistant_model, inputs_tensor=inputs_tensor, **kwargs
        )

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        # transformers' checks refuse what works here: several sequences, vocabularies padded to different sizes.
        if not isinstance(generation_mode_kwargs.get("assistant_model"), SSDCall):
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)


def enable_ssd(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    ssd_config: SSDConfigLike = None,
    *,
    monitor: Monitor | None = None,
) -> PreTrainedModel:
    """Makes plain `model.generate()` use SSD, wherever it is called from.

    Effects: changes the class of this instance to one that looks the same, so that `save_pretrained` and pipelines do
    not notice. Starts the assistant's process (or thread) in the background. Calling it again replaces the settings.

    Args:
        model: The target.
        assistant_model: The assistant; it may stay out when the model is already enabled, or for mode `"ar"`.
        ssd_config: Settings, as an [`SSDConfig`] or a dict of its fields.
        monitor: Watches the calls of this model, and of others that it is given to.

    Returns:
        `model` itself.

    Raises:
        UnsupportedError: If the assistant cannot draft for the model.
        ValueError: If there is no assistant, no such `assistant_device`, or the backend cannot move it there.
        InsufficientMemoryError: If the assistant does not fit there.
    """
    config = SSDConfig.of(ssd_config)
    attached: Attachment | None = model.__dict__.get("_ssd_attachment")
    assistant = assistant_model if assistant_model is not None else attached.assistant if attached else None
    if config.mode != "ar":
        if assistant is None:
            raise ValueError(
                "`assistant_model` must be given, but got None. Pass a small model of the same tokenizer, or "
                '`mode="ar"`.'
            )
        check_pair(model, assistant)
        if config.backend != "inline":
            with contextlib.suppress(SpeculatorError):  # the first call says why, and what it does instead
                start_worker(assistant, model, config)
    _mix_in(model)
    model.__dict__["_ssd_attachment"] = Attachment(assistant, config)
    if monitor is not None:
        model.__dict__["ssd_monitor"] = monitor
    return model


def disable_ssd(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `enable_ssd`. Harmless on a model that is not enabled.

    The assistant's process (or thread) stays for later calls; it ends with the assistant.
    """
    model.__dict__.pop("_ssd_attachment", None)
    for name in _CALL_STATE:
        model.__dict__.pop(name, None)
    _mix_out(model)
    return model


def make_custom_generate(
    assistant_model: PreTrainedModel, ssd_config: SSDConfigLike = None, *, streamer: Any = None
) -> Callable[..., Any]:
    """A callable for `model.generate(..., custom_generate=...)`, on any model.

    transformers hands such a callable neither assistant nor streamer, so they are given here.

    Args:
        assistant_model: The assistant.
        ssd_config: Settings, as an [`SSDConfig`] or a dict of its fields.
        streamer: Gets the tokens. Give it to `generate()` too where it should see the prompt.
    """
    config = SSDConfig.of(ssd_config)
    if config.mode == "auto":
        raise ValueError(
            '`mode` must be "ssd", "sd" or "ar" here, but got "auto", which remembers calls. Use enable_ssd.'
        )

    def ssd(model: PreTrainedModel, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        check_model("target", model)
        if config.mode != "ar":
            check_pair(model, assistant_model)
        check_call(kwargs["generation_config"], kwargs)
        call = SSDCall(assistant_model, config, Recorder(config.mode, config.trace))
        output = decode_speculatively(model, input_ids, call=call, streamer=streamer, **kwargs)
        model.ssd_stats = call.recorder.close()
        return with_stats(output, model.ssd_stats)

    return ssd


def custom_generate_path() -> str:
    """The folder to pass as `custom_generate` (with `trust_remote_code=True`, as for any such folder)."""
    return str(Path(__file__).parent / "custom_generate")


def generate_with_ssd(model: PreTrainedModel, **kwargs: Any) -> Any:
    """`generate()` with `ssd_config` on a model of any class. What `custom_generate_path()` leads to.

    Without `ssd_config` it takes what `enable_ssd` left on the model, or else the defaults.
    """
    if kwargs.get("ssd_config") is None and "_ssd_attachment" not in model.__dict__:
        kwargs["ssd_config"] = SSDConfig()
    with _mixed_in(model):
        return SSDGenerationMixin.generate(model, **kwargs)


def _check(
    model: PreTrainedModel, assistant: PreTrainedModel | None, config: SSDConfig, kwargs: dict[str, Any]
) -> None:
    if assistant is None and config.mode != "ar":
        raise UnsupportedError(
            f'`assistant_model` must be given for mode "{config.mode}", but got None. Pass one, or use mode "ar".'
        )
    check_model("target", model)
    if assistant is not None:
        check_pair(model, assistant)
    generation_config = _generation_config(model, kwargs)
    check_call(generation_config, kwargs)
    input_ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    if input_ids is not None:
        caches = [kwargs[name] for name in {CACHE_KEY, "past_key_values"} if kwargs.get(name) is not None]
        check_caches(caches)
        num_rows = input_ids.shape[0] * (generation_config.num_return_sequences or 1)
        has_streamer = kwargs.get("streamer") is not None
        check_batch(num_rows, generation_config, has_cache=bool(caches), has_streamer=has_streamer)


# By target and assistant: what calls with mode "auto" have shown.
_POLICIES: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, ModePolicy]] = weakref.WeakKeyDictionary()


def _kind_of_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[int, bool]:
    """What the fastest mode may depend on: the number of rows, and whether tokens are sampled."""
    config = _generation_config(model, kwargs)
    input_ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    num_prompts = 1 if input_ids is None else len(input_ids)
    return num_prompts * (config.num_return_sequences or 1), bool(config.do_sample)


def _generation_config(model: PreTrainedModel, kwargs: dict[str, Any]) -> GenerationConfig:
    """The call's generation config, its keyword arguments merged in."""
    overrides = {key: value for key, value in kwargs.items() if key not in _GENERATE_PARAMETERS}
    config: GenerationConfig = model._prepare_generation_config(kwargs.get("generation_config"), **overrides)[0]
    return config


_GENERATE_SIGNATURE = inspect.signature(GenerationMixin.generate)
_GENERATE_PARAMETERS = frozenset(_GENERATE_SIGNATURE.parameters)


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = _GENERATE_SIGNATURE.bind_partial(None, *args, **kwargs).arguments
    del arguments["self"]
    others = arguments.pop("kwargs", {})
    return {**arguments, **others}


# Mixing in: a subclass per model class, which passes for it.

_CALL_STATE = ("ssd_stats", "ssd_monitor")


@cache
def _ssd_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def reduce(self: PreTrainedModel, protocol: int) -> Any:
        # Pickles and copies are of the class itself: the subclass cannot be found by its name.
        state = {key: value for key, value in self.__dict__.items() if key not in ("_ssd_attachment", *_CALL_STATE)}
        return object.__new__, (base,), state

    mixed = type(base.__name__, (SSDGenerationMixin, base), {"__reduce_ex__": reduce, "_ssd_base": base})
    # `save_pretrained` writes the class's name as the architecture, and pipelines look it up.
    mixed.__module__, mixed.__qualname__, mixed.__doc__ = base.__module__, base.__qualname__, base.__doc__
    return mixed


def _mix_in(model: PreTrainedModel) -> None:
    if not isinstance(model, SSDGenerationMixin):
        model.__class__ = _ssd_class(type(model))  # type: ignore[arg-type]


def _mix_out(model: PreTrainedModel) -> None:
    base = type(model).__dict__.get("_ssd_base")
    if base is not None and "_ssd_attachment" not in model.__dict__ and not _BORROWERS.get(model):
        model.__class__ = base


_BORROWERS: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
_BORROWERS_LOCK = threading.Lock()


@contextlib.contextmanager
def _mixed_in(model: PreTrainedModel) -> Iterator[None]:
    """Mixes in for the time of a call, of several calls at once too."""
    with _BORROWERS_LOCK:
        _BORROWERS[model] = _BORROWERS.get(model, 0) + 1
        _mix_in(model)
    try:
        yield
    finally:
        with _BORROWERS_LOCK:
            _BORROWERS[model] -= 1
            _mix_out(model)


__all__ = [
    "SSDGenerateOutput",
    "SSDGenerationMixin",
    "custom_generate_path",
    "disable_ssd",
    "enable_ssd",
    "generate_with_ssd",
    "make_custom_generate",
]
