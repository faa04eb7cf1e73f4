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
    sd_round,
    ssd_round,
    tokens_per_round,
    tokens_per_second,
)
from .conditions import Backup, Conditions

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
        draft_tokens: Draft tokens per verification and row.
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
    return _fastest(_sd_with(conditions, batch_size, backup) for backup in _backups(conditions, batch_size))


def predict_ssd(conditions: Conditions, batch_size: int = 1, budget: int | None = None) -> Prediction:
    """Drafting ahead while the target verifies, and just in time after a miss, as long as gives most tokens per second.

    Args:
        conditions: The pair and its hardware.
        batch_size: Rows that are decoded together.
        budget: The cache budget B of each row; `None` is that of `conditions`.
    """
    budget = conditions.budget if budget is None else budget
    return _fastest(_ssd_with(conditions, batch_size, budget, backup) for backup in _backups(conditions, batch_size))


def _sd_with(conditions: Conditions, batch_size: int, backup: Backup) -> Prediction:
    num_draft_tokens = conditions.width * backup.depth
    verify_ms = conditions.verify_ms(batch_size * (num_draft_tokens + 1))
    round_ms = sd_round(verify_ms, backup.steps * conditions.draft_ms(batch_size), conditions.overhead_ms)
    tokens = _tokens_after_miss(conditions, backup)
    return Prediction(
        mode="sd",
        batch_size=batch_size,
        tokens_per_s=tokens_per_second(tokens, round_ms, batch_size),
        tokens_per_round=tokens,
        round_ms=round_ms,
        verify_ms=verify_ms,
        draft_tokens=num_draft_tokens,
    )


def _ssd_with(conditions: Conditions, batch_size: int, budget: int, backup: Backup) -> Prediction:
    """SSD with a given way to draft after a miss.

    How many steps ahead are worth their time depends on the speed that they bring about; this goes round until both
    agree.
    """
    step_ms, backup_ms = conditions.tree_step_ms(batch_size, budget), backup.steps * conditions.draft_ms(batch_size)
    verify_ms = ms_per_token = conditions.verify_ms(batch_size)
    hit_rate, per_step = conditions.hit_rate(budget), conditions.depth_per_step
    max_steps = math.ceil(len(conditions.acceptance) / per_step)
    gains = [_tokens(conditions, (n + 1) * per_step) - _tokens(conditions, n * per_step) for n in range(max_steps)]
    for _ in range(MAX_ITERATIONS):
        steps = anytime_steps(gains, hit_rate=hit_rate, step_ms=step_ms, verify_ms=verify_ms, ms_per_token=ms_per_token)
        ahead = min(steps * per_step, len(conditions.acceptance))
        tokens = hit_rate * _tokens(conditions, ahead) + (1.0 - hit_rate) * _tokens_after_miss(conditions, backup)
        depth = hit_rate * ahead + (1.0 - hit_rate) * backup.depth
        verify_ms = conditions.verify_ms(batch_size * (conditions.width * depth + 1))
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
        draft_tokens=conditions.width * depth,
        steps=steps,
        rest_ms=rest_ms,
        backup_ms=backup_ms,
        hit_rate=hit_rate,
    )


def _tokens(conditions: Conditions, length: float) -> float:
    """Tokens per round of speculations of a mean length: between two whole lengths, a mixture of both."""
    length = min(length, len(conditions.acceptance))
    whole = int(length)
    shorter, longer = (tokens_per_round(conditions.acceptance[:n]) for n in (whole, whole + 1))
    return shorter + (length - whole) * (longer - shorter)


def _tokens_after_miss(conditions: Conditions, backup: Backup) -> float:
    return sum(share * _tokens(conditions, depth) for depth, share in enumerate(backup.depths))


def _backups(conditions: Conditions, batch_size: int) -> list[Backup]:
    """Ways to draft while the target waits: as a single row was seen to, otherwise equally many tokens each time."""
    longest = len(conditions.acceptance)
    if conditions.draft_length is not None:
        return [Backup.fixed(min(conditions.draft_length, longest))]
    if conditions.backup is not None and batch_size == 1:
        return [conditions.backup]
    return [Backup.fixed(length) for length in range(1, longest + 1)]


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


def predict_perfect_ssd(conditions: Conditions, depth: float) -> float:
    """Tokens per second of one row if every round were a hit at this depth and nobody ever waited."""
    return tokens_per_second(_tokens(conditions, depth), conditions.verify_ms(conditions.width * depth + 1))
