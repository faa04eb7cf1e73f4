"""What a token costs, by the rounds that were measured: a ratio, and how far it can be trusted."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

HICCUP = 4.0  # times the median of its window: a longer round was the machine's doing, and counts as that long


@dataclass(frozen=True)
class Cost:
    """Milliseconds per token.

    Args:
        ms_per_token: All time over all tokens.
        error: Its standard error; 0 where it is only believed.
    """

    ms_per_token: float
    error: float = 0.0

    def is_surely_above(self, other: Cost, margin: float = 0.0, num_errors: float = 1.5) -> bool:
        """Whether this is more than `1 + margin` times the other, by some standard errors of the difference."""
        difference = self.ms_per_token - other.ms_per_token * (1.0 + margin)
        return difference > num_errors * math.hypot(self.error, other.error)


class RoundCosts:
    """The latest rounds in one mode.

    Args:
        window: Number of rounds that are kept.
    """

    def __init__(self, window: int = 32) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=window)  # milliseconds, tokens

    def __len__(self) -> int:
        return len(self._rounds)

    def add(self, num_tokens: float, duration_ms: float) -> None:
        """Takes in a round."""
        self._rounds.append((duration_ms, num_tokens))

    def clear(self) -> None:
        """Forgets them all."""
        self._rounds.clear()

    def cost(self, last: int | None = None) -> Cost | None:
        """The cost over the latest `last` rounds, by default all; `None` before there are two.

        The error is that of a ratio of means: how far rounds are from taking time in proportion to their tokens.
        """
        rounds = list(self._rounds)[-last:] if last else list(self._rounds)
        num_tokens = sum(tokens for _, tokens in rounds)
        if len(rounds) < 2 or not num_tokens:
            return None
        longest = HICCUP * median(ms for ms, _ in rounds)
        rounds = [(min(ms, longest), tokens) for ms, tokens in rounds]
        ratio = sum(ms for ms, _ in rounds) / num_tokens
        squares = sum((ms - ratio * tokens) ** 2 for ms, tokens in rounds)
        spread = math.sqrt(squares * len(rounds) / (len(rounds) - 1))
        return Cost(ratio, spread / num_tokens)
