"""Arms: ways to generate the same text, and how one call of each is run and timed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SSDConfig
from ..eagle3 import Eagle3Head
from ..generation import disable_ssd, enable_ssd
from ..metrics import SSDStats
from .settings import ALL_CORES, AR, HF_ASSISTED, HF_INT8, PROMPT_LOOKUP, SD, SSD

# Draft lengths that transformers' assisted generation is tried with, beside its own defaults.
HF_DRAFT_LENGTHS = (3, 5)
# What prompt lookup is tried with: transformers has no default for it.
LOOKUP_LENGTHS = (3, 10)

Inputs = Mapping[str, torch.Tensor]


class Method(str, Enum):
    """Whose code generates, and what drafts."""

    PLAIN = "transformers generate"
    ASSISTED = "transformers assisted generation"
    ASSISTED_INT8 = "transformers assisted generation, assistant in int8"
    PROMPT_LOOKUP = "transformers prompt lookup"
    OURS = "hf_ssd"


# The arms of transformers, on the target's threads; each also has a name that ends in `ALL_CORES`.
PEER_METHODS = {
    AR: Method.PLAIN,
    HF_ASSISTED: Method.ASSISTED,
    HF_INT8: Method.ASSISTED_INT8,
    PROMPT_LOOKUP: Method.PROMPT_LOOKUP,
}


@dataclass(frozen=True)
class Arm:
    """One way to generate. Arms of the same name are variants: the fastest of them counts.

    Args:
        name: One of the names in `settings`, or that of an SSD arm with settings of its own.
        method: Whose code generates, and what drafts.
        target_threads: CPU threads of the process that runs the target.
        assistant_threads: CPU threads of the assistant's own process; `None` where there is none.
        num_assistant_tokens: Draft length of transformers' own arms; `None` leaves its defaults.
        config: Settings of SD and SSD; `None` for transformers' own arms.
    """

    name: str
    method: Method
    target_threads: int
    assistant_threads: int | None = None
    num_assistant_tokens: int | None = None
    config: SSDConfig | None = None

    @property
    def label(self) -> str:
        """Name and variant, unique within a comparison."""
        return f"{self.name} ({self.variant})" if self.has_variants else self.name

    @property
    def has_variants(self) -> bool:
        return self.method not in (Method.PLAIN, Method.OURS)

    @property
    def variant(self) -> str:
        return "defaults" if self.num_assistant_tokens is None else f"K={self.num_assistant_tokens}"

    @property
    def settings(self) -> dict[str, Any]:
        """What the arm was run with, beyond the threads."""
        if self.config is not None:
            return self.config.to_dict()
        variant = {"variant": self.variant} if self.has_variants else {}
        return {"method": self.method.value, **variant}


@dataclass(frozen=True)
class Call:
    """One timed call of generate(). Times are in seconds.

    Args:
        tokens: The generated token ids, prompt excluded.
        duration_s: From the call of generate() to its return.
        first_token_s: From the call to the first tokens.
        num_first_tokens: How many came at once then: transformers drafts before the prefill and may emit several.
        num_emissions: How often tokens came, which is the number of target forwards in transformers' own arms.
        stats: Statistics of the library, for its own arms.
    """

    tokens: tuple[int, ...]
    duration_s: float
    first_token_s: float
    num_first_tokens: int
    num_emissions: int
    stats: SSDStats | None = None

    @property
    def num_decode_tokens(self) -> int:
        return len(self.tokens) - self.num_first_tokens

    @property
    def decode_s(self) -> float:
        return self.duration_s - self.first_token_s


def build_arms(
    names: Sequence[str],
    ssd_config: SSDConfig,
    target_threads: int,
    assistant_threads: int,
    all_cores: int,
    *,
    draft_lengths: Sequence[int] = HF_DRAFT_LENGTHS,
    ssd_variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Arm, ...]:
    """The arms of a measurement, variants included, in the order of `names`.

    Args:
        names: Names from `settings`.
        ssd_config: Settings of the SSD arm; SD takes the same without pre-speculation.
        target_threads: CPU threads of the target, for every arm but those that get all cores.
        assistant_threads: CPU threads of the assistant's process in SD and SSD.
        all_cores: Number of cores of the machine.
        draft_lengths: What assisted generation is tried with, beside its defaults.
        ssd_variants: More SSD arms: fields of [`SSDConfig`] that differ from `ssd_config`, by the arm's name.
    """
    ssd_config = replace(ssd_config, target_threads=target_threads, assistant_threads=assistant_threads)
    configs = {
        SD: replace(ssd_config, mode="sd"),
        SSD: replace(ssd_config, mode="ssd"),
        **{name: replace(ssd_config, **values) for name, values in (ssd_variants or {}).items()},
    }
    lengths: dict[Method, Sequence[int | None]] = {
        Method.PLAIN: (None,),
        Method.ASSISTED: (None, *draft_lengths),
        Method.ASSISTED_INT8: (None, *draft_lengths),
        Method.PROMPT_LOOKUP: LOOKUP_LENGTHS,
    }
    arms = []
    for name in (*names, *(ssd_variants or ())):
        if name in configs:
            config = configs[name]
            threads = config.target_threads or target_threads
            arms.append(Arm(name, Method.OURS, threads, config.assistant_threads, config=config))
        else:
            method = PEER_METHODS[name.removesuffix(ALL_CORES)]
            threads = all_cores if name.endswith(ALL_CORES) else target_threads
            arms += [Arm(name, method, threads, num_assistant_tokens=length) for length in lengths[method]]
    return tuple(arms)


def choose_arms(asked: Sequence[str], known: Sequence[str], assistant: PreTrainedModel) -> list[str]:
    """The arms to run, in the order of `known`: those asked for that the assistant can take part in.

    Raises:
        ValueError: If some were asked for by name, rather than all, in which it cannot.
    """
    names = [name for name in known if name in asked]
    if not isinstance(assistant, Eagle3Head):
        return names
    drafting = [name for name in names if PEER_METHODS.get(name.removesuffix(ALL_CORES)) in _WITH_ASSISTANT]
    if drafting and len(names) < len(known):
        raise ValueError(f"`arms` must not hold {drafting} for an EAGLE-3 head, which transformers cannot draft with.")
    return [name for name in names if name not in drafting]


_WITH_ASSISTANT = (Method.ASSISTED, Method.ASSISTED_INT8)


class Runner:
    """Runs calls of any arm on one pair of models. A context manager: outside it, SSD is off.

    Args:
        target: The model whose output is wanted.
        assistant: The model that drafts.
        generation_kwargs: Arguments of generate() that all arms share. `tokenizer` and `assistant_tokenizer` are for
            arms with an assistant.
        int8_assistant: The assistant with its weights in int8, for the arms of that method.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel,
        generation_kwargs: Mapping[str, Any],
        int8_assistant: PreTrainedModel | None = None,
    ):
        self.target = target
        self.assistant = assistant
        self.int8_assistant = int8_assistant
        names = ("tokenizer", "assistant_tokenizer")
        self.generation_kwargs = {name: value for name, value in generation_kwargs.items() if name not in names}
        self.tokenizers = {name: value for name, value in generation_kwargs.items() if name in names}
        # A second model object over the same weights, which never becomes an SSD model: transformers' own arms run
        # transformers' own code and nothing else, without switching SSD off and on between calls.
        self.plain_target = copy.copy(target)

    def __enter__(self) -> Runner:
        enable_ssd(self.target, assistant_model=self.assistant, **self.tokenizers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disable_ssd(self.target)

    def run(self, arm: Arm, inputs: Mapping[str, torch.Tensor], max_new_tokens: int, seed: int = 0) -> Call:
        """Generates once.

        Args:
            arm: How.
            inputs: Tokenized prompt, one row.
            max_new_tokens: Most tokens to generate; EOS ends a text earlier unless `generation_kwargs` say otherwise.
            seed: Seed of the draws, set before the clock starts.
        """
        probe = FirstTokenProbe()
        kwargs = {**self.generation_kwargs, **inputs, "max_new_tokens": max_new_tokens, "streamer": probe}
        torch.manual_seed(seed)
        if arm.method is Method.OURS:
            call = _timed(self.target, probe, {**kwargs, "ssd_config": arm.config})
            return replace(call, stats=self.target.ssd_stats)
        assistant = self.int8_assistant if arm.method is Method.ASSISTED_INT8 else self.assistant
        assert assistant is not None
        drafting: dict[Method, dict[str, Any]] = {
            Method.ASSISTED: {"assistant_model": assistant, **self.tokenizers},
            Method.ASSISTED_INT8: {"assistant_model": assistant, **self.tokenizers},
            Method.PROMPT_LOOKUP: {"prompt_lookup_num_tokens": arm.num_assistant_tokens},
        }
        takes_assistant = arm.method in _WITH_ASSISTANT
        lengths = draft_length(assistant, arm.num_assistant_tokens) if takes_assistant else nullcontext()
        with torch_threads(arm.target_threads), lengths:
            return _timed(self.plain_target, probe, {**kwargs, **drafting.get(arm.method, {})})

    def top_two_gap(self, token_ids: Sequence[int], threads: int) -> float:
        """Gap between the target's two highest logits after `token_ids`, before any logits processor."""
        with torch_threads(threads), torch.inference_mode():
            ids = torch.tensor([list(token_ids)], device=self.plain_target.device)
            best, second = self.plain_target(input_ids=ids).logits[0, -1].float().topk(2).values.tolist()
        return float(best - second)


class FirstTokenProbe(BaseStreamer):
    """A streamer that only notes when the first tokens came and how many, and counts the rest."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        self.num_first_tokens = 0
        self.num_emissions = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.num_emissions += 1
        if self.num_emissions == 1:
            self.first_token_at = time.perf_counter()
            self.num_first_tokens = value.numel()

    def end(self) -> None:
        pass


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Runs torch on `num_threads` CPU threads, then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def draft_length(assistant: PreTrainedModel, num_assistant_tokens: int | None) -> Iterator[None]:
    """Gives transformers' assisted generation a constant draft length, or its defaults for `None`.

    The assistant works on a copy of its generation config: some of transformers' schedules write to it.
    """
    original = assistant.generation_config
    assistant.generation_config = copy.deepcopy(original)
    if num_assistant_tokens is not None:
        assistant.generation_config.num_assistant_tokens = num_assistant_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
    try:
        yield
    finally:
        assistant.generation_config = original


def _timed(model: PreTrainedModel, probe: FirstTokenProbe, kwargs: dict[str, Any]) -> Call:
    start = time.perf_counter()
    output = model.generate(**kwargs)
    end = time.perf_counter()
    tokens = tuple(output[0, kwargs["input_ids"].shape[1] :].tolist())
    return Call(
        tokens=tokens,
        duration_s=end - start,
        first_token_s=(probe.first_token_at or end) - start,
        num_first_tokens=probe.num_first_tokens,
        num_emissions=probe.num_emissions,
    )
