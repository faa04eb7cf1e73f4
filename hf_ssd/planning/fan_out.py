"""Fan-out: how many bonus tokens to prepare for each number of accepted draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import SSDConfig
from ..theory import outcome_probabilities


def plan_fan_out(config: SSDConfig, acceptance: Sequence[float]) -> tuple[int, ...]:
    """The fan-out F_0..F_K for a speculation of K draft tokens.

    Args:
        config: `fan_out`, `cache_budget` and `power_law_exponent` are read.
        acceptance: For each of the K positions the chance to be accepted when all before it were.

    Returns:
        K + 1 numbers. Their sum is the budget, but for a list in `config.fan_out`, which is its own budget.
    """
    num_outcomes = len(acceptance) + 1
    if isinstance(config.fan_out, tuple):
        return tuple(config.fan_out[min(k, len(config.fan_out) - 1)] for k in range(num_outcomes))
    if config.fan_out == "uniform":
        return round_to_budget([1.0] * num_outcomes, config.cache_budget)
    return round_to_budget(geometric_weights(acceptance, config.power_law_exponent), config.cache_budget)


def geometric_weights(acceptance: Sequence[float], power_law_exponent: float) -> list[float]:
    """Weights of the best fan-out: `P(k accepted)^(1 / (1 + r))` (arXiv 2603.03251, theorem 12).

    If F prepared bonus tokens miss with probability `F^-r`, these minimise the expected misses under a budget. With the
    same acceptance `a` everywhere they fall as `a^(k / (1 + r))`, and the last is larger by `(1 - a)^(-1 / (1 + r))`.
    """
    return [probability ** (1.0 / (1.0 + power_law_exponent)) for probability in outcome_probabilities(acceptance)]


def round_to_budget(weights: Sequence[float], budget: int) -> tuple[int, ...]:
    """Whole numbers in proportion to `weights` that sum to `budget`, by largest remainder, ties to the larger weight.

    The largest weight gets at least one.
    """
    total = sum(weights)
    shares = [weight / total * budget for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda k: (counts[k] - shares[k], -weights[k]))
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return tuple(counts)
