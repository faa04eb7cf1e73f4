"""What prediction needs to know of a run: times, acceptance and hits, without the rounds themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..metrics import SSDStats
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
        acceptance: For each draft position, how often it was accepted, and all before it, where the speculation reached
            that far. A long speculation is one whose tokens are likely, so no product of rates would give this.
        num_drafted: How many speculations reached that far, for each position.
        width: Draft tokens per position of a speculation: 1 for chains, more for trees.
        hit_rate: Share of outcomes that the speculation cache was prepared for.
        tokens_at_hit: Tokens of a round whose speculation was a hit.
        tokens_at_miss: Tokens of a round whose speculation was drafted after a miss, or in mode `"sd"`.
        depth_at_hit: Positions with draft tokens that were ready at a hit.
        depths_at_miss: How many misses, or rounds of mode `"sd"`, had draft tokens at 0, 1, 2, ... positions.
        wait_at_hit_ms: How long the target waited at a hit.
        wait_at_miss_ms: How long it waited otherwise: the time of the backup.
        step_ms: One step of drafting ahead, in which all branches grow; the ranking of outcomes is shared out to them.
        steps_at_hit: Steps of drafting ahead before a hit.
        steps_at_miss: Steps of drafting just in time. Those ahead, made in vain, are taken to be as many as at hits.
        token_ms: One of these steps.
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
    num_drafted: tuple[int, ...]
    width: float
    hit_rate: float | None
    tokens_at_hit: float | None
    tokens_at_miss: float | None
    depth_at_hit: float | None
    depths_at_miss: tuple[int, ...]
    wait_at_hit_ms: float | None
    wait_at_miss_ms: float | None
    step_ms: float | None
    steps_at_hit: float | None
    steps_at_miss: float | None
    token_ms: float | None

    def verify_ms(self, num_tokens: float) -> float:
        """Time to verify `num_tokens` tokens, the last emitted one included."""
        return self.verify_base_ms + self.verify_token_ms * num_tokens

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """A profile from what [`to_dict`] gave.

        Raises:
            ValueError: If a figure is missing, unknown or none.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise ValueError(
                f"A profile must have the fields {sorted(known)}, but {sorted(known - set(values))} are missing and "
                f"{sorted(set(values) - known)} are unknown. Measure again with this version of hf_ssd."
            )
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        for field in fields(cls):
            _check_figure(field.name, str(field.type), plain[field.name])
        return cls(**plain)


def _check_figure(name: str, kind: str, value: Any) -> None:
    """Checks a figure by how its field is written down: it may come from a file that somebody has changed."""
    if kind == "str":
        is_right = isinstance(value, str)
    elif kind.startswith("tuple"):
        is_right = isinstance(value, tuple) and all(_is_number(each, whole="int" in kind) for each in value)
    else:
        is_right = _is_number(value, whole=kind == "int") or (value is None and kind.endswith("None"))
    if not is_right:
        raise ValueError(f"`{name}` of a profile must be {kind} and finite, but got {value!r}.")


def _is_number(value: Any, *, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < float("inf")


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
    # Mode "sd" looks nothing up: it drafts in every round as after a miss.
    misses = rounds if mode == "sd" else [r for r in rounds if r.miss is not None]
    verify_base_ms, verify_token_ms = _fit_line([(r.num_draft_tokens + 1, r.verify_ms) for r in rounds])
    step_ms, steps_at_hit = _step_ms(later), _mean(r.num_draft_steps for r in later if r.origin is Origin.CACHE)
    ahead = (0.0, 0.0) if mode != "ssd" else None
    if steps_at_hit is not None and step_ms is not None:
        ahead = (steps_at_hit, step_ms)
    steps_at_miss, token_ms = _just_in_time([r for r in later if r.origin is Origin.JUST_IN_TIME], ahead)
    if steps_at_miss is not None:
        # Misses that were answered at once took no step.
        steps_at_miss *= sum(r.origin is Origin.JUST_IN_TIME for r in misses) / len(misses)
    # The last speculation of a call was cut to the tokens still wanted.
    acceptance, num_drafted = _acceptance([round_ for call in calls for round_ in call.rounds[:-1]] or rounds)
    decode_ms = sum(_decode_ms(call) for call in calls)
    decoded = sum(call.num_tokens - 1 for call in calls)
    return Profile(
        mode=mode,
        num_calls=len(calls),
        num_rounds=len(rounds),
        num_tokens=sum(call.num_tokens for call in calls),
        decode_tokens_per_s=decoded / decode_ms * 1e3 if decode_ms > 0 else None,
        prefill_ms=_mean(call.ttft_ms for call in calls if call.ttft_ms is not None),
        verify_base_ms=verify_base_ms,
        verify_token_ms=verify_token_ms,
        verify_single_ms=_mean(r.verify_ms for r in rounds if not r.num_draft_tokens),
        overhead_ms=max(decode_ms - sum(r.verify_ms + r.wait_ms for r in rounds), 0.0) / len(rounds),
        acceptance=acceptance,
        num_drafted=num_drafted,
        width=_ratio(sum(r.num_draft_tokens for r in rounds), sum(r.depth for r in rounds)) or 1.0,
        hit_rate=_hit_rate(rounds) if mode == "ssd" else None,
        tokens_at_hit=_mean(r.num_emitted for r in hits),
        tokens_at_miss=_mean(r.num_emitted for r in misses),
        depth_at_hit=_mean(r.depth for r in hits),
        depths_at_miss=_counts([r.depth for r in misses]),
        wait_at_hit_ms=_mean(r.wait_ms for r in hits),
        wait_at_miss_ms=_mean(r.wait_ms for r in misses),
        step_ms=step_ms,
        steps_at_hit=steps_at_hit,
        steps_at_miss=steps_at_miss,
        token_ms=token_ms,
    )


def _decode_ms(call: SSDStats) -> float:
    return 0.0 if call.first_token_s is None else (call.end_s - call.first_token_s) * 1e3


def _acceptance(rounds: Sequence[RoundStats]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Acceptance by position, and on how many speculations each is measured."""
    rates, numbers = [], []
    for position in range(max(r.depth for r in rounds)):
        drafted = [r for r in rounds if r.depth > position]
        rates.append(sum(r.num_accepted > position for r in drafted) / len(drafted))
        numbers.append(len(drafted))
    return tuple(rates), tuple(numbers)


def _hit_rate(rounds: Sequence[RoundStats]) -> float | None:
    num_hits = sum(r.origin is Origin.CACHE for r in rounds)
    return _ratio(num_hits, num_hits + sum(r.miss is not None for r in rounds))


def _step_ms(rounds: Sequence[RoundStats]) -> float | None:
    """Before a hit the assistant did nothing but draft ahead."""
    hits = [r for r in rounds if r.origin is Origin.CACHE]
    return _ratio(sum(r.draft_ms for r in hits), sum(r.num_draft_steps for r in hits))


def _just_in_time(misses: Sequence[RoundStats], ahead: tuple[float, float] | None) -> tuple[float | None, float | None]:
    """Steps after a miss, and the time of one.

    Args:
        misses: Rounds whose speculations were drafted just in time.
        ahead: Steps ahead that were made before in vain, and the time of one; `None` if that is not known.
    """
    if not misses or ahead is None:
        return None, None
    steps = sum(r.num_draft_steps for r in misses) / len(misses) - ahead[0]
    spent_ms = sum(r.draft_ms for r in misses) / len(misses) - ahead[0] * ahead[1]
    return (steps, spent_ms / steps) if steps > 0 and spent_ms > 0 else (None, None)


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of `y = a + b x` by least squares, with `b` at least 0: more tokens never take less time."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return mean_y - slope * mean_x, slope


def _counts(numbers: Sequence[int]) -> tuple[int, ...]:
    """How often 0, 1, 2, ... occur."""
    return tuple(numbers.count(number) for number in range(max(numbers, default=-1) + 1))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return _ratio(sum(values), len(values))
