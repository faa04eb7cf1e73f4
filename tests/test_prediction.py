"""The speed model against rounds that are played out event by event, and against itself where it must agree."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from race import SSDRace, sd_race

from hf_ssd.bench.conditions import Changes, Conditions, assumed_conditions
from hf_ssd.bench.prediction import (
    predict_ar,
    predict_critical_batch_size,
    predict_perfect_ssd,
    predict_sd,
    predict_ssd,
)

GIVEN = Changes(target_ms=30.0, assistant_ms=4.0, acceptance=0.8, hit_rate=0.9)


def random_conditions(seed: int) -> Conditions:
    generator = random.Random(seed)
    target_ms = generator.uniform(10, 200)
    token_ms = target_ms * generator.uniform(0.03, 0.5)
    step_ms = token_ms * generator.uniform(1.0, 1.6)
    return Conditions(
        verify_base_ms=target_ms,
        verify_token_ms=target_ms * generator.uniform(0.0, 0.05),
        overhead_ms=target_ms * generator.uniform(0.0, 0.05),
        token_ms=token_ms,
        step_ms=step_ms,
        branch_ms=(step_ms - token_ms) / 7,
        budget=8,
        acceptance=tuple(generator.uniform(0.3, 0.95) for _ in range(8)),
        exponent=generator.uniform(0.3, 2.0),
        draft_length=generator.choice([None, None, 3]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_sd_is_as_fast_as_when_its_rounds_are_played(seed: int) -> None:
    conditions = random_conditions(seed)
    assert predict_sd(conditions).tokens_per_s == pytest.approx(sd_race(conditions, 10_000, seed), rel=0.02)


@pytest.mark.parametrize("seed", range(12))
def test_ssd_is_as_fast_as_when_its_rounds_are_played(seed: int) -> None:
    """The race starts steps and drafts by what it has measured itself, with the rules of the drafting engine."""
    conditions = random_conditions(seed)
    prediction = predict_ssd(conditions)
    race = SSDRace(conditions, seed=seed).run(5_000)
    assert prediction.tokens_per_s == pytest.approx(race.tokens_per_s, rel=0.03)
    assert prediction.hit_rate == pytest.approx(race.hit_rate, abs=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_waits_for_its_slowest_row(seed: int) -> None:
    # The engine has no rule for how much a batch should draft just in time, so that is given.
    conditions = replace(random_conditions(seed), draft_length=2)
    race = SSDRace(conditions, batch_size=4, seed=seed).run(1_500)
    assert predict_ssd(conditions, batch_size=4).tokens_per_s == pytest.approx(race.tokens_per_s, rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_no_mode_beats_its_bound(seed: int) -> None:
    conditions = random_conditions(seed)
    ssd = predict_ssd(conditions)
    assert ssd.steps is not None
    assert ssd.tokens_per_s <= predict_perfect_ssd(conditions, ssd.steps) * (1 + 1e-9)
    # A perfect assistant that takes no time: every draft token is accepted, and nobody waits.
    free = replace(conditions, token_ms=0.0, step_ms=0.0, branch_ms=0.0, overhead_ms=0.0, acceptance=(1.0,) * 8)
    assert predict_sd(free).tokens_per_s == pytest.approx(predict_perfect_ssd(free, free.draft_length or 8))


def test_without_hits_ssd_is_sd() -> None:
    conditions = replace(assumed_conditions(GIVEN), exponent=0.0)
    assert predict_ssd(conditions).tokens_per_s == pytest.approx(predict_sd(conditions).tokens_per_s)
    assert predict_ssd(conditions).hit_rate == 0.0


def test_the_measured_hit_rate_holds_at_its_budget_and_the_power_law_elsewhere() -> None:
    conditions = assumed_conditions(GIVEN).with_hit_rate(0.6)
    assert conditions.hit_rate(conditions.budget) == pytest.approx(0.6)
    rates = [conditions.hit_rate(budget) for budget in (2, 8, 32)]
    assert rates == sorted(rates)
    # More than the steepest law explains is taken as it is.
    assert assumed_conditions(GIVEN).with_hit_rate(0.9999).hit_rate(conditions.budget) == pytest.approx(0.9999)
    # With one draft token that is never accepted, the whole budget is for what replaces it.
    hopeless = replace(conditions, acceptance=(0.0,))
    assert hopeless.hit_rate(16) == pytest.approx(1 - 17**-conditions.exponent)


def test_other_hardware_scales_a_side_as_a_whole() -> None:
    conditions = random_conditions(3)
    twice = conditions.changed(Changes(target_ms=2 * conditions.target_ms, assistant_ms=2 * conditions.token_ms))
    for predict in (predict_ar, predict_sd, predict_ssd):
        assert predict(conditions).tokens_per_s == pytest.approx(2 * predict(twice).tokens_per_s)


def test_a_single_token_may_take_a_time_of_its_own() -> None:
    conditions = replace(random_conditions(3), single_ms=300.0)
    assert predict_ar(conditions).verify_ms == conditions.target_ms == 300.0
    assert conditions.verify_ms(2) == random_conditions(3).verify_ms(2)
    assert conditions.changed(Changes(target_ms=150.0)).verify_ms(2) == pytest.approx(conditions.verify_ms(2) / 2)
    assert conditions.changed(Changes(target_ms=150.0)).target_ms == 150.0


def test_what_is_given_is_what_counts() -> None:
    changed = random_conditions(3).changed(
        Changes(target_ms=50.0, assistant_ms=5.0, target_token_ms=0.5, assistant_token_ms=0.1, acceptance=0.7)
    )
    assert changed.target_ms == pytest.approx(50.0)
    assert changed.verify_ms(11) == pytest.approx(55.0)
    assert changed.draft_ms(batch_size=11) == pytest.approx(6.0)
    assert changed.acceptance == (0.7,) * 8


def test_a_step_of_a_small_tree_takes_no_less_than_a_token() -> None:
    conditions = replace(assumed_conditions(GIVEN), branch_ms=100.0, step_ms=5.0)
    assert conditions.tree_step_ms(batch_size=1, budget=2) == conditions.token_ms


def test_the_critical_batch_size_is_where_drafting_after_a_miss_stops_to_pay() -> None:
    """Where times do not depend on the batch, it is also where the predictions for batches cross."""
    conditions = replace(assumed_conditions(GIVEN), verify_token_ms=0.0, branch_ms=0.0, draft_length=4)
    nothing = replace(conditions, draft_length=0)
    critical = predict_critical_batch_size(conditions)
    assert 1 < critical < 100
    for batch_size in range(1, 30):
        pays = predict_ssd(conditions, batch_size).tokens_per_s > predict_ssd(nothing, batch_size).tokens_per_s
        assert pays is (batch_size < critical), batch_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_ms": 0.0}, r"`target_ms` must be a positive number, but got 0.0"),
        ({"assistant_ms": math.inf}, r"`assistant_ms` must be a positive number, but got inf"),
        ({"target_token_ms": -1.0}, r"`target_token_ms` must be 0 or more milliseconds, but got -1.0"),
        ({"acceptance": 80.0}, r"`acceptance` must be at least 0 and below 1, but got 80.0. Give 0.8 for 80 %"),
        ({"hit_rate": 1.0}, r"`hit_rate` must be at least 0 and below 1, but got 1.0"),
        ({"power_law": -0.1}, r"`power_law` must be a positive number, but got -0.1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Changes(**changes)
