"""Collects what a call does while it runs, and closes it into `SSDStats`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from .metrics import SSDStats
from .types import RoundStats, Span, Switch


class Recorder:
    """The open form of [`SSDStats`]: one per call of `generate()`.

    Args:
        mode: The mode that was asked for.
        trace: Whether to keep spans.
        on_round: Called with the figures of each round when it is over.
        on_switch: Called with each change of plan.
    """

    def __init__(
        self,
        mode: str,
        trace: bool = False,
        on_round: Callable[[RoundStats], None] = lambda stats: None,
        on_switch: Callable[[Switch], None] = lambda switch: None,
    ) -> None:
        self.mode = mode
        self.rounds: list[RoundStats] = []
        self.num_tokens = 0
        self.num_rows = 0  # that have been decoded
        self.degraded: str | None = None
        self.target_threads: int | None = None
        self.assistant_threads: int | None = None
        self.assistant_device: str | None = None
        self.speculator_spans: list[Span] = []
        self._trace = trace
        self._on_round = on_round
        self._on_switch = on_switch
        self._switches: list[Switch] = []
        self._verifier_spans: list[Span] = []
        self._start_s = time.monotonic()
        self._first_token_s: float | None = None

    def token(self) -> None:
        """A token is known."""
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self.num_tokens += 1

    def round(self, stats: RoundStats) -> None:
        """A round is over."""
        self.rounds.append(stats)
        self._on_round(stats)

    def switch(self, switch: Switch) -> None:
        """The plan is another from here on."""
        now = time.monotonic_ns()
        switch = replace(switch, num_tokens=self.num_tokens, time_ns=now)
        self._switches.append(switch)
        if self._trace:
            what = (("before", str(switch.before)), ("after", str(switch.after)), ("reason", switch.reason))
            self._verifier_spans.append(Span("switch", now, now, what))
        self._on_switch(switch)

    @contextmanager
    def span(self, name: str, **args: int) -> Iterator[Stopwatch]:
        """Times what happens inside; the result is read from the stopwatch afterwards."""
        stopwatch = Stopwatch()
        start = time.monotonic_ns()
        try:
            yield stopwatch
        finally:
            end = time.monotonic_ns()
            stopwatch.ms = (end - start) / 1e6
            if self._trace:
                self._verifier_spans.append(Span(name, start, end, tuple(args.items())))

    def close(self) -> SSDStats:
        """The figures, as of now."""
        return SSDStats(
            mode=self.mode,
            rounds=tuple(self.rounds),
            switches=tuple(self._switches),
            num_tokens=self.num_tokens,
            start_s=self._start_s,
            first_token_s=self._first_token_s,
            end_s=time.monotonic(),
            degraded=self.degraded,
            target_threads=self.target_threads,
            assistant_threads=self.assistant_threads,
            assistant_device=self.assistant_device,
            verifier_spans=tuple(self._verifier_spans),
            speculator_spans=tuple(self.speculator_spans),
        )


class Stopwatch:
    """Holds a duration in milliseconds."""

    ms: float = 0.0
