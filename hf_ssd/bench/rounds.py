"""What the rounds of an SD or SSD arm tell: how far drafts went, who waited, and what was out of reach. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..metrics import SSDStats
from ..types import Origin, RoundStats
from .profile import profile_of

NUM_SPANS = 8  # of a text, over which tokens per round are averaged


@dataclass(frozen=True)
class PerfectSSD:
    """The speed that SSD would reach if every round were a hit and nobody waited.

    `tokens_at_hit / (verify_at_hit_ms + overhead_ms)`: the tokens of a round whose speculation was a hit, over what
    such a round takes when the speculation is there already. All three are the run's own, so drafts are as deep and
    verifications as slow as they were in it.

    Args:
        tokens_per_s: That speed, after the first token.
        share: What the run reached of it after its first token: 1 is perfect.
        tokens_at_hit: Mean number of tokens of a round that began with a hit.
        verify_at_hit_ms: Mean time of its verification.
        overhead_ms: Mean time of any round that is neither verification nor waiting: emitting tokens, rolling back.
    """

    tokens_per_s: float
    share: float
    tokens_at_hit: float
    verify_at_hit_ms: float
    overhead_ms: float


@dataclass(frozen=True)
class RoundFigures:
    """Figures of an arm's rounds; `None` where the arm has no such figure. Times are means per round.

    Args:
        num_rounds: Verifications, prefills left out.
        tokens_per_round: Mean number of tokens of a target forward.
        acceptance: Accepted share of the draft tokens that verification reached.
        acceptance_by_position: For each draft position, how often it was accepted when all before it were.
        num_reached_by_position: How often that was tried: what the rates are worth.
        hit_rate: Share of outcomes that the speculation cache was prepared for.
        depth_at_hit: Draft tokens that were ready at a hit.
        verify_ms: The target's forward and the rule.
        wait_ms: Time that the target waited for the assistant.
        wait_share: `wait_ms` over `verify_ms`.
        draft_ms: The assistant's computing, hidden or not.
        draft_step_ms: The same per step of drafting, the first round of each text left out: the assistant's prefill
            is in it.
        perfect: The speed without misses and waiting; SSD only.
        tokens_per_round_over_time: Pairs of tokens generated so far and tokens per round there, for `NUM_SPANS` equal
            spans of the longest text. The last round of a text, which its end may cut short, is left out.
    """

    num_rounds: int
    tokens_per_round: float | None
    acceptance: float | None
    acceptance_by_position: tuple[float, ...]
    num_reached_by_position: tuple[int, ...]
    hit_rate: float | None
    depth_at_hit: float | None
    verify_ms: float | None
    wait_ms: float | None
    wait_share: float | None
    draft_ms: float | None
    draft_step_ms: float | None
    perfect: PerfectSSD | None
    tokens_per_round_over_time: tuple[tuple[float, float], ...]


def summarise_rounds(stats: Sequence[SSDStats]) -> RoundFigures:
    """The figures of the rounds of several calls together.

    Args:
        stats: Statistics of calls that ran in the same mode, each on a single row.
    """
    mode = stats[0].mode if stats else "ssd"
    pooled = SSDStats(mode=mode, rounds=tuple(round_ for call in stats for round_ in call.rounds))
    later = [round_ for call in stats for round_ in call.rounds[1:]]
    num_steps = sum(r.num_draft_steps for r in later)
    return RoundFigures(
        num_rounds=pooled.num_rounds,
        tokens_per_round=pooled.tokens_per_round,
        acceptance=pooled.acceptance,
        acceptance_by_position=pooled.acceptance_by_position,
        num_reached_by_position=tuple(
            sum(r.num_reached > position for r in pooled.rounds)
            for position in range(len(pooled.acceptance_by_position))
        ),
        hit_rate=pooled.hit_rate,
        depth_at_hit=pooled.depth_at_hit,
        verify_ms=pooled.verify_ms,
        wait_ms=pooled.wait_ms,
        wait_share=pooled.wait_ms / pooled.verify_ms if pooled.verify_ms and pooled.wait_ms is not None else None,
        draft_ms=pooled.draft_ms,
        draft_step_ms=sum(r.draft_ms for r in later) / num_steps if num_steps else None,
        perfect=perfect_ssd(stats),
        tokens_per_round_over_time=tokens_per_round_over_time([call.rounds for call in stats]),
    )


def perfect_ssd(stats: Sequence[SSDStats]) -> PerfectSSD | None:
    """[`PerfectSSD`] of some calls; `None` where none of their rounds began with a hit."""
    profile = profile_of(stats)
    hits = [r for call in stats for r in call.rounds if r.origin is Origin.CACHE]
    if profile is None or profile.decode_tokens_per_s is None or not hits:
        return None
    tokens_at_hit = sum(r.num_emitted for r in hits) / len(hits)
    verify_at_hit_ms = sum(r.verify_ms for r in hits) / len(hits)
    tokens_per_s = tokens_at_hit / (verify_at_hit_ms + profile.overhead_ms) * 1e3
    share = profile.decode_tokens_per_s / tokens_per_s
    return PerfectSSD(tokens_per_s, share, tokens_at_hit, verify_at_hit_ms, profile.overhead_ms)


def tokens_per_round_over_time(
    texts: Iterable[Sequence[RoundStats]], num_spans: int = NUM_SPANS
) -> tuple[tuple[float, float], ...]:
    """Mean tokens per round over the course of the texts.

    Args:
        texts: The rounds of each text, in order; the last of each does not count.
        num_spans: How many equal spans to divide the longest text into.

    Returns:
        Pairs of tokens generated so far, the middle of a span, and mean tokens of the rounds that began in it.
    """
    rounds = []
    for text in texts:
        so_far = 1  # the prefill's token
        for round_ in text[:-1]:
            rounds.append((so_far, round_.num_emitted))
            so_far += round_.num_emitted
    if not rounds:
        return ()
    width = max(max(so_far for so_far, _ in rounds) / num_spans, 1.0)
    spans: dict[int, list[int]] = {}
    for so_far, num_emitted in rounds:
        spans.setdefault(min(int(so_far / width), num_spans - 1), []).append(num_emitted)
    return tuple(((span + 0.5) * width, sum(spans[span]) / len(spans[span])) for span in sorted(spans))
