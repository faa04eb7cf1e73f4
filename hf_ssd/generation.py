"""The public way in: `SSDGenerationMixin`, `enable_ssd`, and `custom_generate`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from .call_arguments import by_name, call_config, may_sample, num_prompts
from .checks import (
    REMEDY,
    check_batch,
    check_caches,
    check_call,
    check_embeddings,
    check_encoder_outputs,
    check_media,
    check_model,
    check_pair,
    check_seeds,
    check_static_cache,
    check_training,
    check_whole_recording,
    generate_owner,
)
from .compat import CACHE_KEY
from .config import SSDConfig
from .fork_lock import ForkLock
from .metrics import SSDStats
from .monitoring import Monitor
from .orchestration import Drafter, SSDCall, SSDGenerateOutput, decode_plainly, decode_speculatively, with_stats
from .planning import PlanMemories, PlanMemory
from .protocol import SpeculatorError
from .recorder import Recorder
from .runtime.pool import start_worker
from .vocabulary import UnsupportedError
from .wrappers import unwrap

logger = logging.get_logger(__name__)

SSDConfigLike = SSDConfig | Mapping[str, Any] | None
Assistants = tuple[PreTrainedModel, ...]


@dataclass(frozen=True)
class Attachment:
    """What `enable_ssd` left on a model."""

    assistants: Assistants
    config: SSDConfig
    tokenizer: Any = None
    assistant_tokenizer: Any = None

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
        ssd_stats: Figures of the call that ended last ([`SSDStats`]), `None` before the first. Of calls in several
            threads `return_dict_in_generate=True` gives each its own.
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
        kwargs = by_name(self, args, kwargs, after=SSDGenerationMixin)
        attached: Attachment | None = self.__dict__.get("_ssd_attachment")
        is_explicit = ssd_config is not None
        if kwargs.get("custom_generate") is not None or not (is_explicit or attached):
            return super().generate(**kwargs)
        config = SSDConfig.of(ssd_config) if is_explicit or attached is None else attached.config
        given = kwargs.get("assistant_model")
        assistants = _all_of(given) if given is not None else attached.assistants if attached else ()
        is_ar = config.mode == "ar"
        tokenizers = self._tokenizers(assistants, kwargs)
        if is_ar:
            assistants, kwargs = (), {**kwargs, "assistant_model": None, "assistant_tokenizer": None}
            # Under the coupled rule a seed gives the same tokens in every mode, so this one has to add the noise too.
            is_as_drawn = config.rule != "coupled" and config.seed is None
            if is_as_drawn or not may_sample(self, kwargs):
                return self._generate_plainly(kwargs)
        try:
            drafters = _check(self, assistants, config, kwargs, tokenizers)
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
        recorder = _recorder(self.ssd_monitor, config.mode, config.trace)
        call = SSDCall(drafters, config, recorder, _memory_of(self, assistants, config, kwargs))
        if generate_owner(type(self)) is GenerationMixin:
            output = super().generate(**{**kwargs, "assistant_model": call, "assistant_tokenizer": None})
        else:
            # Whisper's changes what is generated when it gets an assistant. So it gets none, and comes to `_sample`.
            of_assistant = ("assistant_model", "assistant_tokenizer")
            others = {name: value for name, value in kwargs.items() if name not in of_assistant}
            with _running(_Running(self, call)):
                output = super().generate(**others)
        return _finish(self, self.ssd_monitor, output, recorder)

    def _tokenizers(self, assistants: Assistants, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The target's and the assistants': the call's own, or those that `enable_ssd` was given with these."""
        attached: Attachment | None = self.__dict__.get("_ssd_attachment")
        tokenizer, assistant_tokenizer = kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer")
        if attached is not None:
            tokenizer = tokenizer or attached.tokenizer
            if assistants == attached.assistants:
                assistant_tokenizer = assistant_tokenizer or attached.assistant_tokenizer
        return tokenizer, assistant_tokenizer

    def _generate_plainly(self, kwargs: dict[str, Any]) -> Any:
        recorder = _recorder(self.ssd_monitor, "ar")
        eos_token_id = call_config(self, kwargs).eos_token_id
        if isinstance(kwargs.get("assistant_model"), (list, tuple)):  # transformers takes one, with all its limits
            kwargs = {**kwargs, "assistant_model": None, "assistant_tokenizer": None}
        if kwargs.get("assistant_model") is None:
            kwargs = {name: value for name, value in kwargs.items() if name != "assistant_model"}
        with _running(None):
            output = decode_plainly(super().generate, kwargs, recorder, eos_token_id)
        return _finish(self, self.ssd_monitor, output, recorder)

    # `generate()` prepares everything (special tokens, masks, caches, processors, stopping) and then comes here.
    def _assisted_decoding(
        self, input_ids: torch.LongTensor, *, assistant_model: Any = None, inputs_tensor: Any = None, **kwargs: Any
    ) -> Any:
        if isinstance(assistant_model, SSDCall):
            return decode_speculatively(self, input_ids, call=assistant_model, inputs_tensor=inputs_tensor, **kwargs)
        # Prompt lookup, early exit, multi-token prediction, and transformers' own assisted generation.
        return super()._assisted_decoding(
            input_ids, assistant_model=assistant_model, inputs_tensor=inputs_tensor, **kwargs
        )

    # The same for models whose `generate()` calls the library's several times. The names are read by `generate()`.
    def _sample(self, input_ids: torch.LongTensor, *, inputs_tensor: Any = None, **kwargs: Any) -> Any:
        running = _RUNNING.get()
        if running is None or running.model is not self:
            return super()._sample(input_ids, **kwargs)
        with _running(None):  # a streamer or a criterion may generate too
            return decode_speculatively(self, input_ids, call=running.call, inputs_tensor=inputs_tensor, **kwargs)

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        # transformers' checks refuse what works here: several sequences, vocabularies padded to different sizes.
        if not isinstance(generation_mode_kwargs.get("assistant_model"), SSDCall):
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)


def enable_ssd(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | Sequence[PreTrainedModel] | None = None,
    ssd_config: SSDConfigLike = None,
    *,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    monitor: Monitor | None = None,
) -> PreTrainedModel:
    """Makes plain `model.generate()` use SSD, wherever it is called from.

    Effects: changes the class of this instance to one that looks the same, so that `save_pretrained` and pipelines do
    not notice. Starts the assistant's process (or thread) in the background. Calling it again replaces the settings.
    Of a wrapped model (`torch.compile`, PEFT) it is the model inside that is changed.

    Args:
        model: The target.
        assistant_model: The assistant; it may stay out when the model is already enabled, or for mode `"ar"`. Of
            several, in a list, the one whose drafts cost least time per token serves, as measured.
        ssd_config: Settings, as an [`SSDConfig`] or a dict of its fields.
        tokenizer: The target's, needed with `assistant_tokenizer`.
        assistant_tokenizer: The assistant's, where it has another one than the target. Later calls need neither. For
            several assistants a list, with `None` for those that share the target's.
        monitor: Watches the calls of this model, and of others that it is given to.

    Returns:
        `model` itself.

    Raises:
        UnsupportedError: If the assistant cannot draft for the model.
        ValueError: If there is no assistant, no such `assistant_device`, or the backend cannot move it there.
        InsufficientMemoryError: If the assistant does not fit there.
    """
    config = SSDConfig.of(ssd_config)
    target = unwrap(model)
    attached: Attachment | None = target.__dict__.get("_ssd_attachment")
    assistants = _all_of(assistant_model) if assistant_model is not None else attached.assistants if attached else ()
    if attached is not None and assistants == attached.assistants:
        tokenizer = tokenizer or attached.tokenizer
        assistant_tokenizer = assistant_tokenizer or attached.assistant_tokenizer
    if config.mode != "ar":
        if not assistants:
            raise ValueError(
                "`assistant_model` must be given, but got None. Pass a small model, best of the same tokenizer, or "
                '`mode="ar"`.'
            )
        for assistant, own_tokenizer in _with_tokenizers(assistants, assistant_tokenizer):
            check_pair(target, assistant, tokenizer, own_tokenizer)
            if config.backend != "inline":
                with contextlib.suppress(SpeculatorError):  # the first call says why, and what it does instead
                    start_worker(assistant, target, config)
    _mix_in(target)
    target.__dict__["_ssd_attachment"] = Attachment(assistants, config, tokenizer, assistant_tokenizer)
    if monitor is not None:
        target.__dict__["ssd_monitor"] = monitor
    return model


def disable_ssd(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `enable_ssd`. Harmless on a model that is not enabled.

    The assistant's process (or thread) stays for later calls; it ends with the assistant.
    """
    target = unwrap(model)
    target.__dict__.pop("_ssd_attachment", None)
    for name in _CALL_STATE:
        target.__dict__.pop(name, None)
    _mix_out(target)
    return model


def make_custom_generate(
    assistant_model: PreTrainedModel | Sequence[PreTrainedModel],
    ssd_config: SSDConfigLike = None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
) -> Callable[..., Any]:
    """A callable for `model.generate(..., custom_generate=...)`, on any model.

    transformers hands such a callable neither assistant, tokenizers nor streamer, so they are given here.

    Args:
        assistant_model: The assistant, or several.
        ssd_config: Settings, as an [`SSDConfig`] or a dict of its fields.
        streamer: Gets the tokens. Give it to `generate()` too where it should see the prompt.
        tokenizer: The target's, needed with `assistant_tokenizer`.
        assistant_tokenizer: The assistant's, where it has another one than the target.
    """
    config = SSDConfig.of(ssd_config)
    assistants = _all_of(assistant_model)

    def ssd(model: PreTrainedModel, input_ids: torch.LongTensor, inputs_tensor: Any = None, **kwargs: Any) -> Any:
        drafting = () if config.mode == "ar" else assistants
        tokenizers = (tokenizer, assistant_tokenizer)
        generation_config = kwargs["generation_config"]
        drafters = _check_decoding(model, drafting, config, generation_config, input_ids, kwargs, tokenizers)
        check_media(model, len(input_ids), kwargs)
        monitor = getattr(model, "ssd_monitor", None)
        recorder = _recorder(monitor, config.mode, config.trace)
        samples = bool(generation_config.do_sample)
        memory = _MEMORIES.find(model, drafting, config, num_rows=len(input_ids), samples=samples)
        call = SSDCall(drafters, config, recorder, memory)
        output = decode_speculatively(
            model, input_ids, call=call, streamer=streamer, inputs_tensor=inputs_tensor, **kwargs
        )
        return _finish(model, monitor, output, recorder)

    return ssd


def custom_generate_path() -> str:
    """The folder to pass as `custom_generate` (with `trust_remote_code=True`, as for any such folder)."""
    return str(Path(__file__).parent / "custom_generate")


def generate_with_ssd(model: PreTrainedModel, **kwargs: Any) -> Any:
    """`generate()` with `ssd_config` on a model of any class. What `custom_generate_path()` leads to.

    Without `ssd_config` it takes what `enable_ssd` left on the model, or else the defaults.
    """
    model = unwrap(model)
    if kwargs.get("ssd_config") is None and "_ssd_attachment" not in model.__dict__:
        kwargs["ssd_config"] = SSDConfig()
    with _mixed_in(model):
        return SSDGenerationMixin.generate(model, **kwargs)


def _check(
    model: PreTrainedModel,
    assistants: Assistants,
    config: SSDConfig,
    kwargs: dict[str, Any],
    tokenizers: tuple[Any, Any],
) -> tuple[Drafter, ...]:
    """Raises [`UnsupportedError`] for what cannot be decoded; otherwise the assistants as they can be used."""
    if not assistants and config.mode != "ar":
        raise UnsupportedError(
            f'`assistant_model` must be given for mode "{config.mode}", but got None. Pass one, or use mode "ar".'
        )
    generation_config = call_config(model, kwargs)
    input_ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    drafters = _check_decoding(model, assistants, config, generation_config, input_ids, kwargs, tokenizers)
    for assistant in assistants:
        check_encoder_outputs(model, assistant, kwargs)
    check_whole_recording(model, kwargs)
    num_inputs = num_prompts(model, kwargs)
    if num_inputs is not None:
        caches = [kwargs[name] for name in {CACHE_KEY, "past_key_values"} if kwargs.get(name) is not None]
        check_caches(caches)
        num_rows = num_inputs * (generation_config.num_return_sequences or 1)
        if kwargs.get("return_token_timestamps"):  # which Whisper reads off attentions
            generation_config.return_dict_in_generate = generation_config.output_attentions = True
        has_streamer = kwargs.get("streamer") is not None
        check_batch(num_rows, generation_config, has_cache=bool(caches), has_streamer=has_streamer)
        check_media(model, num_rows, kwargs)
    return drafters


def _check_decoding(
    model: PreTrainedModel,
    assistants: Assistants,
    config: SSDConfig,
    generation_config: GenerationConfig,
    input_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
    tokenizers: tuple[Any, Any],
) -> tuple[Drafter, ...]:
    """What is checked of a call however it comes here. Returns the assistants, with translations of tokenizers."""
    check_model("target", model)
    check_training(model)
    tokenizer, assistant_tokenizer = tokenizers
    drafters = tuple(
        Drafter(assistant, check_pair(model, assistant, tokenizer, own_tokenizer))
        for assistant, own_tokenizer in _with_tokenizers(assistants, assistant_tokenizer)
    )
    check_call(generation_config, kwargs)
    check_seeds(config.seed, model)
    check_embeddings(input_ids, kwargs.get("inputs_embeds"))
    check_static_cache(model, generation_config, 0 if input_ids is None else input_ids.shape[1])
    return drafters


def _all_of(assistant_model: PreTrainedModel | Sequence[PreTrainedModel]) -> Assistants:
    """The assistants of a call, as models."""
    given = assistant_model if isinstance(assistant_model, (list, tuple)) else [assistant_model]
    if not given:
        raise ValueError("`assistant_model` must hold at least one model, but got an empty list. Pass None for none.")
    return tuple(unwrap(each) for each in given)


def _with_tokenizers(assistants: Assistants, assistant_tokenizer: Any) -> list[tuple[PreTrainedModel, Any]]:
    """Each assistant with its tokenizer; `None` where it has the target's."""
    own = assistant_tokenizer if isinstance(assistant_tokenizer, (list, tuple)) else [assistant_tokenizer]
    if assistants and len(own) != len(assistants) and assistant_tokenizer is not None:
        raise ValueError(
            f"`assistant_tokenizer` must be a list of {len(assistants)}, one for each assistant, but got "
            f"{len(own)}. Give None for those that share the target's."
        )
    return list(zip(assistants, own if len(own) == len(assistants) else [None] * len(assistants), strict=True))


def _recorder(monitor: Monitor | None, mode: str, trace: bool = False) -> Recorder:
    return Recorder(mode, trace) if monitor is None else Recorder(mode, trace, monitor.on_round, monitor.on_switch)


def _finish(model: PreTrainedModel, monitor: Monitor | None, output: Any, recorder: Recorder) -> Any:
    """Keeps the figures of a call, and returns its output with them."""
    stats = recorder.close()
    model.ssd_stats = stats
    if monitor is not None:
        monitor.on_call(stats)
    return with_stats(output, stats)


_MEMORIES = PlanMemories()


def _memory_of(
    model: PreTrainedModel, assistants: Assistants, config: SSDConfig, kwargs: dict[str, Any]
) -> PlanMemory | None:
    """What calls like this one have shown, where anything can change within a call."""
    num_rows = (num_prompts(model, kwargs) or 1) * (call_config(model, kwargs).num_return_sequences or 1)
    return _MEMORIES.find(model, assistants, config, num_rows=num_rows, samples=may_sample(model, kwargs))


# The call that a model's own `generate()` runs in, in this thread.


@dataclass(frozen=True)
class _Running:
    model: PreTrainedModel
    call: SSDCall


_RUNNING: ContextVar[_Running | None] = ContextVar("hf_ssd_running", default=None)


@contextlib.contextmanager
def _running(running: _Running | None) -> Iterator[None]:
    token = _RUNNING.set(running)
    try:
        yield
    finally:
        _RUNNING.reset(token)


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
_BORROWERS_LOCK = ForkLock()


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
