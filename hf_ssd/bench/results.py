"""From timed calls to the figures of a comparison. Pure: no model, no clock, no output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ..metrics import SSDStats
from ..trace import Overlap
from .arms import Arm, Call
from .profile import Profile, profile_of
from .prompts import Prompt
from .settings import AR, AR_ALL_CORES, HF_ASSISTED, HF_ASSISTED_ALL_CORES

# The arms that the others are divided by, and the field that holds the ratio.
PEERS = {
    "ratio_to_ar": AR,
    "ratio_to_ar_all_cores": AR_ALL_CORES,
    "ratio_to_hf_assisted": HF_ASSISTED,
    "ratio_to_hf_assisted_all_cores": HF_ASSISTED_ALL_CORES,
}

Calls = Mapping[tuple[int, int], Call]  # (repeat, prompt index) -> call


@dataclass(frozen=True)
class Difference:
    """Where a text leaves AR's.

    Args:
        prompt: Index of the prompt.
        position: Index of the first differing token, counted from the end of the prompt.
        logit_gap: Gap between the target's two highest logits there. Near zero: both tokens were as good.
    """

    prompt: int
    position: int
    logit_gap: float | None = None


@dataclass(frozen=True)
class ArmResult:
    """Figures of an arm; `None` where the arm has no such figure. The units are in the names.

    Args:
        tokens_per_s: All tokens of a repeat over all its time, prefill included; the median over the repeats.
        decode_tokens_per_s: The same without the time to the first token, and without the tokens that came with it.
        ttft_ms: Time to first token, the median over all calls.
        ratio_to_ar: `tokens_per_s` over that of AR on the target's threads.
        ratio_to_hf_assisted: The same for transformers' assisted generation, at its fastest setting.
        ratio_to_ar_all_cores: The same for AR on all cores.
        ratio_to_hf_assisted_all_cores: The same for assisted generation on all cores.
        tokens_per_round: Mean number of tokens of a target forward after the first.
        acceptance: Accepted share of the draft tokens that verification reached.
        hit_rate: Share of outcomes that the speculation cache was prepared for.
        depth_at_hit: Mean number of draft tokens that were ready at a hit.
        verify_ms: Mean time of a verification.
        wait_ms: Mean time per round that the target waited for the assistant.
        draft_ms: Mean time per round that the assistant computed.
        identical_to_ar: `[prompts whose text is AR's in every repeat, prompts]`.
        first_differences: One entry per prompt whose text is not.
        threads: CPU threads of the target, of the assistant, and of both together.
        settings: What the arm was run with.
        degraded: Why the arm went on without its assistant, where it did.
        profile: What `hf-ssd predict` reads.
    """

    tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_ms: float
    ratio_to_ar: float | None = None
    ratio_to_hf_assisted: float | None = None
    ratio_to_ar_all_cores: float | None = None
    ratio_to_hf_assisted_all_cores: float | None = None
    tokens_per_round: float | None = None
    acceptance: float | None = None
    hit_rate: float | None = None
    depth_at_hit: float | None = None
    verify_ms: float | None = None
    wait_ms: float | None = None
    draft_ms: float | None = None
    identical_to_ar: tuple[int, int] | None = None
    first_differences: tuple[Difference, ...] = ()
    threads: Mapping[str, int | None] | None = None
    settings: Mapping[str, Any] | None = None
    degraded: str | None = None
    profile: Profile | None = None


@dataclass(frozen=True)
class PromptResult:
    """A prompt, its length, the tokens that the first arm generated for it, and tokens per second of each arm."""

    kind: str
    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    tokens_per_s: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """Everything that `hf-ssd compare` found out; [`to_dict`] is what `--json` prints."""

    pair: Mapping[str, str]
    dtype: str
    generation: Mapping[str, Any]
    environment: Mapping[str, Any]
    arms: Mapping[str, ArmResult]
    prompts: Sequence[PromptResult]
    overlap: Overlap | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tokens_per_s(calls: Calls) -> float:
    """Tokens over time of each repeat; the median over the repeats."""
    return median(
        sum(len(call.tokens) for call in group) / sum(call.duration_s for call in group) for group in _by_repeat(calls)
    )


def decode_tokens_per_s(calls: Calls) -> float | None:
    """[`tokens_per_s`] without the time to the first token and the tokens that came with it."""
    rates = []
    for group in _by_repeat(calls):
        decoded = [call for call in group if call.num_decode_tokens > 0]
        if decoded:
            rates.append(sum(call.num_decode_tokens for call in decoded) / sum(call.decode_s for call in decoded))
    return median(rates) if rates else None


def fastest_variants(calls: Mapping[Arm, Calls]) -> dict[str, Arm]:
    """For each arm name the variant with most tokens per second."""
    best: dict[str, Arm] = {}
    for arm in calls:
        if arm.name not in best or tokens_per_s(calls[arm]) > tokens_per_s(calls[best[arm.name]]):
            best[arm.name] = arm
    return best


def summarise_arm(arm: Arm, calls: Calls, variants: Mapping[str, float]) -> ArmResult:
    """The figures of one arm by itself.

    Args:
        arm: The arm.
        calls: Its calls.
        variants: Tokens per second of every variant that was tried, by variant.
    """
    settings = {**arm.settings, "tried_tokens_per_s": dict(variants)} if len(variants) > 1 else arm.settings
    result = ArmResult(
        tokens_per_s=tokens_per_s(calls),
        decode_tokens_per_s=decode_tokens_per_s(calls),
        ttft_ms=median(call.first_token_s * 1e3 for call in calls.values()),
        tokens_per_round=_tokens_per_forward(calls),
        threads=_threads(arm.target_threads, arm.assistant_threads),
        settings=settings,
    )
    return result if arm.config is None else _with_rounds(result, arm, calls)


def compare_arms(results: Mapping[str, ArmResult]) -> dict[str, ArmResult]:
    """Adds the ratios to each peer that was measured."""
    peers = {field: results[peer].tokens_per_s for field, peer in PEERS.items() if peer in results}
    compared = {}
    for name, result in results.items():
        ratios: dict[str, Any] = {field: result.tokens_per_s / speed for field, speed in peers.items()}
        compared[name] = replace(result, **ratios)
    return compared


def find_differences(calls: Calls, reference: Calls) -> tuple[Difference, ...]:
    """For each prompt whose text differs from the reference's in some repeat, where it first does, without the gap.

    Args:
        calls: Calls of an arm.
        reference: Calls of AR; its first repeat counts.
    """
    found: dict[int, Difference] = {}
    for (_, prompt), call in sorted(calls.items()):
        expected = reference[0, prompt].tokens
        if call.tokens != expected and prompt not in found:
            found[prompt] = Difference(prompt, _common_prefix(call.tokens, expected))
    return tuple(found[prompt] for prompt in sorted(found))


def summarise_prompts(
    prompts: Sequence[Prompt], num_prompt_tokens: Sequence[int], calls: Mapping[str, Calls]
) -> tuple[PromptResult, ...]:
    """Per prompt the tokens per second of each arm, the median over the repeats."""
    results = []
    for index, prompt in enumerate(prompts):
        of_arm = {name: [call for (_, i), call in group.items() if i == index] for name, group in calls.items()}
        speeds = {name: median(len(call.tokens) / call.duration_s for call in group) for name, group in of_arm.items()}
        first = next(iter(of_arm.values()))[0]
        results.append(PromptResult(prompt.kind, prompt.text, num_prompt_tokens[index], len(first.tokens), speeds))
    return tuple(results)


def _with_rounds(result: ArmResult, arm: Arm, calls: Calls) -> ArmResult:
    """Adds what the rounds of all calls together tell."""
    stats = [call.stats for call in calls.values() if call.stats is not None]
    ran_on = next(((s.target_threads, s.assistant_threads) for s in stats if s.target_threads is not None), None)
    pooled = SSDStats(
        mode=arm.config.mode if arm.config else arm.name, rounds=tuple(round_ for s in stats for round_ in s.rounds)
    )
    return replace(
        result,
        tokens_per_round=pooled.tokens_per_round,
        acceptance=pooled.acceptance,
        hit_rate=pooled.hit_rate,
        depth_at_hit=pooled.depth_at_hit,
        verify_ms=pooled.verify_ms,
        wait_ms=pooled.wait_ms,
        draft_ms=pooled.draft_ms,
        threads=_threads(*ran_on) if ran_on else result.threads,
        degraded=next((s.degraded for s in stats if s.degraded), None),
        profile=profile_of(stats),
    )


def _threads(target: int, assistant: int | None) -> dict[str, int | None]:
    return {"target": target, "assistant": assistant, "total": target + (assistant or 0)}


def _tokens_per_forward(calls: Calls) -> float | None:
    forwards = sum(call.num_emissions - 1 for call in calls.values())
    return sum(call.num_decode_tokens for call in calls.values()) / forwards if forwards > 0 else None


def _by_repeat(calls: Calls) -> list[list[Call]]:
    repeats = sorted({repeat for repeat, _ in calls})
    return [[call for (repeat, _), call in calls.items() if repeat == wanted] for wanted in repeats]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)
