from __future__ import annotations

import json
import random

import pytest

from hf_ssd.metrics import SSDStats
from hf_ssd.trace import SPECULATOR_LANE, VERIFIER_LANE, chrome_trace, measure_overlap, write_chrome_trace
from hf_ssd.types import Span

MS = 1_000_000


def spans(*named: tuple[str, int, int]) -> tuple[Span, ...]:
    return tuple(Span(name, start * MS, end * MS) for name, start, end in named)


STATS = SSDStats(
    mode="ssd",
    verifier_spans=spans(("prefill", 100, 130), ("wait", 130, 135), ("verify", 135, 165), ("emit", 165, 166)),
    speculator_spans=(
        *spans(("prefill", 101, 111), ("draft step", 111, 121), ("project outcomes", 119, 125), ("look up", 131, 132)),
        Span("draft step", 160 * MS, 170 * MS, (("branches", 5),)),
        *spans(("just in time", 136, 150)),
    ),
)


def test_overlap_counts_time_in_which_both_compute_and_counts_it_once() -> None:
    overlap = measure_overlap(STATS)
    assert overlap.verify_ms == 60
    # 101-125 and 160-170: nested steps count once, looking up and just-in-time drafting not at all.
    assert overlap.draft_ms == 34
    assert overlap.overlap_ms == 24 + 5
    assert overlap.share_of_verify == pytest.approx(29 / 60)
    assert overlap.share_of_draft == pytest.approx(29 / 34)


def test_overlap_agrees_with_counting_milliseconds() -> None:
    generator = random.Random(3)
    verifier = [("verify", start, start + generator.randint(1, 9)) for start in range(0, 300, 10)]
    speculator = [
        ("draft step", start, start + generator.randint(1, 20))
        for start in (generator.randint(0, 300) for _ in range(40))
    ]
    overlap = measure_overlap(SSDStats("ssd", verifier_spans=spans(*verifier), speculator_spans=spans(*speculator)))
    both = {t for _, a, b in verifier for t in range(a, b)} & {t for _, a, b in speculator for t in range(a, b)}
    assert overlap.overlap_ms == len(both)


def test_no_computing_means_no_share() -> None:
    overlap = measure_overlap(SSDStats("ar", verifier_spans=spans(("emit", 0, 1))))
    assert (overlap.verify_ms, overlap.overlap_ms) == (0, 0)
    assert overlap.share_of_verify is None
    assert overlap.share_of_draft is None


def test_chrome_trace_has_two_named_lanes_in_microseconds(tmp_path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(STATS, path)
    trace = json.loads(path.read_text())
    assert trace == json.loads(json.dumps(chrome_trace(STATS)))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: VERIFIER_LANE, 2: SPECULATOR_LANE}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(STATS.verifier_spans) + len(STATS.speculator_spans)
    first = events[0]
    assert (first["name"], first["pid"], first["ts"], first["dur"]) == ("prefill", 1, 0.0, 30_000.0)
    (step,) = [e for e in events if e["args"]]
    assert step["pid"] == 2
    assert step["ts"] == 60_000.0
    assert step["args"] == {"branches": 5}


def test_a_call_without_a_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no spans.*trace=True"):
        chrome_trace(SSDStats("ssd"))
