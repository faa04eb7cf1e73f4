from __future__ import annotations

import json

import pytest

from hf_ssd.metrics import SSDStats, acceptance_by_position
from hf_ssd.recorder import Recorder
from hf_ssd.types import Miss, Origin, RoundStats

HIT = RoundStats(3, 3, 4, Origin.CACHE, depth=5, verify_ms=10, wait_ms=1, draft_ms=6, num_draft_steps=2)
MISS = RoundStats(2, 0, 1, Origin.JUST_IN_TIME, Miss.TOKEN, depth=2, verify_ms=14, wait_ms=5, draft_ms=8)
CUT = RoundStats(1, 1, 1, Origin.CACHE, depth=3, verify_ms=12, wait_ms=0, draft_ms=4)  # an end cut off the bonus token
STATS = SSDStats("ssd", (HIT, MISS, CUT), num_tokens=7, start_s=10.0, first_token_s=10.5, end_s=12.5)


def test_rates_of_a_call_worked_out_by_hand() -> None:
    assert STATS.num_rounds == 3
    assert STATS.tokens_per_round == pytest.approx((4 + 1 + 1) / 3)
    # Draft positions that verification reached: three, one (the second was not looked at), one.
    assert STATS.acceptance == pytest.approx((3 + 0 + 1) / (3 + 1 + 1))
    assert STATS.acceptance_by_position == pytest.approx((2 / 3, 1.0, 1.0))
    assert (STATS.num_hits, STATS.num_misses) == (2, 1)
    assert STATS.hit_rate == pytest.approx(2 / 3)
    assert STATS.depth_at_hit == 4  # what was ready, not what was still wanted
    assert (STATS.verify_ms, STATS.wait_ms, STATS.draft_ms) == (12, 2, 6)


def test_speeds_end_to_end_and_without_the_prefill() -> None:
    assert STATS.duration_s == 2.5
    assert STATS.tokens_per_s == pytest.approx(7 / 2.5)
    assert STATS.decode_tokens_per_s == pytest.approx(6 / 2.0)
    assert STATS.ttft_ms == pytest.approx(500)


def test_a_call_without_rounds_has_no_rates() -> None:
    stats = SSDStats("ssd", num_tokens=1, start_s=0.0, first_token_s=1.0, end_s=1.0)
    for name in ("tokens_per_round", "acceptance", "hit_rate", "depth_at_hit", "verify_ms", "decode_tokens_per_s"):
        assert getattr(stats, name) is None, name
    assert stats.acceptance_by_position == ()


def test_sd_has_no_hit_rate() -> None:
    """Nothing was looked up there: 0 would look like a failure."""
    assert SSDStats("sd", (MISS,)).hit_rate is None


def test_a_degraded_round_is_neither_hit_nor_miss() -> None:
    stats = SSDStats("ssd", (HIT, RoundStats(0, 0, 1, Origin.NONE)))
    assert stats.hit_rate == 1.0


def test_positions_that_no_round_reached_are_left_out() -> None:
    assert acceptance_by_position([RoundStats(4, 0, 1, Origin.CACHE)]) == (0.0,)
    assert acceptance_by_position([]) == ()


def test_to_dict_is_ready_for_json_and_agrees_with_the_properties() -> None:
    values = STATS.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["hit_rate"] == STATS.hit_rate
    assert values["acceptance_by_position"] == list(STATS.acceptance_by_position)


def test_as_text_it_shows_the_cause_of_a_degraded_run() -> None:
    assert "7 tokens" in str(STATS)
    assert "hit rate 0.67" in str(STATS)
    assert "degraded" not in str(STATS)
    assert "(degraded: gone)" in str(SSDStats("ssd", degraded="gone"))


class TestRecorder:
    def test_counts_tokens_and_keeps_the_time_of_the_first(self) -> None:
        recorder = Recorder("ssd")
        before = recorder.close()
        recorder.token()
        recorder.token()
        stats = recorder.close()
        assert (before.num_tokens, before.first_token_s) == (0, None)
        assert stats.num_tokens == 2
        assert stats.start_s <= stats.first_token_s <= stats.end_s

    def test_keeps_spans_only_for_a_trace(self) -> None:
        for trace in (True, False):
            recorder = Recorder("ssd", trace)
            with recorder.span("verify", tokens=3) as stopwatch:
                pass
            assert stopwatch.ms >= 0
            spans = recorder.close().verifier_spans
            assert len(spans) == trace
            if trace:
                assert (spans[0].name, spans[0].args) == ("verify", (("tokens", 3),))
                assert spans[0].start_ns <= spans[0].end_ns

    def test_times_a_span_that_raises(self) -> None:
        recorder = Recorder("ssd", trace=True)
        with pytest.raises(KeyError, match="lost"), recorder.span("verify"):
            raise KeyError("lost")
        assert len(recorder.close().verifier_spans) == 1
