"""What a monitor tells its sinks. No text and no token of a call is ever in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class EventKind(str, Enum):
    """What has happened."""

    CALL = "call"  # a call of generate() has ended; `figures` are those of its `ssd_stats`
    HIT_RATE_LOW = "hit_rate_low"  # the hit rate of the window fell below the floor
    HIT_RATE_BACK = "hit_rate_back"  # after that it is at the target again
    ACCEPTANCE_DRIFT = "acceptance_drift"  # the window's acceptance is not that of the rounds before it
    DEGRADED = "degraded"  # the speculator failed, and the call went on without it
    SWITCH = "switch"  # a call goes on in another mode, with another assistant, or with shorter drafts
    TRIAL = "trial"  # it tries that for some rounds, or goes back


@dataclass(frozen=True)
class Event:
    """Something that whoever operates a model may want to know.

    Args:
        kind: What has happened.
        reason: The same in words, with the figures that led to it.
        figures: Figures by name; units are in the names.
        time_s: When, in seconds since the epoch, by the system's clock. Nothing is computed from it.
    """

    kind: EventKind
    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)

    @property
    def is_warning(self) -> bool:
        """Whether somebody should look."""
        return self.kind in (EventKind.HIT_RATE_LOW, EventKind.ACCEPTANCE_DRIFT, EventKind.DEGRADED)

    def to_dict(self) -> dict[str, Any]:
        """The event as plain values, ready for JSON."""
        return {"time_s": self.time_s, "kind": self.kind.value, "reason": self.reason, "figures": dict(self.figures)}


Sink = Callable[[Event], None]
