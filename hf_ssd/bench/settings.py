"""What `hf-ssd compare` can be asked for, and what all measurements share.

Importing this loads no model and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..config import SSDConfig
from .prompts import KINDS, Prompt, select_prompts

DTYPES = ("bfloat16", "float32", "float16")
ALL_CORES = "_all_cores"  # ends the name of an arm that gets every core
AR, AR_ALL_CORES = "ar", "ar_all_cores"
HF_ASSISTED, HF_ASSISTED_ALL_CORES = "hf_assisted", "hf_assisted_all_cores"
HF_INT8, HF_INT8_ALL_CORES = "hf_assisted_int8", "hf_assisted_int8_all_cores"
PROMPT_LOOKUP, PROMPT_LOOKUP_ALL_CORES = "prompt_lookup", "prompt_lookup_all_cores"
SD, SSD = "sd", "ssd"
AUTO = "auto"  # SSD in mode "auto"; measured with batches
ARM_NAMES = (AR, AR_ALL_CORES, HF_ASSISTED, HF_ASSISTED_ALL_CORES, SD, SSD)
BENCH_ARM_NAMES = (
    AR,
    AR_ALL_CORES,
    HF_ASSISTED,
    HF_ASSISTED_ALL_CORES,
    HF_INT8,
    HF_INT8_ALL_CORES,
    PROMPT_LOOKUP,
    PROMPT_LOOKUP_ALL_CORES,
    SD,
    SSD,
)
DEFAULT_NUM_PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every measurement needs to know, checked in full when the object is made.

    Args:
        target: Name or folder of the target; `None`, together with `assistant`, takes the embedded pair.
        assistant: Name or folder of the assistant.
        dtype: Precision of both models.
        max_new_tokens: Most tokens per text.
        seed: Seed of the draws.
        target_threads: CPU threads of the target; `None` splits the cores as the library does.
        assistant_threads: CPU threads of the assistant's process; `None` as above.
        repeats: How often everything is run.
        num_assistant_tokens: As in [`SSDConfig`].
        cache_budget: As in [`SSDConfig`].
        draft_tree_size: As in [`SSDConfig`].
        fan_out: As in [`SSDConfig`].
        assistant_quantization: As in [`SSDConfig`].
        draft_vocab_size: As in [`SSDConfig`].
        verification: As in [`SSDConfig`].
        backup: As in [`SSDConfig`].
        arms: Which arms to run.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
    """

    KNOWN_ARMS: ClassVar[tuple[str, ...]] = ARM_NAMES

    target: str | None = None
    assistant: str | None = None
    dtype: str = "bfloat16"
    max_new_tokens: int = 64
    seed: int = 0
    target_threads: int | None = None
    assistant_threads: int | None = None
    repeats: int = 1
    num_assistant_tokens: int | Literal["auto"] = "auto"
    cache_budget: int | Literal["auto"] = "auto"
    draft_tree_size: int | Literal["auto"] | None = "auto"
    fan_out: Literal["per_instance", "geometric", "uniform"] = "per_instance"
    assistant_quantization: Literal["auto", "int8"] | None = "auto"
    draft_vocab_size: int | Literal["auto"] | None = "auto"
    verification: Literal["auto", "coupled", "token", "block", "hierarchical"] = "auto"
    backup: Literal["auto", "jit", "ngram", "none"] = "auto"
    arms: Sequence[str] = ARM_NAMES

    def __post_init__(self) -> None:
        if (self.target is None) != (self.assistant is None):
            given, missing = ("target", "assistant") if self.assistant is None else ("assistant", "target")
            raise ValueError(
                f"`{given}` needs `{missing}` too, but only {getattr(self, given)!r} was given. "
                "Give both, or neither for the embedded pair."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {list(DTYPES)}, but got {self.dtype!r}.")
        unknown = [name for name in self.arms if name not in self.KNOWN_ARMS]
        if unknown or not self.arms:
            raise ValueError(f"`arms` must be some of {list(self.KNOWN_ARMS)}, but got {unknown or list(self.arms)}.")
        if self.max_new_tokens < 2:
            raise ValueError(f"`max_new_tokens` must be at least 2 to time decoding, but got {self.max_new_tokens}.")
        if self.repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, but got {self.repeats}.")
        _ = self.ssd_config  # its own checks, before any model is loaded

    @property
    def ssd_config(self) -> SSDConfig:
        """Settings of the SSD arm."""
        return SSDConfig(
            num_assistant_tokens=self.num_assistant_tokens,
            cache_budget=self.cache_budget,
            draft_tree_size=self.draft_tree_size,
            fan_out=self.fan_out,
            assistant_quantization=self.assistant_quantization,
            draft_vocab_size=self.draft_vocab_size,
            verification=self.verification,
            backup=self.backup,
            target_threads=self.target_threads,
            assistant_threads=self.assistant_threads,
        )


@dataclass(frozen=True, kw_only=True)
class CompareSettings(RunSettings):
    """Settings of a comparison, beyond those of [`RunSettings`].

    Args:
        temperature: 0 decodes greedily, anything above samples.
        top_k: Sample from the k likeliest tokens only.
        top_p: Sample from the likeliest tokens of this total probability only.
        num_prompts: Built-in prompts to run; `None` takes `DEFAULT_NUM_PROMPTS`.
        kinds: Kinds of built-in prompts.
        texts: Prompts of one's own, instead of the built-in ones.
        trace_path: File for the time line of one more SSD call, made after everything was timed.

    Raises:
        ValueError: If a value is not allowed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    num_prompts: int | None = None
    kinds: Sequence[str] = KINDS
    texts: Sequence[str] = ()
    trace_path: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace_path is not None and SSD not in self.arms:
            raise ValueError(f"`trace` needs the arm {SSD!r}, but `arms` is {list(self.arms)}. Add it.")
        if self.trace_path is not None and not self.trace_path.absolute().parent.is_dir():
            raise ValueError(
                f"`trace` must lie in a folder that exists, but got {str(self.trace_path)!r}. Make the folder first."
            )
        if any(not text.strip() for text in self.texts):
            raise ValueError("`prompt` must not be empty. Give a text, or leave it out for the built-in prompts.")
        if self.texts and self.num_prompts is not None:
            raise ValueError(
                f"`prompts` counts built-in prompts, but got {self.num_prompts} together with a prompt of your own. "
                "Leave one of them out."
            )
        self._check_sampling()
        _ = self.prompts  # its own checks

    def _check_sampling(self) -> None:
        check_temperature("temperature", self.temperature)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                f"`top_k` and `top_p` only act when sampling, but got {self.top_k} and {self.top_p} at temperature 0. "
                "Give a temperature above 0 too."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"`top_k` must be at least 1, but got {self.top_k}. Leave it out to sample from all tokens."
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"`top_p` must be above 0 and at most 1, but got {self.top_p}.")

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts to run."""
        if self.texts:
            return tuple(Prompt("own", text) for text in self.texts)
        return select_prompts(self.kinds, DEFAULT_NUM_PROMPTS if self.num_prompts is None else self.num_prompts)

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of generate() that say how tokens are chosen; they replace the models' own defaults."""
        return sampling_arguments(self.temperature, self.top_k, self.top_p)


def check_temperature(name: str, value: float) -> None:
    """Refuses what is no temperature.

    Raises:
        ValueError: If `value` is negative or not finite.
    """
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"`{name}` must be 0 (greedy) or more, but got {value}.")


def sampling_arguments(temperature: float, top_k: int | None = None, top_p: float | None = None) -> dict[str, Any]:
    """The arguments of generate() for a temperature; 0 decodes greedily. They replace the models' own defaults."""
    if temperature == 0:
        return {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    return {
        "do_sample": True,
        "num_beams": 1,
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }
