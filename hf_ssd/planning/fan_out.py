"""Fan-out: how many bonus tokens to prepare at each place where acceptance may stop."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..config import SSDConfig


def plan_fan_out(
    config: SSDConfig,
    budget: int,
    stop_probs: Sequence[float],
    candidate_probs: Sequence[Sequence[float]],
    depths: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The number of bonus tokens to prepare for each node of a speculation.

    Args:
        config: `fan_out` and `power_law_exponent` are read.
        budget: Outcomes to prepare, the sum of the result. A list in `config.fan_out` is its own budget.
        stop_probs: For each node, the root first, the chance that it is the last one accepted. For a chain of K draft
            tokens these are P(0 accepted), ..., P(K accepted).
        candidate_probs: For each node the chance of each candidate to be the bonus token if acceptance stops there,
            in falling order.
        depths: Number of draft tokens up to each node; for a chain, which is the default, 0, 1, ..., K.

    Returns:
        As many numbers as there are nodes.
    """
    if isinstance(config.fan_out, tuple):
        depths = range(len(stop_probs)) if depths is None else depths
        return tuple(config.fan_out[min(depth, len(config.fan_out) - 1)] for depth in depths)
    if config.fan_out == "uniform":
        return round_to_budget([1.0] * len(stop_probs), budget)
    if config.fan_out == "geometric":
        return round_to_budget(geometric_weights(stop_probs, config.power_law_exponent), budget)
    return likeliest_outcomes(stop_probs, candidate_probs, budget)


def likeliest_outcomes(
    stop_probs: Sequence[float], candidate_probs: Sequence[Sequence[float]], budget: int
) -> tuple[int, ...]:
    """Per-instance fan-out: the `budget` likeliest single outcomes, counted by node.

    An outcome's probability is that of stopping at its node times that of its bonus token there. Nothing with the same
    budget can hit more often, if these probabilities are right.
    """
    outcomes = (
        (stop * candidate, -node)
        for node, (stop, candidates) in enumerate(zip(stop_probs, candidate_probs, strict=True))
        for candidate in candidates
    )
    counts = [0] * len(stop_probs)
    for _, node in heapq.nlargest(budget, outcomes):
        counts[-node] += 1
    return tuple(counts)


def geometric_weights(stop_probs: Sequence[float], power_law_exponent: float) -> list[float]:
    """Weights of the best fan-out that sees only the probability to stop: `P(k)^(1 / (1 + r))` (arXiv 2603.03251,
    theorem 12).

    If F prepared bonus tokens miss with probability `F^-r`, these minimise the expected misses under a budget. With the
    same acceptance `a` everywhere they fall as `a^(k / (1 + r))`, and the last is larger by `(1 - a)^(-1 / (1 + r))`.
    """
    return [probability ** (1.0 / (1.0 + power_law_exponent)) for probability in stop_probs]


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
