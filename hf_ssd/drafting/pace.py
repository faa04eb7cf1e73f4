"""How fast both sides have been lately."""

from __future__ import annotations

import time

from ..planning import LinearFit, Rates

# Believed at first: that one more token costs a few hundredths of the first one, as where reading the weights is what
# takes the time.
SLOPE = 0.03


class Pace:
    """Running means and lines that drafting is planned by. Times are in milliseconds.

    Args:
        like: That of another row of the batch, whose lines are this one's too.

    Attributes:
        verify: Time of a verification over the number of tokens, the bonus token included.
        step: Time of a draft step over the number of tokens that it runs.
    """

    def __init__(self, like: Pace | None = None) -> None:
        self.verify: LinearFit = LinearFit(SLOPE) if like is None else like.verify
        self.step: LinearFit = LinearFit(SLOPE) if like is None else like.step
        self._round_ms: float | None = None
        self._round_tokens = 1.0
        self._sent_at = 0.0
        self._num_sent = 0
        self._resolved_at: float | None = None

    def started(self) -> None:
        """A row begins: its prompt is being read."""
        self._resolved_at = None
        self.sent(0)

    def sent(self, num_draft_tokens: int) -> None:
        """A speculation goes out now: its verification begins."""
        self._sent_at = time.monotonic()
        self._num_sent = num_draft_tokens

    def resolved(self, num_emitted: int, verify_ms: float | None) -> None:
        """An outcome is known. Without a time it is that of a prefill, which no round is like."""
        now = time.monotonic()
        if verify_ms is not None:
            self.verify.update(self._num_sent + 1, verify_ms)
            if self._resolved_at is not None:
                is_first = self._round_ms is None
                self._round_tokens = _running_mean(None if is_first else self._round_tokens, num_emitted)
                round_ms = (now - self._resolved_at) * 1e3
                if self._round_ms is not None:
                    # A hiccup of the machine counts less, as in `LinearFit`: where tokens seem dear, drafting seems to
                    # pay, which makes rounds longer still.
                    round_ms = min(round_ms, 2.0 * self._round_ms)
                self._round_ms = _running_mean(self._round_ms, round_ms)
        self._resolved_at = now

    def interrupted(self) -> None:
        """The round that is going on is not like others."""
        self._resolved_at = None

    def rates(self, acceptance: float) -> Rates | None:
        """What is known for planning; `None` until all of it has been measured."""
        if self._round_ms is None or self.step.line is None or self.verify.line is None:
            return None
        return Rates(self._round_ms / self._round_tokens, self.step.line, self.verify.line, acceptance)

    def time_left_ms(self) -> float:
        """Time until the outcome is due, by what verifications of this size have taken."""
        expected = self.verify(self._num_sent + 1)
        assert expected is not None
        return expected - (time.monotonic() - self._sent_at) * 1e3


def _running_mean(mean: float | None, value: float, weight: float = 0.1) -> float:
    return value if mean is None else mean + weight * (value - mean)
