"""Figures with an interval that says how much they depend on the prompts and repeats they were measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its bootstrap interval; `low` and `high` are `None` where there is nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


class Resampling:
    """Draws prompts and repeats with replacement, always the same ones.

    Arms that took turns on the same prompts share what made a prompt hard and a minute slow. Speeds of several arms
    from one object are of the same draws, so that this cancels in their ratio.

    Args:
        num_prompts: Prompts there are.
        num_repeats: How often each of them was run.
        num_resamples: How often to draw.
        seed: Seed of the draws.
    """

    def __init__(self, num_prompts: int, num_repeats: int, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> None:
        self.is_possible = num_prompts * num_repeats > 1
        generator = np.random.default_rng(seed)
        self._prompts = generator.integers(num_prompts, size=(num_resamples, 1, num_prompts))
        self._repeats = generator.integers(num_repeats, size=(num_resamples, num_repeats, 1))

    def speeds(self, tokens: Array, seconds: Array) -> Array:
        """Tokens per second in each draw: per repeat all tokens over all time, the median over the repeats.

        Args:
            tokens: Tokens of each call, of shape `(num_repeats, num_prompts)`.
            seconds: Its time, of the same shape.

        Returns:
            Of shape `(num_resamples,)`.
        """
        drawn_tokens = tokens[self._repeats, self._prompts].sum(axis=2)
        drawn_seconds = seconds[self._repeats, self._prompts].sum(axis=2)
        speeds: Array = np.median(drawn_tokens / drawn_seconds, axis=1)
        return speeds

    def estimate(self, value: float, drawn: Array) -> Estimate:
        """`value` with the interval that its values in the draws span."""
        return with_interval(value, drawn) if self.is_possible else Estimate(value)


def with_interval(value: float, drawn: Array) -> Estimate:
    """`value` with the percentile interval of what it comes to in resamples, of shape `(num_resamples,)`."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(float(value), float(low), float(high))


def mean_with_interval(values: Sequence[float], num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of independent values with its bootstrap interval.

    Raises:
        ValueError: If there are none.
    """
    if not len(values):
        raise ValueError("`values` must hold at least one number, but is empty.")
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 1:
        return Estimate(float(array[0]))
    # The values that occur and how often: so few differ (hit or miss) that drawing counts is as good as drawing each.
    distinct, counts = np.unique(array, return_counts=True)
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(array), counts / len(array), size=num_resamples) @ distinct / len(array)
    return with_interval(float(array.mean()), drawn)
