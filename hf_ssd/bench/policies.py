"""`hf-ssd policies`: what mode "auto" makes of an assistant that is no help, and of a text that changes.

Two measurements. With an *unrelated* assistant (random weights, the shape of the pair's own) drafting can only lose:
mode "auto" has to find that out, and then be as fast as plain `generate()` with all cores. And a *changing text*:
records that are easy to draft for, then random letters that are not, then records again. There mode "auto" has to stop
drafting and to come back. The text is forced on the target token by token by a logits processor that the assistant does
not have, so that both do all their work and every mode emits the same tokens.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SSDConfig
from ..metrics import SSDStats
from ..pairs import Pair
from ..runtime import placement
from ..types import Origin
from .arms import Arm, Call, Runner, build_arms
from .compare import generation_kwargs, load
from .encoding import encode
from .environment import environment
from .figures import end_to_end
from .prompts import Prompt, select_prompts
from .results import tokens_per_s
from .schedule import WARM_UP_TOKENS, Progress, run_schedule
from .settings import AR_ALL_CORES, AUTO, SSD, RunSettings
from .statistics import Estimate, Resampling

AUTO_WITHOUT_COPIES = f"{AUTO}: no copied drafts"
QUESTION = "Export the first part of the catalogue, then the access keys, then the rest of the catalogue."


@dataclass(frozen=True, kw_only=True)
class PolicySettings(RunSettings):
    """What `hf-ssd policies` can be asked for.

    Args:
        num_prompts: Prompts of the measurement with an unrelated assistant.
        section_tokens: Tokens of each of the three parts of the changing text.

    Raises:
        ValueError: If a value is not allowed.
    """

    num_prompts: int = 4
    section_tokens: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "section_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {getattr(self, name)}.")


@dataclass(frozen=True)
class UnrelatedArm:
    """How one arm did with the unrelated assistant: its speed, that over plain `generate()`'s, and what it ran in."""

    tokens_per_s: Estimate
    ratio: Estimate
    tokens_by_mode: dict[str, int]
    num_trials: int


@dataclass(frozen=True)
class Course:
    """How one arm went through the changing text.

    Args:
        token_s: For each token the seconds since the call began.
        rounds: For each round its first token, mode, tokens, and whether the cache had the speculation (`None` where
            it was not asked).
        switches: Tokens so far, and what was decided.
    """

    token_s: tuple[float, ...]
    rounds: tuple[tuple[int, str, int, bool | None], ...] = ()
    switches: tuple[tuple[int, str, bool], ...] = ()


@dataclass(frozen=True)
class PolicyResult:
    """Both measurements."""

    pair: dict[str, str]
    dtype: str
    environment: dict[str, Any]
    unrelated: dict[str, UnrelatedArm]
    section_tokens: int
    courses: dict[str, Course]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, ready for JSON."""
        return asdict(self)


def measure_policies(settings: PolicySettings, progress: Progress | None = None) -> PolicyResult:
    """Runs both measurements.

    Args:
        settings: What to measure.
        progress: Called before each step with what comes next, the steps done and the steps in all.
    """
    report = progress or (lambda what, done, total: None)
    report("reading the models", 0, 0)
    pair, names = load(settings)
    arms = _arms(settings)
    unrelated = _measure_unrelated(pair, arms, settings, report)
    courses = {}
    shown = [arm for arm in arms if arm.name != AUTO_WITHOUT_COPIES]
    for number, arm in enumerate(shown):
        report(f"changing text, {arm.name}", number, len(shown))
        courses[arm.name] = run_course(pair, arm, settings)
    return PolicyResult(names, settings.dtype, environment(), unrelated, settings.section_tokens, courses)


def unrelated_assistant(like: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A model of the same shape with random weights, which depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(like.config)
    model.generation_config = like.generation_config
    return model.to(like.device, like.dtype).eval()


def changing_text(tokenizer: Any, section_tokens: int, seed: int = 0) -> list[int]:
    """Token ids of a text in three parts of the same length: records, random letters, records."""
    records = ["".join(f'{{"id": {n}, "name": "item {n}", "price": {n}.50}}\n' for n in start) for start in _RECORDS]
    letters = "".join(random.Random(seed).choices(string.ascii_letters + string.digits, k=16 * section_tokens))
    ids: list[int] = []
    for text in (records[0], letters, records[1]):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"][:section_tokens]
        if len(tokens) < section_tokens:
            raise ValueError(f"`section_tokens` must be at most {len(tokens)}, but got {section_tokens}.")
        ids += tokens
    return ids


_RECORDS = (range(100, 400), range(400, 700))


def _arms(settings: PolicySettings) -> tuple[Arm, ...]:
    """Plain `generate()`, mode "ssd" and mode "auto"; all but the second may use every core."""
    cores = placement.available_cores()
    threads = placement.split_threads(settings.target_threads, settings.assistant_threads, cores)
    config = replace(settings.ssd_config, seed=settings.seed)
    # What is copied from the text helps with any assistant.
    variants: dict[str, dict[str, Any]] = {
        AUTO: {"mode": "auto"},
        AUTO_WITHOUT_COPIES: {"mode": "auto", "ngram_drafts": False},
    }
    return build_arms((AR_ALL_CORES, SSD), config, *threads, cores, ssd_variants=variants)


def _measure_unrelated(
    pair: Pair, arms: Sequence[Arm], settings: PolicySettings, report: Progress
) -> dict[str, UnrelatedArm]:
    inputs = [encode(pair.tokenizer, prompt) for prompt in select_prompts(num_prompts=settings.num_prompts)]
    assistant = unrelated_assistant(pair.assistant, settings.seed)
    with Runner(pair.target, assistant, generation_kwargs(pair, {"do_sample": False})) as runner:
        calls = run_schedule(
            runner,
            arms,
            inputs,
            repeats=settings.repeats,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            report=report,
        )
    resampling = Resampling(len(inputs), settings.repeats)
    speeds = {arm.name: (tokens_per_s(group), end_to_end(group, resampling)) for arm, group in calls.items()}
    base, base_drawn = speeds[AR_ALL_CORES]
    figures = {}
    for arm, group in calls.items():
        speed, drawn = speeds[arm.name]
        figures[arm.name] = UnrelatedArm(
            resampling.estimate(speed, drawn),
            resampling.estimate(speed / base, drawn / base_drawn),
            *_modes(list(group.values())),
        )
    return figures


def _modes(calls: Sequence[Call]) -> tuple[dict[str, int], int]:
    """Tokens by mode, and the number of trials."""
    modes: dict[str, int] = {}
    num_trials = 0
    for call in calls:
        if call.stats is None:
            continue
        for mode, num_tokens in call.stats.tokens_by_mode.items():
            modes[mode] = modes.get(mode, 0) + num_tokens
        num_trials += call.stats.num_trials
    return modes, num_trials


def run_course(pair: Pair, arm: Arm, settings: PolicySettings) -> Course:
    """One arm's way through the changing text, after a short call in which the assistant starts."""
    ids = changing_text(pair.tokenizer, settings.section_tokens, settings.seed)
    prompt = encode(pair.tokenizer, Prompt("own", QUESTION))
    num_prompt = prompt["input_ids"].shape[1]

    class ForcedText(LogitsProcessor):
        # A class of a function's own cannot be sent to another process, so the assistant drafts without it.
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, float("-inf"))
            forced[:, ids[min(input_ids.shape[1] - num_prompt, len(ids) - 1)]] = 0.0
            return forced

    kwargs = generation_kwargs(pair, {"do_sample": False})
    processors = LogitsProcessorList([ForcedText()])
    clock, runner = _Clock(), Runner(pair.target, pair.assistant, kwargs)
    own = {"ssd_config": arm.config} if isinstance(arm.config, SSDConfig) else {}
    with runner if own else nullcontext():  # without an assistant that starts meanwhile
        runner.run(arm, prompt, WARM_UP_TOKENS)
        model = pair.target if own else runner.plain_target
        clock.begin()
        model.generate(
            **runner.generation_kwargs,
            **prompt,
            **own,
            max_new_tokens=len(ids),
            logits_processor=processors,
            streamer=clock,
        )
        stats = pair.target.ssd_stats if own else None
    return _course(clock, stats)


class _Clock(BaseStreamer):
    """A streamer that notes when each token came."""

    def begin(self) -> None:
        """The call begins now."""
        self.token_s: list[float] = []
        self._began_s = time.perf_counter()
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        now = time.perf_counter() - self._began_s
        self.token_s += [now] * value.numel()

    def end(self) -> None:
        pass


def _course(clock: _Clock, stats: SSDStats | None) -> Course:
    if stats is None:
        return Course(tuple(clock.token_s))
    rounds, num_tokens = [], 1  # the prefill gives the first
    for each in stats.rounds:
        mode = each.mode or stats.mode
        is_hit = each.origin is Origin.CACHE
        was_asked = mode == "ssd" and (is_hit or each.miss is not None)
        rounds.append((num_tokens, mode, each.num_emitted, is_hit if was_asked else None))
        num_tokens += each.num_emitted
    switches = tuple((each.num_tokens, str(each), each.is_trial) for each in stats.switches)
    return Course(tuple(clock.token_s), tuple(rounds), switches)
