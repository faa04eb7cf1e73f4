"""How fast AR, SD and SSD are under given conditions: the speed model of `theory` with all that it needs.

Times of single operations, acceptance by position and hit rates go in. Draft lengths, steps ahead, tokens per round,
waiting and speed come out, by the rules that the drafting engine follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..theory import (
    anytime_steps,
    critical_batch_size,
    round_shares,
    sd_round,
    ssd_round,
    tokens_per_round,
    tokens_per_second,
)
from .conditions import Conditions

MAX_ITERATIONS = 50


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What to expect of a mode. Times are in milliseconds, `None` where the mode has no such figure.

    Args:
        mode: `"ar"`, `"sd"` or `"ssd"`.
        batch_size: Rows that are decoded together.
        budget: The cache budget B.
        tokens_per_s: Decoding speed of all rows together, prefill left out.
        tokens_per_round: Tokens per target forward and row.
        round_ms: Time of a round.
        verify_ms: Time of its verification.
        draft_tokens: Mean length of a speculation.
        steps: Steps ahead per round.
        rest_ms: What is left of the last step when the outcome is known.
        backup_ms: Time to draft just in time after a miss.
        hit_rate: Share of outcomes that are prepared for, of one row.
    """

    mode: str
    batch_size: int
    budget: int | None = None
    tokens_per_s: float
    tokens_per_round: float
    round_ms: float
    verify_ms: float
    draft_tokens: float = 0.0
    steps: int | None = None
    rest_ms: float | None = None
    backup_ms: float | None = None
    hit_rate: float | None = None

    @property
    def wait_ms(self) -> float:
        """Time of a round that is no verification."""
        return self.round_ms - self.verify_ms


def predict_ar(conditions: Conditions, batch_size: int = 1) -> Prediction:
    """One token per target forward."""
    verify_ms = conditions.verify_ms(batch_size)
    round_ms = sd_round(verify_ms, 0.0, conditions.overhead_ms)
    return Prediction(
        mode="ar",
        batch_size=batch_size,
        tokens_per_s=tokens_per_second(1.0, round_ms, batch_size),
        tokens_per_round=1.0,
        round_ms=round_ms,
        verify_ms=verify_ms,
    )


def predict_sd(conditions: Conditions, batch_size: int = 1) -> Prediction:
    """Verification and drafting in turn, with the draft length that gives most tokens per second."""
    return _fastest(_sd_at(conditions, batch_size, length) for length in _draft_lengths(conditions))


def predict_ssd(conditions: Conditions, batch_size: int = 1, budget: int | None = None) -> Prediction:
    """Drafting ahead while the target verifies, and just in time after a miss, as long as gives most tokens per second.

    Args:
        conditions: The pair and its hardware.
        batch_size: Rows that are decoded together.
        budget: The cache budget B of each row; `None` is that of `conditions`.
    """
    budget = conditions.budget if budget is None else budget
    return _fastest(_ssd_at(conditions, batch_size, budget, length) for length in _draft_lengths(conditions))


def _sd_at(conditions: Conditions, batch_size: int, length: int) -> Prediction:
    verify_ms = conditions.verify_ms(batch_size * (length + 1))
    round_ms = sd_round(verify_ms, length * conditions.draft_ms(batch_size), conditions.overhead_ms)
    tokens = tokens_per_round(conditions.acceptance[:length])
    return Prediction(
        mode="sd",
        batch_size=batch_size,
        tokens_per_s=tokens_per_second(tokens, round_ms, batch_size),
        tokens_per_round=tokens,
        round_ms=round_ms,
        verify_ms=verify_ms,
        draft_tokens=length,
    )


def _ssd_at(conditions: Conditions, batch_size: int, budget: int, backup_length: int) -> Prediction:
    """SSD with a given number of tokens after a miss.

    How many steps ahead are worth their time depends on the speed that they bring about; this goes round until both
    agree.
    """
    step_ms, backup_ms = conditions.tree_step_ms(batch_size, budget), backup_length * conditions.draft_ms(batch_size)
    verify_ms = ms_per_token = conditions.verify_ms(batch_size)
    hit_rate = 0.5
    for _ in range(MAX_ITERATIONS):
        steps = anytime_steps(
            conditions.acceptance,
            hit_rate=hit_rate,
            step_ms=step_ms,
            verify_ms=verify_ms,
            ms_per_token=ms_per_token,
        )
        # The branches for "all accepted" start one step later: the first runs the token they hang on.
        lengths = (steps, steps - 1, backup_length)
        shares = _shares(conditions, lengths, budget)
        hit_rate = 1.0 - shares[2]
        draft_tokens = sum(share * length for share, length in zip(shares, lengths, strict=True))
        tokens = sum(s * tokens_per_round(conditions.acceptance[:n]) for s, n in zip(shares, lengths, strict=True))
        verify_ms = conditions.verify_ms(batch_size * (draft_tokens + 1))
        rest_ms = max(steps * step_ms - verify_ms, 0.0)
        round_ms = ssd_round(
            hit_rate, verify_ms, backup_ms, rest=rest_ms, overhead=conditions.overhead_ms, batch_size=batch_size
        )
        if ms_per_token == round_ms / tokens:
            break
        ms_per_token = round_ms / tokens
    return Prediction(
        mode="ssd",
        batch_size=batch_size,
        budget=budget,
        tokens_per_s=tokens_per_second(tokens, round_ms, batch_size),
        tokens_per_round=tokens,
        round_ms=round_ms,
        verify_ms=verify_ms,
        draft_tokens=draft_tokens,
        steps=steps,
        rest_ms=rest_ms,
        backup_ms=backup_ms,
        hit_rate=hit_rate,
    )


def _shares(conditions: Conditions, lengths: tuple[int, int, int], budget: int) -> tuple[float, float, float]:
    """Shares of the kinds of round, whose speculations have these lengths."""
    rates = [conditions.hit_rates(length, budget) for length in lengths]
    return round_shares(
        [math.prod(conditions.acceptance[:length]) for length in lengths],
        [rejected for rejected, _ in rates],
        [accepted if lengths[1] else 0.0 for _, accepted in rates],
    )


def _draft_lengths(conditions: Conditions) -> Iterable[int]:
    """Numbers of tokens that may be drafted while the target waits."""
    longest = len(conditions.acceptance)
    if conditions.draft_length is not None:
        return (min(conditions.draft_length, longest),)
    return range(1, longest + 1)


def _fastest(predictions: Iterable[Prediction]) -> Prediction:
    return max(predictions, key=lambda prediction: prediction.tokens_per_s)


def predict_critical_batch_size(conditions: Conditions, budget: int | None = None) -> float:
    """From which batch size on drafting nothing after a miss beats drafting just in time.

    Tokens per round, hit rate and times are those of a single row.
    """
    just_in_time = predict_ssd(conditions, budget=budget)
    nothing = predict_ssd(replace(conditions, draft_length=0), budget=budget)
    assert just_in_time.hit_rate is not None
    assert just_in_time.backup_ms is not None
    assert just_in_time.rest_ms is not None
    without_ms = just_in_time.verify_ms + max(just_in_time.rest_ms, conditions.overhead_ms)
    tokens_ratio = just_in_time.tokens_per_round / nothing.tokens_per_round
    return critical_batch_size(just_in_time.hit_rate, tokens_ratio, just_in_time.backup_ms / without_ms)


def predict_perfect_ssd(conditions: Conditions, depth: int) -> float:
    """Tokens per second of one row if every round were a hit at this depth and nobody ever waited."""
    acceptance = conditions.acceptance[:depth]
    return tokens_per_second(tokens_per_round(acceptance), conditions.verify_ms(depth + 1))
