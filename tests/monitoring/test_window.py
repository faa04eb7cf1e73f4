"""Rates, percentiles and drift of the latest rounds, against numbers worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rounds import make_round

from hf_ssd.monitoring import Window
from hf_ssd.types import Origin, RoundStats


def test_figures_are_those_of_the_rounds_in_the_window():
    window = Window(4)
    for hit in (False, False, True, True, True, False):
        window.add(make_round(hit=hit))
    figures = window.figures()
    assert (figures.num_rounds, figures.hit_rate) == (4, 0.75)
    assert figures.target_utilisation == pytest.approx(0.8)
    assert figures.assistant_utilisation == pytest.approx(0.5)
    assert (figures.tokens_per_round, figures.ms_per_token) == (2.0, 5.0)
    assert (figures.acceptance, figures.acceptance_before) == (0.5, 0.5)


def test_latencies_are_split_by_hit_and_miss():
    window = Window(400)
    hits, misses = [float(ms) for ms in range(1, 101)], [float(ms) for ms in range(201, 301)]
    for hit_ms, miss_ms in zip(hits, misses, strict=True):
        window.add(make_round(hit=True, ms=hit_ms))
        window.add(make_round(hit=False, ms=miss_ms))
    figures = window.figures()
    assert figures.hit_latency is not None
    assert figures.miss_latency is not None
    assert figures.hit_latency.p50_ms == pytest.approx(np.percentile(hits, 50))
    assert figures.hit_latency.p99_ms == pytest.approx(np.percentile(hits, 99))
    assert figures.miss_latency.p95_ms == pytest.approx(np.percentile(misses, 95))


def test_an_empty_window_has_no_figures():
    figures = Window(8).figures()
    assert figures.num_rounds == 0
    assert {value for key, value in figures.to_dict().items() if key != "num_rounds"} == {None}


def test_rounds_without_a_lookup_have_no_hit_rate():
    window = Window(8)
    window.add(RoundStats(num_draft_tokens=2, num_accepted=2, num_emitted=3, origin=Origin.JUST_IN_TIME))
    assert window.hit_rate is None


def add_with_chance(window: Window, chance: float, count: int, source: random.Random) -> list[float | None]:
    drifts = []
    for _ in range(count):
        window.add(make_round(hit=True, accepted=int(source.random() < chance), drafted=1))
        drifts.append(window.drift())
    return drifts


@pytest.mark.parametrize("seed", range(20))
def test_steady_acceptance_is_no_drift(seed):
    assert set(add_with_chance(Window(64), 0.6, 1000, random.Random(seed))) == {None}


@pytest.mark.parametrize(("after", "sign"), [(0.1, -1), (0.98, 1)])
def test_a_change_of_acceptance_is_a_drift_and_then_the_standard(after, sign):
    source, window = random.Random(0), Window(64)
    add_with_chance(window, 0.6, 300, source)
    drift = next(each for each in add_with_chance(window, after, 64, source) if each is not None)
    assert drift * sign > 0.1
    window.start_anew()
    assert set(add_with_chance(window, after, 500, source)) == {None}
