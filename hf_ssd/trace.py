"""The time line of a call: what target and assistant did, in Chrome's trace format, and how much of it overlapped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .metrics import SSDStats
from .types import Span

VERIFIER_LANE = "target (verifier)"
SPECULATOR_LANE = "assistant (speculator)"

# What counts as computing. Waiting, emitting and looking up are on the time line, but no work is hidden behind them;
# "just in time" drafting comes after the outcome, when the target has nothing to do.
VERIFYING = frozenset({"prefill", "verify"})
DRAFTING = frozenset({"prefill", "draft step", "project outcomes"})

_Interval = tuple[int, int]


@dataclass(frozen=True)
class Overlap:
    """How much of the assistant's work was hidden behind the target's. Times are in milliseconds.

    Args:
        verify_ms: Time in which the target computed, prefill included.
        draft_ms: Time in which the assistant computed.
        overlap_ms: Time in which both did.
    """

    verify_ms: float
    draft_ms: float
    overlap_ms: float

    @property
    def share_of_verify(self) -> float | None:
        """Overlap as a share of the target's computing time."""
        return self.overlap_ms / self.verify_ms if self.verify_ms else None

    @property
    def share_of_draft(self) -> float | None:
        """Overlap as a share of the assistant's computing time: what drafting did not cost."""
        return self.overlap_ms / self.draft_ms if self.draft_ms else None


def measure_overlap(stats: SSDStats) -> Overlap:
    """The time in which both sides computed at once, from the spans of a call that ran with `SSDConfig(trace=True)`."""
    verifying = _union(stats.verifier_spans, VERIFYING)
    drafting = _union(stats.speculator_spans, DRAFTING)
    return Overlap(_total_ms(verifying), _total_ms(drafting), _total_ms(_intersection(verifying, drafting)))


def chrome_trace(stats: SSDStats) -> dict[str, Any]:
    """The spans of a call as an object in Chrome's trace format: one lane per side, complete events, microseconds.

    Args:
        stats: Statistics of a call that ran with `SSDConfig(trace=True)`.

    Returns:
        `dict`: Ready for `json.dump`; `chrome://tracing` and https://ui.perfetto.dev show the file.

    Raises:
        ValueError: If the call kept no spans.
    """
    lanes = ((1, VERIFIER_LANE, stats.verifier_spans), (2, SPECULATOR_LANE, stats.speculator_spans))
    starts = [span.start_ns for _, _, spans in lanes for span in spans]
    if not starts:
        raise ValueError("The statistics hold no spans. Run the call with SSDConfig(trace=True).")
    origin_ns = min(starts)
    events: list[dict[str, Any]] = []
    for pid, lane, spans in lanes:
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 1, "args": {"name": lane}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 1, "args": {"sort_index": pid}})
        events += [_event(span, pid, origin_ns) for span in sorted(spans, key=lambda span: span.start_ns)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": stats.to_dict()}


def write_chrome_trace(stats: SSDStats, path: str | Path) -> None:
    """Writes [`chrome_trace`] to a file.

    Raises:
        ValueError: If the call kept no spans.
    """
    Path(path).write_text(json.dumps(chrome_trace(stats)), encoding="utf-8")


def _event(span: Span, pid: int, origin_ns: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "ph": "X",
        "pid": pid,
        "tid": 1,
        "ts": (span.start_ns - origin_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": dict(span.args),
    }


def _union(spans: Iterable[Span], names: frozenset[str]) -> list[_Interval]:
    """The time covered by the named spans, as disjoint intervals in order: nested spans must not count twice."""
    merged: list[_Interval] = []
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans if span.name in names):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(left: list[_Interval], right: list[_Interval]) -> list[_Interval]:
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _total_ms(intervals: list[_Interval]) -> float:
    return sum(end - start for start, end in intervals) / 1e6
