"""`Monitor`: watches the rounds and calls of a model, and says when something has changed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from ..metrics import SSDStats
from ..types import RoundStats, Switch
from .events import Event, EventKind, Sink
from .window import Window, WindowFigures

logger = logging.get_logger(__name__)

MIN_LOOKED_UP = 32  # outcomes, before a hit rate means anything


class Monitor:
    """Watches one or several models that run with SSD.

    ```python
    monitor = Monitor(sinks=[JsonlSink("ssd.jsonl")])
    enable_ssd(model, assistant, monitor=monitor)
    model.generate(**inputs)
    monitor.figures().hit_rate
    ```

    It only watches: what is done about a low hit rate is up to the planner and `mode="auto"`, whose switches it is told
    of. May be shared by threads.

    Args:
        sinks: Called with each [`Event`], in the thread that generates. One that raises is left out from then on.
        window: Number of rounds that rates and latencies are over.
        hit_rate_target: A hit rate to aim at. After a low one, it counts as recovered only from here on.
        hit_rate_floor: Below it, the hit rate is low.

    Attributes:
        num_calls: Calls of `generate()` that have ended, by the mode they ran in.
        num_events: Events so far, by kind.
        num_tokens: Tokens generated.
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        window: int = 256,
        hit_rate_target: float = 0.70,
        hit_rate_floor: float = 0.50,
    ) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, but got {window}. It is a number of rounds.")
        if not 0.0 <= hit_rate_floor <= hit_rate_target <= 1.0:
            raise ValueError(
                "`hit_rate_floor` must be at most `hit_rate_target`, both from 0 to 1, but got "
                f"{hit_rate_floor} and {hit_rate_target}."
            )
        self.hit_rate_target = hit_rate_target
        self.hit_rate_floor = hit_rate_floor
        self.num_calls: dict[str, int] = {}
        self.num_events: dict[EventKind, int] = {}
        self.num_tokens = 0
        self._sinks = list(sinks)
        self._window = Window(window)
        self._is_low = False
        self._lock = threading.RLock()  # a sink may ask for figures

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return self  # a copy of a model is watched by the same

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model is watched by nobody

    def figures(self) -> WindowFigures:
        """Rates and latencies of the latest rounds."""
        with self._lock:
            return self._window.figures()

    @property
    def is_low(self) -> bool:
        """Whether the hit rate fell below the floor and has not come back to the target."""
        return self._is_low

    def on_round(self, stats: RoundStats) -> None:
        """Takes in a round as soon as it is over."""
        with self._lock:
            self._window.add(stats)
            self._judge_hit_rate()
            self._judge_acceptance()

    def on_call(self, stats: SSDStats) -> None:
        """Takes in a call that has ended."""
        with self._lock:
            self.num_calls[stats.mode] = self.num_calls.get(stats.mode, 0) + 1
            self.num_tokens += stats.num_tokens
            if stats.degraded is not None:
                self._emit(Event(EventKind.DEGRADED, stats.degraded, {"num_tokens": stats.num_tokens}))
            self._emit(Event(EventKind.CALL, str(stats), stats.to_dict()))

    def on_switch(self, switch: Switch) -> None:
        """Takes in that a call goes on in another way, or tries to."""
        plans = {"before": str(switch.before), "after": str(switch.after)}
        figures = {**plans, "num_tokens": switch.num_tokens, "is_trial": switch.is_trial}
        with self._lock:
            self._emit(Event(EventKind.TRIAL if switch.is_trial else EventKind.SWITCH, str(switch), figures))

    def _judge_hit_rate(self) -> None:
        rate = self._window.hit_rate
        if rate is None or self._window.num_looked_up < min(MIN_LOOKED_UP, self._window.size):
            return
        figures = {"hit_rate": rate, "floor": self.hit_rate_floor, "target": self.hit_rate_target}
        if not self._is_low and rate < self.hit_rate_floor:
            self._is_low = True
            reason = f"The hit rate is {rate:.2f}, below {self.hit_rate_floor:g}."
            self._emit(Event(EventKind.HIT_RATE_LOW, reason, figures))
        elif self._is_low and rate >= self.hit_rate_target:
            self._is_low = False
            reason = f"The hit rate is {rate:.2f}, at {self.hit_rate_target:g} or more again."
            self._emit(Event(EventKind.HIT_RATE_BACK, reason, figures))

    def _judge_acceptance(self) -> None:
        change = self._window.drift()
        if change is None:
            return
        figures = self._window.figures()
        reason = f"Acceptance has gone from {figures.acceptance_before:.2f} to {figures.acceptance:.2f}."
        values = {"acceptance": figures.acceptance, "acceptance_before": figures.acceptance_before}
        self._window.start_anew()
        self._emit(Event(EventKind.ACCEPTANCE_DRIFT, reason, values))

    def _emit(self, event: Event) -> None:
        self.num_events[event.kind] = self.num_events.get(event.kind, 0) + 1
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception as error:  # a full disk, or whatever a caller's own code may raise: the text comes first
                self._sinks.remove(sink)
                logger.warning(f"The monitor's sink {sink!r} has failed and gets no more events: {error!r}")
