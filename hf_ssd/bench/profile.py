"""What prediction needs to know of a run: times, acceptance and hits, without the rounds themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..metrics import SSDStats, acceptance_by_position
from ..types import Origin, RoundStats


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How one pair of models ran in one mode. Times are means in milliseconds; `None` where the run has no such figure.

    Args:
        mode: The mode of the run: `"ssd"`, `"sd"` or `"ar"`.
        num_calls: Calls that were measured, of one row each.
        num_rounds: Verifications in them, prefills left out.
        num_tokens: Tokens generated, the first of each call included.
        decode_tokens_per_s: What the run reached after the first token of each call. Nothing is predicted from it.
        prefill_ms: Time to first token.
        verify_base_ms: `a` in `a + b n`, the time to verify `n` tokens, by least squares over the rounds.
        verify_token_ms: `b` in it. At least 0; 0 too where all rounds verified equally many tokens.
        verify_single_ms: Measured time of rounds that verified a single token.
        overhead_ms: Time of a round that is neither verification nor waiting: emitting tokens, bookkeeping.
        acceptance: For each draft position, how often it was accepted when all before it were.
        num_tested: How many draft tokens that is measured on, for each position.
        hit_rate: Share of outcomes that the speculation cache was prepared for.
        hit_rate_rejected: The same for outcomes in which a draft token was rejected.
        hit_rate_accepted: The same for outcomes in which all draft tokens were accepted.
        tokens_at_hit: Tokens of a round whose speculation was a hit.
        tokens_at_miss: Tokens of a round whose speculation was drafted after a miss, or in mode `"sd"`.
        depth_at_hit: Draft tokens that were ready at a hit.
        depth_at_miss: Draft tokens that were drafted after a miss, or in mode `"sd"`.
        wait_at_hit_ms: How long the target waited at a hit.
        wait_at_miss_ms: How long it waited otherwise: the time of the backup.
        step_ms: One step of drafting ahead, in which all branches grow; the ranking of outcomes is shared out to them.
        steps_at_hit: Steps of drafting ahead before a hit.
        token_ms: One token drafted just in time.
    """

    mode: str
    num_calls: int
    num_rounds: int
    num_tokens: int
    decode_tokens_per_s: float | None
    prefill_ms: float | None
    verify_base_ms: float
    verify_token_ms: float
    verify_single_ms: float | None
    overhead_ms: float
    acceptance: tuple[float, ...]
    num_tested: tuple[int, ...]
    hit_rate: float | None
    hit_rate_rejected: float | None
    hit_rate_accepted: float | None
    tokens_at_hit: float | None
    tokens_at_miss: float | None
    depth_at_hit: float | None
    depth_at_miss: float | None
    wait_at_hit_ms: float | None
    wait_at_miss_ms: float | None
    step_ms: float | None
    steps_at_hit: float | None
    token_ms: float | None

    def verify_ms(self, num_tokens: float) -> float:
        """Time to verify `num_tokens` tokens, the last emitted one included."""
        return self.verify_base_ms + self.verify_token_ms * num_tokens

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, ready for JSON."""
        return {**asdict(self), "acceptance": list(self.acceptance), "num_tested": list(self.num_tested)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """A profile from what [`to_dict`] gave.

        Raises:
            ValueError: If a figure is missing or unknown.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise ValueError(
                f"A profile must have the fields {sorted(known)}, but {sorted(known - set(values))} are missing and "
                f"{sorted(set(values) - known)} are unknown. Measure again with this version of hf_ssd."
            )
        return cls(**{**values, "acceptance": tuple(values["acceptance"]), "num_tested": tuple(values["num_tested"])})


def profile_of(stats: Sequence[SSDStats]) -> Profile | None:
    """The profile of the calls of one arm.

    Args:
        stats: Statistics of calls that ran in the same mode, each on a single row. Calls that lost their assistant are
            left out.

    Returns:
        [`Profile`], or `None` if no call has a round.
    """
    calls = [call for call in stats if call.rounds and call.degraded is None]
    if not calls:
        return None
    mode = calls[0].mode
    rounds = [round_ for call in calls for round_ in call.rounds]
    # The first round's drafting includes the assistant's prefill.
    later = [round_ for call in calls for round_ in call.rounds[1:]]
    hits = [r for r in rounds if r.origin is Origin.CACHE]
    misses = [r for r in rounds if r.origin is Origin.JUST_IN_TIME]
    base_ms, token_ms = _fit_line([(r.num_draft_tokens + 1, r.verify_ms) for r in rounds])
    step_ms = _step_ms(later)
    acceptance = acceptance_by_position(rounds)
    decode_ms = sum(_decode_ms(call) for call in calls)
    decoded = sum(call.num_tokens - 1 for call in calls)
    return Profile(
        mode=mode,
        num_calls=len(calls),
        num_rounds=len(rounds),
        num_tokens=sum(call.num_tokens for call in calls),
        decode_tokens_per_s=decoded / decode_ms * 1e3 if decode_ms > 0 else None,
        prefill_ms=_mean(call.ttft_ms for call in calls if call.ttft_ms is not None),
        verify_base_ms=base_ms,
        verify_token_ms=token_ms,
        verify_single_ms=_mean(r.verify_ms for r in rounds if not r.num_draft_tokens),
        overhead_ms=max(decode_ms - sum(r.verify_ms + r.wait_ms for r in rounds), 0.0) / len(rounds),
        acceptance=acceptance,
        num_tested=tuple(sum(_num_tested(r) > position for r in rounds) for position in range(len(acceptance))),
        hit_rate=_hit_rate(mode, rounds),
        hit_rate_rejected=_hit_rate(mode, _after(calls, all_accepted=False)),
        hit_rate_accepted=_hit_rate(mode, _after(calls, all_accepted=True)),
        tokens_at_hit=_mean(r.num_emitted for r in hits),
        tokens_at_miss=_mean(r.num_emitted for r in misses),
        depth_at_hit=_mean(r.depth for r in hits),
        depth_at_miss=_mean(r.depth for r in misses),
        wait_at_hit_ms=_mean(r.wait_ms for r in hits),
        wait_at_miss_ms=_mean(r.wait_ms for r in misses),
        step_ms=step_ms,
        steps_at_hit=_mean(r.num_draft_steps for r in later if r.origin is Origin.CACHE),
        token_ms=_token_ms(later, step_ms),
    )


def _decode_ms(call: SSDStats) -> float:
    return 0.0 if call.first_token_s is None else (call.end_s - call.first_token_s) * 1e3


def _num_tested(round_: RoundStats) -> int:
    """Positions at which a draft token was tested: those accepted, and the first that was not."""
    return min(round_.num_accepted + 1, round_.num_draft_tokens)


def _hit_rate(mode: str, rounds: Sequence[RoundStats]) -> float | None:
    """Hits over outcomes that were looked up; in mode "sd" none are."""
    num_hits = sum(r.origin is Origin.CACHE for r in rounds)
    num_misses = sum(r.miss is not None for r in rounds)
    return _ratio(num_hits, num_hits + num_misses) if mode == "ssd" else None


def _after(calls: Iterable[SSDStats], *, all_accepted: bool) -> list[RoundStats]:
    """Rounds that follow an outcome of one kind. The outcome of a prefill is of neither."""
    return [
        after
        for call in calls
        for before, after in zip(call.rounds, call.rounds[1:], strict=False)
        if before.num_draft_tokens and (before.num_accepted == before.num_draft_tokens) is all_accepted
    ]


def _step_ms(rounds: Sequence[RoundStats]) -> float | None:
    """Before a hit the assistant did nothing but draft ahead."""
    hits = [r for r in rounds if r.origin is Origin.CACHE]
    return _ratio(sum(r.draft_ms for r in hits), sum(r.num_draft_steps for r in hits))


def _token_ms(rounds: Sequence[RoundStats], step_ms: float | None) -> float | None:
    """Before a miss it drafted ahead as well, in vain; what is left of its time went into the tokens."""
    misses = [r for r in rounds if r.origin is Origin.JUST_IN_TIME]
    in_vain = sum(r.num_draft_steps - r.depth for r in misses)
    if in_vain and step_ms is None:
        return None
    spent_ms = sum(r.draft_ms for r in misses) - in_vain * (step_ms or 0.0)
    return _ratio(max(spent_ms, 0.0), sum(r.depth for r in misses))


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of `y = a + b x` by least squares, with `b` at least 0: more tokens never take less time."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return mean_y - slope * mean_x, slope


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return _ratio(sum(values), len(values))
