"""The critical batch size, by its formula and as the arms of a benchmark show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..theory import critical_batch_size
from ..types import Origin, RoundStats


@dataclass(frozen=True)
class BackupFigures:
    """Drafting just in time against a backup that takes no time, at one batch size. What the formula takes, and gives.

    Args:
        hit_rate: Share of outcomes that were prepared for, with drafting just in time.
        tokens_ratio: Tokens per round with drafting just in time over those with the fast backup.
        jit: Time that drafting just in time adds to a round with a miss, in units of a round without it.
        formula: From how many rows on the fast backup wins, by the formula; `None` where it never does.
        speed_ratio: Tokens per second with the fast backup over those with drafting just in time, as measured.
    """

    hit_rate: float
    tokens_ratio: float
    jit: float
    formula: float | None
    speed_ratio: float


def compare_backups(
    jit: Sequence[RoundStats], fast: Sequence[RoundStats], jit_tokens_per_s: float, fast_tokens_per_s: float
) -> BackupFigures | None:
    """Compares two arms that differ in their backup.

    Args:
        jit: Rounds of the arm that drafts just in time, one entry per row.
        fast: Rounds of the other.
        jit_tokens_per_s: Speed of the first.
        fast_tokens_per_s: Speed of the second.

    Returns:
        `None` where an arm has no miss.
    """
    misses, fast_misses = ([r for r in rounds if r.miss is not None] for rounds in (jit, fast))
    if not misses or not fast_misses:
        return None
    num_hits, num_misses = sum(r.origin is Origin.CACHE for r in jit), sum(r.miss is not None for r in jit)
    hit_rate = num_hits / (num_hits + num_misses)
    tokens_ratio = _mean(r.num_emitted for r in jit) / _mean(r.num_emitted for r in fast)
    added_ms = max(_mean(r.wait_ms for r in misses) - _mean(r.wait_ms for r in fast_misses), 0.0)
    backup = added_ms / _mean(r.verify_ms + r.wait_ms for r in fast)
    formula = critical_batch_size(hit_rate, tokens_ratio, backup)
    return BackupFigures(
        hit_rate=hit_rate,
        tokens_ratio=tokens_ratio,
        jit=backup,
        formula=None if math.isinf(formula) else formula,
        speed_ratio=fast_tokens_per_s / jit_tokens_per_s,
    )


def measured_critical_batch_size(speed_ratios: Mapping[int, float]) -> float | None:
    """From which batch size on the fast backup was faster.

    Args:
        speed_ratios: Its speed over that of drafting just in time, by batch size.

    Returns:
        Where the ratio, a line between logarithms of the sizes, last comes to 1; 0 where it was faster at all of them
        from the smallest on, infinity where it was not at the largest. `None` without sizes.
    """
    sizes = sorted(speed_ratios)
    if not sizes:
        return None
    if speed_ratios[sizes[-1]] < 1.0:
        return math.inf
    slower = [size for size in sizes if speed_ratios[size] < 1.0]
    if not slower:
        return 0.0
    below, above = slower[-1], sizes[sizes.index(slower[-1]) + 1]
    share = (1.0 - speed_ratios[below]) / (speed_ratios[above] - speed_ratios[below])
    return math.exp(math.log(below) + share * (math.log(above) - math.log(below)))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
