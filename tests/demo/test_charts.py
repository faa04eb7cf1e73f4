from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from demo import what_if
from demo.charts import WINDOW, acceptance_by_position, hit_rate_over_time, tokens_per_round_over_time
from demo.race import Run
from demo.time_line import key, time_line
from demo.tokens import Round, Tape
from demo.what_if import World
from hf_ssd import Miss, Origin, RoundStats, Span, SSDStats, theory

MS = 1_000_000
HIT = RoundStats(4, 2, 3, Origin.CACHE, depth=4, verify_ms=40.0)
MISSED = RoundStats(4, 0, 1, Origin.JUST_IN_TIME, Miss.TOKEN, depth=4, verify_ms=40.0, wait_ms=12.5, draft_ms=30.0)


def traced(mode: str = "ssd", rounds: tuple[RoundStats, ...] = (HIT, MISSED)) -> SSDStats:
    verifier = [Span("prefill", 0, 60 * MS)]
    for index in range(len(rounds)):
        verifier += [
            Span("wait", (60 + 60 * index) * MS, (70 + 60 * index) * MS),
            Span("verify", (70 + 60 * index) * MS, (110 + 60 * index) * MS, (("tokens", 5),)),
        ]
    speculator = [Span("draft step", 75 * MS, 105 * MS, (("tokens", 4),)), Span("just in time", 112 * MS, 128 * MS)]
    return SSDStats(
        mode, rounds, 5, 0.0, 0.06, 0.18, verifier_spans=tuple(verifier), speculator_spans=tuple(speculator)
    )


def svg_of(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


def test_the_time_line_has_a_lane_for_each_side():
    svg = svg_of(time_line("SSD", traced()))
    rects = {}
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        rects.setdefault(rect.get("class"), []).append(rect)
    assert len(rects["verify"]) == len(rects["wait"]) == 2
    assert len(rects["draft"]) == len(rects["jit"]) == 1
    (draft,), verify = rects["draft"], rects["verify"][0]
    assert float(draft.get("y")) > float(verify.get("y"))
    # The draft step began after its verification and ended before it: the overlap is seen.
    start, end = float(draft.get("x")), float(draft.get("x")) + float(draft.get("width"))
    assert float(verify.get("x")) < start < end < float(verify.get("x")) + float(verify.get("width"))
    marks = [text.get("class") for text in svg.iter("{http://www.w3.org/2000/svg}text") if "mark" in text.get("class")]
    assert marks == ["mark hit", "mark miss"]
    assert "1 hits, 1 misses" in time_line("SSD", traced())
    assert "100 % of it while the target computed" in time_line("SSD", traced())


def test_a_long_run_stays_within_the_width():
    spans = tuple(Span("verify", i * 50 * MS, (i * 50 + 40) * MS) for i in range(4000))
    svg = svg_of(time_line("SD", SSDStats("sd", (HIT,) * 4000, verifier_spans=spans)))
    assert float(svg.get("width")) <= 8100


def test_without_spans_there_is_no_time_line():
    assert time_line("AR", SSDStats("ar")) == ""
    assert time_line("AR", None) == ""
    assert "miss" in key()


def run_with(name: str, rounds: list[RoundStats]) -> Run:
    run = Run(name, Tape())
    run.tape.rounds = [Round(stats, 100.0 * (index + 1), index + 2) for index, stats in enumerate(rounds)]
    run.stats = SSDStats(name.lower(), tuple(rounds))
    return run


def test_charts_are_means_of_the_latest_rounds():
    runs = [run_with("AR", []), run_with("SD", [MISSED] * 3), run_with("SSD", [HIT, MISSED] * WINDOW)]
    tokens = tokens_per_round_over_time(runs)
    assert set(tokens["mode"]) == {"SD", "SSD"}
    assert tokens[tokens["mode"] == "SD"]["tokens"].tolist() == [1.0, 1.0, 1.0]
    assert tokens[tokens["mode"] == "SSD"]["tokens"].tolist()[:2] == [3.0, 2.0]
    assert tokens["seconds"].iloc[0] == pytest.approx(0.1)
    hits = hit_rate_over_time(runs)
    assert set(hits["mode"]) == {"SSD"}
    assert hits["hit rate"].iloc[-1] == 0.5
    acceptance = acceptance_by_position(runs)
    assert acceptance[acceptance["mode"] == "SSD"]["acceptance"].tolist() == list(runs[2].stats.acceptance_by_position)


# What if


def test_speed_ups_are_those_of_the_theory():
    world = World(verify_ms=100.0, draft_ms=20.0, acceptance=0.8, hit_rate=0.9, draft_length=4)
    speeds = world.speed_ups(1, what_if.REFERENCE_BUDGET)
    tokens = 1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4
    assert speeds["AR"] == 1.0
    assert speeds["SD"] == pytest.approx(tokens * 100 / 180)
    assert speeds[what_if.JUST_IN_TIME] == pytest.approx(tokens * 100 / (100 + 0.1 * 80))
    assert speeds[what_if.FAST] == pytest.approx((0.9 * tokens + 0.1) * 100 / 100)


def test_the_slider_is_the_hit_rate_at_the_reference_and_more_budget_hits_more():
    world = World(hit_rate=0.7)
    assert world.hits(what_if.REFERENCE_BUDGET) == pytest.approx(0.7, abs=1e-6)
    assert world.hits(2) < 0.7 < world.hits(64)


def test_curves_cross_at_the_critical_batch_size():
    world = World(verify_ms=100.0, draft_ms=8.0, acceptance=0.7, hit_rate=0.8, draft_length=4)
    critical = world.critical_batch_size
    assert 1 < critical < what_if.MOST_ROWS
    before, after = (world.speed_ups(rows, world.budget) for rows in (math.floor(critical), math.ceil(critical)))
    assert before[what_if.JUST_IN_TIME] >= before[what_if.FAST]
    assert after[what_if.JUST_IN_TIME] <= after[what_if.FAST]
    curves = what_if.over_batch_sizes(world)
    assert curves[curves["way"] == "b*"]["rows"].tolist() == [critical, critical]
    assert f"b* = {critical:.1f}" in what_if.summary(world)


def test_a_backup_that_costs_little_never_loses():
    world = World(verify_ms=400.0, draft_ms=1.0, acceptance=0.9, hit_rate=0.5)
    assert world.critical_batch_size == math.inf
    assert "b*" not in set(what_if.over_batch_sizes(world)["way"])
    assert "infinite" in what_if.summary(world)


@pytest.mark.parametrize("budget", [1, 5, 8, 13])
def test_a_budget_is_spent_in_full(budget):
    assert sum(what_if.spread(budget, 5)) == budget


def test_the_last_race_sets_the_sliders():
    rounds = (RoundStats(4, 2, 3, Origin.CACHE, verify_ms=40.0, draft_ms=30.0, num_draft_steps=3),) * 4
    world = what_if.world_of(SSDStats("ssd", rounds))
    assert (world.verify_ms, world.draft_ms) == (40.0, 10.0)
    assert world.acceptance == pytest.approx(2 / 3, abs=0.01)
    assert world.hit_rate == 0.99  # the slider's most
    with pytest.raises(ValueError, match="Run a race with SSD first"):
        what_if.world_of(None)
    assert theory.chain_bound(world.acceptance) > 1
