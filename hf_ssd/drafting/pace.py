"""How fast both sides have been lately, and how often the cache hit."""

from __future__ import annotations

import time


class Pace:
    """Running means that drafting is planned by. Times are in milliseconds, `None` until measured.

    Attributes:
        verify_ms: A verification.
        step_ms: A step that deepens all branches.
        token_ms: A draft token drafted alone.
        hit_rate: Share of outcomes that the speculation cache held.
    """

    def __init__(self) -> None:
        self.verify_ms: float | None = None
        self.token_ms: float | None = None
        self.hit_rate = 0.5
        self.step_ms: float | None = None
        self._sent_at = 0.0

    def sent(self) -> None:
        """A speculation goes out now: its verification begins."""
        self._sent_at = time.monotonic()

    def resolved(self, verify_ms: float | None) -> None:
        if verify_ms is not None:
            self.verify_ms = _running_mean(self.verify_ms, verify_ms)

    def stepped(self, step_ms: float) -> None:
        self.step_ms = _running_mean(self.step_ms, step_ms)

    def drafted(self, token_ms: float) -> None:
        self.token_ms = _running_mean(self.token_ms, token_ms)

    def looked_up(self, is_hit: bool) -> None:
        self.hit_rate = _running_mean(self.hit_rate, is_hit, 0.1)

    def overrun_ms(self) -> float | None:
        """How long after the outcome is due a step that starts now would end."""
        if self.verify_ms is None or self.step_ms is None:
            return None
        return (time.monotonic() - self._sent_at) * 1e3 + self.step_ms - self.verify_ms


def _running_mean(mean: float | None, value: float, weight: float = 0.25) -> float:
    return value if mean is None else mean + weight * (value - mean)
