"""When an assistant that has failed is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0


class Backoff:
    """Counts failures in a row. The first is forgiven at once, each one after it takes twice as long.

    Args:
        clock: Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_failures = 0
        self._retry_at = 0.0

    def failed(self) -> None:
        """It has failed."""
        self.num_failures += 1
        delay_s = 0.0
        if self.num_failures > 1:
            delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.num_failures - 2, 30))
        self._retry_at = self._clock() + delay_s

    def succeeded(self) -> None:
        """It has worked."""
        self.num_failures = 0
        self._retry_at = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until it may be tried again."""
        return max(0.0, self._retry_at - self._clock())
