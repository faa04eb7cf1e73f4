"""A line through measurements that keep coming: time as a function of tokens."""

from __future__ import annotations


class LinearFit:
    """Fits `a + b n` by least squares, with old measurements fading.

    A single measurement says nothing about the slope, so the fit starts from a belief: that one more costs `slope`
    times what the first one does. It is worth `weight` measurements spread over n.

    Args:
        slope: Believed `b / (a + b)`.
        weight: How much data the belief about the slope outweighs.
        memory: What share of its weight a measurement keeps when the next one comes.
    """

    def __init__(self, slope: float, weight: float = 4.0, memory: float = 0.95) -> None:
        self.slope = slope
        self.weight = weight
        self.memory = memory
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, n^2, y, n y

    def update(self, n: float, value: float) -> None:
        """Takes in that `n` took `value`. What took much longer than expected, a hiccup of the machine, counts less."""
        expected = self(n)
        if expected is not None:
            value = min(value, 2.0 * expected)
        kept = [self.memory * each for each in self._sums]
        new = (1.0, n, n * n, value, n * value)
        self._sums = tuple(old + now for old, now in zip(kept, new, strict=True))  # type: ignore[assignment]

    @property
    def line(self) -> tuple[float, float] | None:
        """`(a, b)`, neither below 0; `None` before the first measurement."""
        count, sum_n, sum_nn, sum_y, sum_ny = self._sums
        if not count:
            return None
        mean_n, mean_y = sum_n / count, sum_y / count
        spread = sum_nn / count - mean_n**2
        together = sum_ny / count - mean_n * mean_y
        # The believed slope through the mean, in proportion to how much of n's range has been seen.
        believed = self.slope * mean_y / (1.0 + self.slope * (mean_n - 1.0))
        belief = self.weight / count
        b = (together + belief * believed) / (spread + belief)
        b = min(max(b, 0.0), mean_y / mean_n if mean_n else 0.0)
        return max(mean_y - b * mean_n, 0.0), b

    def __call__(self, n: float) -> float | None:
        """The value expected for `n`, `None` before the first measurement."""
        line = self.line
        return None if line is None else line[0] + line[1] * n
