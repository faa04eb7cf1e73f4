"""Rates and latencies over the latest rounds. Pure: rounds in, figures out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..types import Origin, RoundStats

MIN_DRIFT = 0.1  # of acceptance; a smaller change is of no consequence
DRIFT_Z = 4.0  # standard errors: the test is made after every round


@dataclass(frozen=True)
class Latency:
    """Percentiles of the duration of rounds, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True)
class WindowFigures:
    """Figures of the rounds in a window. `None` stands for what they do not tell.

    Args:
        num_rounds: Rounds in the window.
        hit_rate: Share of looked-up outcomes that the speculation cache held.
        hit_latency: Duration of rounds whose speculation was ready: verification, and waiting before it.
        miss_latency: The same for rounds after a miss.
        target_utilisation: Share of that time in which the target computed.
        assistant_utilisation: The same for the assistant, 1 at most: it also drafts while the caller takes tokens.
        acceptance: Share of tested positions at which a draft token was accepted.
        acceptance_before: The same for the rounds that have left the window.
        tokens_per_round: Mean number of tokens that a target forward gave.
        ms_per_token: Duration of the rounds per token.
    """

    num_rounds: int
    hit_rate: float | None
    hit_latency: Latency | None
    miss_latency: Latency | None
    target_utilisation: float | None
    assistant_utilisation: float | None
    acceptance: float | None
    acceptance_before: float | None
    tokens_per_round: float | None
    ms_per_token: float | None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, ready for JSON."""
        return asdict(self)


class Window:
    """The latest rounds, and the acceptance of those before them.

    Args:
        size: Number of rounds.
    """

    def __init__(self, size: int) -> None:
        self._rounds: deque[RoundStats] = deque()
        self.size = size
        self._num_to_forget = 0
        self._reached_before = self._accepted_before = 0

    def add(self, stats: RoundStats) -> None:
        """Takes in a round; the oldest leaves."""
        self._rounds.append(stats)
        if len(self._rounds) > self.size:
            oldest = self._rounds.popleft()
            if self._num_to_forget:
                self._num_to_forget -= 1
                return
            self._reached_before += oldest.num_reached
            self._accepted_before += oldest.num_accepted

    @property
    def is_full(self) -> bool:
        return len(self._rounds) == self.size

    @property
    def num_looked_up(self) -> int:
        """Rounds whose outcome the cache was asked for."""
        return sum(_is_hit(each) or each.miss is not None for each in self._rounds)

    @property
    def hit_rate(self) -> float | None:
        looked_up = self.num_looked_up
        return sum(map(_is_hit, self._rounds)) / looked_up if looked_up else None

    def drift(self) -> float | None:
        """Change of acceptance from before the window to the window, where chance does not explain it; else `None`.

        A two-proportion z-test. Positions of one round depend on each other, which the high bar allows for.
        """
        reached, accepted = self._tested()
        if not self.is_full or reached == 0 or self._reached_before < reached:
            return None
        now, before = accepted / reached, self._accepted_before / self._reached_before
        pooled = (accepted + self._accepted_before) / (reached + self._reached_before)
        error = math.sqrt(pooled * (1 - pooled) * (1 / reached + 1 / self._reached_before))
        change = now - before
        return change if abs(change) >= MIN_DRIFT and abs(change) > DRIFT_Z * error else None

    def start_anew(self) -> None:
        """Makes the rounds from here on the standard of acceptance, once a drift has been told."""
        # Those in the window are partly from before the change.
        self._num_to_forget = len(self._rounds)
        self._reached_before = self._accepted_before = 0

    def figures(self) -> WindowFigures:
        """The figures, as of now."""
        rounds = self._rounds
        reached, accepted = self._tested()
        busy_ms = sum(map(_round_ms, rounds))
        num_tokens = sum(each.num_emitted for each in rounds)
        return WindowFigures(
            num_rounds=len(rounds),
            hit_rate=self.hit_rate,
            hit_latency=_latency(_round_ms(each) for each in rounds if _is_hit(each)),
            miss_latency=_latency(_round_ms(each) for each in rounds if each.miss is not None),
            target_utilisation=sum(each.verify_ms for each in rounds) / busy_ms if busy_ms else None,
            assistant_utilisation=min(1.0, sum(each.draft_ms for each in rounds) / busy_ms) if busy_ms else None,
            acceptance=accepted / reached if reached else None,
            acceptance_before=self._accepted_before / self._reached_before if self._reached_before else None,
            tokens_per_round=num_tokens / len(rounds) if rounds else None,
            ms_per_token=busy_ms / num_tokens if num_tokens else None,
        )

    def _tested(self) -> tuple[int, int]:
        return sum(each.num_reached for each in self._rounds), sum(each.num_accepted for each in self._rounds)


def _is_hit(stats: RoundStats) -> bool:
    return stats.origin is Origin.CACHE


def _round_ms(stats: RoundStats) -> float:
    return stats.verify_ms + stats.wait_ms


def _latency(durations_ms: Iterable[float]) -> Latency | None:
    values = list(durations_ms)
    return Latency(*map(float, np.percentile(values, (50, 95, 99)))) if values else None
