from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hf_ssd.bench.arms import Arm, Call, Method
from hf_ssd.bench.figures import measured
from hf_ssd.bench.results import Difference
from hf_ssd.bench.rounds import perfect_ssd, summarise_rounds, tokens_per_round_over_time
from hf_ssd.bench.schedule import schedule
from hf_ssd.bench.statistics import Resampling, mean_with_interval
from hf_ssd.metrics import SSDStats
from hf_ssd.types import Origin, RoundStats


def test_a_single_call_has_no_interval() -> None:
    resampling = Resampling(1, 1)
    drawn = resampling.speeds(np.array([[10.0]]), np.array([[2.0]]))
    assert set(drawn.tolist()) == {5.0}
    estimate = resampling.estimate(5.0, drawn)
    assert (estimate.value, estimate.low, estimate.high) == (5.0, None, None)


def test_speeds_are_of_whole_repeats_and_their_median() -> None:
    tokens = np.full((3, 1), 10.0)
    seconds = np.array([[1.0], [2.0], [5.0]])
    drawn = Resampling(1, 3).speeds(tokens, seconds)
    # One prompt, three repeats: a draw's median is the speed of one of them, most often of the middle one.
    assert set(np.round(drawn, 6)) == {10.0, 5.0, 2.0}
    assert (drawn == 5.0).mean() == pytest.approx(13 / 27, abs=0.05)


def test_what_slows_all_arms_leaves_their_ratio_alone() -> None:
    generator = np.random.default_rng(1)
    tokens, seconds = np.full((2, 7), 64.0), generator.uniform(0.1, 9.0, (2, 7))
    resampling = Resampling(7, 2)
    slow, fast = resampling.speeds(tokens, seconds), resampling.speeds(tokens, seconds / 2)
    ratio = resampling.estimate(2.0, fast / slow)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2.0)
    assert np.ptp(slow) > 1


def test_the_interval_of_a_mean_is_about_two_standard_errors() -> None:
    estimate = mean_with_interval([0, 1] * 200)
    assert estimate.value == 0.5
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert mean_with_interval([-1, 0, 1, 0]).value == 0
    assert mean_with_interval([1]).low is None
    with pytest.raises(ValueError, match="`values` must hold at least one number"):
        mean_with_interval([])


def call(seconds: float, tokens: int = 8, first: float = 0.5) -> Call:
    return Call(tuple(range(tokens)), seconds, first, 1, tokens)


def test_figures_of_arms_and_categories_by_hand() -> None:
    ar, slow, fast, ours = (
        Arm("ar", Method.PLAIN, 1),
        Arm("hf_assisted", Method.ASSISTED, 1),
        Arm("hf_assisted", Method.ASSISTED, 1, num_assistant_tokens=3),
        Arm("ssd", Method.OURS, 1, 1),
    )
    seconds = {ar: (4.0, 2.0), slow: (8.0, 8.0), fast: (2.0, 2.0), ours: (1.0, 2.0)}
    calls = {arm: {(0, 0): call(first), (0, 1): call(second)} for arm, (first, second) in seconds.items()}
    arms, categories = measured(calls, ["code", "chat"], {"ssd": [Difference(1, 3)]})
    assert list(arms) == ["ar", "hf_assisted", "ssd"]
    assert arms["ar"].tokens_per_s.value == pytest.approx(16 / 6)
    assert arms["hf_assisted"].tokens_per_s.value == pytest.approx(16 / 4)
    assert arms["hf_assisted"].settings == {
        "method": "transformers assisted generation",
        "variant": "K=3",
        "tried_tokens_per_s": {"defaults": 1.0, "K=3": 4.0},
    }
    assert arms["ssd"].ratios["ar"].value == pytest.approx(2.0)
    assert arms["ssd"].ratios["hf_assisted"].value == pytest.approx(4 / 3)
    assert set(arms["ssd"].ratios) == {"ar", "hf_assisted"}
    assert arms["ssd"].decode_ratios["ar"].value == pytest.approx(5 / 2)
    assert arms["ssd"].identical_to_ar == (1, 2)
    assert arms["ar"].identical_to_ar == (2, 2)
    assert categories["code"]["ssd"].ratios["ar"].value == pytest.approx(4.0)
    assert categories["chat"]["ssd"].ratios["ar"].value == pytest.approx(1.0)
    assert categories["chat"]["ssd"].identical_to_ar == (0, 1)
    assert categories["code"]["ssd"].ratios["ar"].low is None
    # Two prompts of which each is four and one times as fast: a draw has one of them twice, or both.
    assert arms["ssd"].ratios["ar"].low == pytest.approx(1.0)
    assert arms["ssd"].ratios["ar"].high == pytest.approx(4.0)


def test_texts_are_not_compared_when_sampling() -> None:
    arm = Arm("ar", Method.PLAIN, 1)
    arms, _ = measured({arm: {(0, 0): call(1.0)}}, ["code"])
    assert arms["ar"].identical_to_ar is None


def test_every_arm_is_warmed_up_and_no_arm_always_follows_the_same() -> None:
    arms = [Arm(name, Method.PLAIN, 1) for name in "abc"]
    steps = schedule(arms, num_prompts=3, repeats=2)
    assert [step.repeat for step in steps[:3]] == [None] * 3
    turns = [steps[3 + 3 * turn : 6 + 3 * turn] for turn in range(6)]
    assert [{step.prompt for step in turn} for turn in turns] == [{0}, {1}, {2}] * 2
    assert all({step.arm for step in turn} == set(arms) for turn in turns)
    assert {(a.arm.name, b.arm.name) for turn in turns for a, b in pairwise(turn)} == {
        ("a", "b"), ("b", "c"), ("c", "a"), ("b", "a"), ("a", "c"), ("c", "b"),
    }  # fmt: skip


def make_round(accepted: int, *, hit: bool, verify_ms: float, wait_ms: float, steps: int = 2) -> RoundStats:
    return RoundStats(
        num_draft_tokens=3,
        num_accepted=accepted,
        num_reached=min(accepted + 1, 3),
        num_emitted=accepted + 1,
        origin=Origin.CACHE if hit else Origin.JUST_IN_TIME,
        depth=3,
        verify_ms=verify_ms,
        wait_ms=wait_ms,
        draft_ms=10.0 * steps,
        num_draft_steps=steps,
    )


@pytest.fixture
def stats() -> SSDStats:
    rounds = (
        make_round(0, hit=False, verify_ms=40, wait_ms=100, steps=9),
        make_round(3, hit=True, verify_ms=50, wait_ms=5),
        make_round(1, hit=True, verify_ms=30, wait_ms=15),
    )
    # 1 token of the prefill and 1 + 4 + 2 of the rounds; 270 ms after the first, of which 30 are neither.
    return SSDStats("ssd", rounds, num_tokens=8, start_s=0.0, first_token_s=1.0, end_s=1.27)


def test_the_perfect_speed_is_that_of_hits_without_waiting(stats: SSDStats) -> None:
    perfect = perfect_ssd([stats])
    assert perfect is not None
    assert perfect.tokens_at_hit == 3.0
    assert perfect.verify_at_hit_ms == 40.0
    assert perfect.overhead_ms == pytest.approx(10.0)
    assert perfect.tokens_per_s == pytest.approx(3.0 / 0.050)
    assert perfect.share == pytest.approx((7 / 0.27) / 60)
    assert perfect_ssd([SSDStats("sd", stats.rounds[:1], 2, 0.0, 1.0, 1.2)]) is None


def test_figures_of_rounds_by_hand(stats: SSDStats) -> None:
    figures = summarise_rounds([stats])
    assert figures.num_rounds == 3
    assert figures.tokens_per_round == pytest.approx(7 / 3)
    assert figures.wait_share == pytest.approx(120 / 120)
    assert figures.draft_step_ms == pytest.approx(10.0)
    assert figures.acceptance_by_position == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert figures.num_reached_by_position == (3, 2, 1)


def test_tokens_per_round_over_time_by_hand(stats: SSDStats) -> None:
    # The rounds begin after 1, 2 and 6 tokens: two in the first half of 6, one in the second. Then comes the last.
    rounds = (*stats.rounds, make_round(0, hit=False, verify_ms=1, wait_ms=1))
    assert tokens_per_round_over_time([rounds], num_spans=2) == ((1.5, 2.5), (4.5, 2.0))
    assert tokens_per_round_over_time([]) == ()
