"""From timed calls to the figures of a benchmark: per arm, over all prompts and per category. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..metrics import SSDStats
from ..trace import Overlap
from .arms import Arm, Method
from .batches import BatchFigures
from .profile import Profile
from .replay import FanOutFigures
from .results import Calls, Difference, PromptResult, fastest_variants, summarise_arm, tokens_per_s
from .rounds import RoundFigures, summarise_rounds
from .statistics import Array, Estimate, Resampling

ALL = "all"  # stands beside the categories for all prompts together


@dataclass(frozen=True)
class ArmFigures:
    """Figures of an arm; `None` where the arm has no such figure.

    Args:
        tokens_per_s: All tokens of a repeat over all its time, prefill included; the median over the repeats.
        decode_tokens_per_s: The same without the time to the first token, and without the tokens that came with it.
        ttft_ms: Time to first token, the median over all calls.
        ratios: `tokens_per_s` over that of each of transformers' arms, by the name of that arm.
        decode_ratios: `decode_tokens_per_s` over that of each of transformers' arms.
        tokens_per_round: Mean number of tokens of a target forward after the first.
        rounds: What the rounds tell, for SD and SSD.
        identical_to_ar: `(prompts whose text is AR's in every repeat, prompts)`; `None` when sampling.
        first_differences: One entry per prompt whose text is not.
        threads: CPU threads of the target, of the assistant, and of both together.
        settings: What the arm was run with. Where several settings were tried, the fastest counts over all prompts.
        degraded: Why the arm went on without its assistant, where it did.
        profile: What `hf-ssd predict` reads, for SD and SSD over all prompts.
    """

    tokens_per_s: Estimate
    decode_tokens_per_s: Estimate | None
    ttft_ms: float
    ratios: Mapping[str, Estimate]
    decode_ratios: Mapping[str, Estimate]
    tokens_per_round: float | None
    rounds: RoundFigures | None
    identical_to_ar: tuple[int, int] | None
    first_differences: tuple[Difference, ...]
    threads: Mapping[str, int | None] | None
    settings: Mapping[str, Any] | None
    degraded: str | None
    profile: Profile | None = None


@dataclass(frozen=True)
class Measurement:
    """All arms at one temperature.

    Args:
        temperature: 0 is greedy.
        arms: Figures over all prompts, by arm.
        categories: The same for the prompts of each category.
        prompts: Tokens per second on every prompt.
    """

    temperature: float
    arms: Mapping[str, ArmFigures]
    categories: Mapping[str, Mapping[str, ArmFigures]]
    prompts: Sequence[PromptResult]


@dataclass(frozen=True)
class BenchResult:
    """Everything that `hf-ssd bench` found out; [`to_dict`] is what it writes as JSON.

    Args:
        pair: What target and assistant are called.
        dtype: Precision of both.
        suite: Where the prompts come from.
        generation: How texts were generated, and how often.
        environment: Hardware and versions.
        measurements: One per temperature.
        fan_outs: Hit rates of the fan-outs on recorded rounds; empty where none were recorded.
        batches: Throughput by batch size; empty where none was asked for.
        trace: One more SSD call with its time line; `None` without an SSD arm. Not part of the JSON.
        overlap: How much of that call's drafting was hidden.
    """

    pair: Mapping[str, str]
    dtype: str
    suite: str
    generation: Mapping[str, Any]
    environment: Mapping[str, Any]
    measurements: Sequence[Measurement]
    fan_outs: Sequence[FanOutFigures] = ()
    batches: Sequence[BatchFigures] = ()
    trace: SSDStats | None = None
    overlap: Overlap | None = None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(replace(self, trace=None))
        del values["trace"]
        return values


def measured(
    calls: Mapping[Arm, Calls],
    categories: Sequence[str],
    differences: Mapping[str, Sequence[Difference]] | None = None,
) -> tuple[dict[str, ArmFigures], dict[str, dict[str, ArmFigures]]]:
    """The figures of every arm, over all prompts and per category.

    Args:
        calls: The calls of every arm and variant; all arms ran the same prompts equally often.
        categories: The category of each prompt.
        differences: For each arm the prompts whose text is not AR's; `None` when sampling.

    Returns:
        The figures by arm, and by category and arm. The variant of an arm that is fastest over all prompts counts.
    """
    best = list(fastest_variants(calls).values())
    of_best = {arm: calls[arm] for arm in best}
    overall = _figures(of_best, range(len(categories)), differences)
    for arm in best:
        variants = {other.variant: tokens_per_s(calls[other]) for other in calls if other.name == arm.name}
        if len(variants) > 1:
            settings = {**arm.settings, "tried_tokens_per_s": variants}
            overall[arm.name] = replace(overall[arm.name], settings=settings)
    by_category = {}
    for category in dict.fromkeys(categories):
        prompts = [index for index, other in enumerate(categories) if other == category]
        figures = _figures(of_best, prompts, differences)
        by_category[category] = {name: replace(each, profile=None) for name, each in figures.items()}
    return overall, by_category


def _figures(
    calls: Mapping[Arm, Calls], prompts: Sequence[int], differences: Mapping[str, Sequence[Difference]] | None
) -> dict[str, ArmFigures]:
    """The figures of every arm on some of the prompts."""
    calls = {arm: {at: call for at, call in group.items() if at[1] in prompts} for arm, group in calls.items()}
    results = {arm.name: summarise_arm(arm, group, {}) for arm, group in calls.items()}
    peers = [arm.name for arm in calls if arm.method is not Method.OURS]
    resampling = Resampling(len(prompts), len({repeat for group in calls.values() for repeat, _ in group}))
    speeds = {name: result.tokens_per_s for name, result in results.items()}
    decode_speeds = {name: r.decode_tokens_per_s for name, r in results.items() if r.decode_tokens_per_s}
    drawn = {arm.name: end_to_end(group, resampling) for arm, group in calls.items()}
    decode_drawn = {arm.name: _decoding(group, resampling) for arm, group in calls.items()}
    figures = {}
    for arm, group in calls.items():
        name, result = arm.name, results[arm.name]
        stats = [call.stats for call in group.values() if call.stats is not None]
        own = None if differences is None else [d for d in differences.get(name, ()) if d.prompt in prompts]
        decoding = decode_speeds.get(name)
        figures[name] = ArmFigures(
            tokens_per_s=resampling.estimate(speeds[name], drawn[name]),
            decode_tokens_per_s=None if decoding is None else resampling.estimate(decoding, decode_drawn[name]),
            ttft_ms=result.ttft_ms,
            ratios=_ratios(name, peers, speeds, drawn, resampling),
            decode_ratios=_ratios(name, peers, decode_speeds, decode_drawn, resampling),
            tokens_per_round=result.tokens_per_round,
            rounds=summarise_rounds(stats) if stats else None,
            identical_to_ar=None if own is None else (len(prompts) - len(own), len(prompts)),
            first_differences=tuple(own or ()),
            threads=result.threads,
            settings=result.settings,
            degraded=result.degraded,
            profile=result.profile,
        )
    return figures


def _ratios(
    name: str, peers: Sequence[str], speeds: Mapping[str, float], drawn: Mapping[str, Array], resampling: Resampling
) -> dict[str, Estimate]:
    """An arm's speed over that of each peer. The draws are of the same prompts and repeats for all of them."""
    return {
        peer: resampling.estimate(speeds[name] / speeds[peer], drawn[name] / drawn[peer])
        for peer in peers
        if name in speeds and peer in speeds
    }


def end_to_end(calls: Calls, resampling: Resampling) -> Array:
    """Draws of [`tokens_per_s`]."""
    tokens = _table(calls, {at: len(call.tokens) for at, call in calls.items()})
    return resampling.speeds(tokens, _table(calls, {at: call.duration_s for at, call in calls.items()}))


def _decoding(calls: Calls, resampling: Resampling) -> Array:
    tokens = _table(calls, {at: call.num_decode_tokens for at, call in calls.items()})
    return resampling.speeds(tokens, _table(calls, {at: call.decode_s for at, call in calls.items()}))


def _table(calls: Calls, values: Mapping[tuple[int, int], float]) -> Array:
    """Values by call as an array of shape `(num_repeats, num_prompts)`."""
    repeats = sorted({repeat for repeat, _ in calls})
    prompts = sorted({prompt for _, prompt in calls})
    return np.array([[values[repeat, prompt] for prompt in prompts] for repeat in repeats], dtype=np.float64)
