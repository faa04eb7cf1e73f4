"""Arms: ways to generate the same text, and how one call of each is run and timed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SSDConfig
from ..generation import disable_ssd, enable_ssd
from ..metrics import SSDStats
from .settings import AR, AR_ALL_CORES, ARM_NAMES, HF_ASSISTED, HF_ASSISTED_ALL_CORES, SD, SSD

# Draft lengths that transformers' assisted generation is tried with, beside its own defaults (None).
HF_DRAFT_LENGTHS = (None, 3, 5)


@dataclass(frozen=True)
class Arm:
    """One way to generate. Arms of the same name are variants: the fastest of them counts.

    Args:
        name: One of `ARM_NAMES`.
        target_threads: CPU threads of the process that runs the target.
        assistant_threads: CPU threads of the assistant's own process; `None` where there is none.
        assisted: Whether an assistant drafts.
        num_assistant_tokens: Draft length of transformers' assisted generation; `None` leaves its defaults.
        config: Settings of SD and SSD; `None` for transformers' own arms.
    """

    name: str
    target_threads: int
    assistant_threads: int | None = None
    assisted: bool = False
    num_assistant_tokens: int | None = None
    config: SSDConfig | None = None

    @property
    def label(self) -> str:
        """Name and variant, unique within a comparison."""
        if self.config is not None or not self.assisted:
            return self.name
        return f"{self.name} ({self.variant})"

    @property
    def variant(self) -> str:
        return "defaults" if self.num_assistant_tokens is None else f"K={self.num_assistant_tokens}"

    @property
    def settings(self) -> dict[str, Any]:
        """What the arm was run with, beyond the threads."""
        if self.config is not None:
            return self.config.to_dict()
        if not self.assisted:
            return {"method": "transformers generate"}
        return {"method": "transformers assisted generation", "variant": self.variant}


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
    names: Sequence[str], ssd_config: SSDConfig, target_threads: int, assistant_threads: int, all_cores: int
) -> tuple[Arm, ...]:
    """The arms of a comparison, variants included.

    Args:
        names: Some of `ARM_NAMES`.
        ssd_config: Settings of the SSD arm; SD takes the same without pre-speculation.
        target_threads: CPU threads of the target, for every arm but those that get all cores.
        assistant_threads: CPU threads of the assistant's process in SD and SSD.
        all_cores: Number of cores of the machine.
    """
    ssd_config = replace(ssd_config, target_threads=target_threads, assistant_threads=assistant_threads)
    arms: dict[str, list[Arm]] = {
        AR: [Arm(AR, target_threads)],
        AR_ALL_CORES: [Arm(AR_ALL_CORES, all_cores)],
        SD: [Arm(SD, target_threads, assistant_threads, True, config=replace(ssd_config, mode="sd"))],
        SSD: [Arm(SSD, target_threads, assistant_threads, True, config=replace(ssd_config, mode="ssd"))],
    }
    for name, threads in ((HF_ASSISTED, target_threads), (HF_ASSISTED_ALL_CORES, all_cores)):
        arms[name] = [Arm(name, threads, assisted=True, num_assistant_tokens=k) for k in HF_DRAFT_LENGTHS]
    return tuple(arm for name in ARM_NAMES if name in names for arm in arms[name])


class Runner:
    """Runs calls of any arm on one pair of models. A context manager: outside it, SSD is off.

    Args:
        target: The model whose output is wanted.
        assistant: The model that drafts.
        generation_kwargs: Arguments of generate() that all arms share.
    """

    def __init__(self, target: PreTrainedModel, assistant: PreTrainedModel, generation_kwargs: Mapping[str, Any]):
        self.target = target
        self.assistant = assistant
        self.generation_kwargs = dict(generation_kwargs)
        # A second model object over the same weights, which never becomes an SSD model: transformers' own arms run
        # transformers' own code and nothing else, without switching SSD off and on between calls.
        self.plain_target = copy.copy(target)

    def __enter__(self) -> Runner:
        enable_ssd(self.target, assistant_model=self.assistant)
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
            max_new_tokens: Most tokens to generate; EOS ends a text earlier, as it does for a user.
            seed: Seed of the draws, set before the clock starts.
        """
        probe = FirstTokenProbe()
        kwargs = {**self.generation_kwargs, **inputs, "max_new_tokens": max_new_tokens, "streamer": probe}
        torch.manual_seed(seed)
        if arm.config is None:
            with torch_threads(arm.target_threads), draft_length(self.assistant, arm.num_assistant_tokens):
                assistant = {"assistant_model": self.assistant} if arm.assisted else {}
                return _timed(self.plain_target, probe, {**kwargs, **assistant})
        call = _timed(self.target, probe, {**kwargs, "ssd_config": arm.config})
        return replace(call, stats=self.target.ssd_stats)

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
