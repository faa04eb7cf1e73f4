"""How fast both sides have been lately, and how often the cache hit."""

from __future__ import annotations

import time

from ..types import Outcome


class Pace:
    """Running means that drafting is planned by. Times are in milliseconds, `None` until measured.

    Attributes:
        verify_ms: A verification.
        step_ms: A step that deepens all branches.
        token_ms: A draft token drafted alone.
        ms_per_token: The run, per emitted token.
        hit_rate: Share of outcomes that the speculation cache held.
    """

    def __init__(self) -> None:
        self.verify_ms: float | None = None
        self.step_ms: float | None = None
        self.token_ms: float | None = None
        self.hit_rate = 0.5
        self._round_ms: float | None = None
        self._round_tokens = 1.0
        self._sent_at = 0.0
        self._resolved_at: float | None = None

    def started(self) -> None:
        """A row begins: its prompt is being read."""
        self._resolved_at = None
        self._sent_at = time.monotonic()

    def sent(self) -> None:
        """A speculation goes out now: its verification begins."""
        self._sent_at = time.monotonic()

    def resolved(self, outcome: Outcome, verify_ms: float | None) -> None:
        """An outcome is known. Without a time it is that of a prefill, which no round is like."""
        now = time.monotonic()
        if verify_ms is not None:
            self.verify_ms = _running_mean(self.verify_ms, verify_ms)
        if verify_ms is not None and self._resolved_at is not None:
            self._round_tokens = _running_mean(
                None if self._round_ms is None else self._round_tokens, outcome.num_accepted + 1
            )
            self._round_ms = _running_mean(self._round_ms, (now - self._resolved_at) * 1e3)
        self._resolved_at = now

    @property
    def ms_per_token(self) -> float | None:
        return None if self._round_ms is None else self._round_ms / self._round_tokens

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
