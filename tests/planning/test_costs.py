from __future__ import annotations

import random

import pytest

from hf_ssd.planning.costs import Cost, RoundCosts


def costs_of(rounds: list[tuple[float, float]], window: int = 32) -> RoundCosts:
    costs = RoundCosts(window)
    for tokens, ms in rounds:
        costs.add(tokens, ms)
    return costs


def test_the_cost_is_all_time_over_all_tokens() -> None:
    cost = costs_of([(1, 30.0), (3, 30.0), (2, 30.0)]).cost()
    assert cost is not None
    assert cost.ms_per_token == pytest.approx(15.0)
    assert cost.error > 0
    assert costs_of([(1, 30.0)]).cost() is None


def test_rounds_in_proportion_to_their_tokens_leave_no_error() -> None:
    cost = costs_of([(1, 10.0), (2, 20.0), (4, 40.0)]).cost()
    assert cost == Cost(pytest.approx(10.0), pytest.approx(0.0, abs=1e-9))


def test_the_error_is_that_of_many_samples() -> None:
    """A naive rival: how far the ratio is spread when the same is measured again and again."""
    generator = random.Random(0)
    ratios, errors = [], []
    for _ in range(400):
        cost = costs_of([(generator.choice([1, 2, 6]), generator.uniform(25, 35)) for _ in range(32)]).cost()
        ratios.append(cost.ms_per_token)
        errors.append(cost.error)
    mean = sum(ratios) / len(ratios)
    spread = (sum((each - mean) ** 2 for each in ratios) / len(ratios)) ** 0.5
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.15)


def test_old_rounds_leave_and_a_hiccup_counts_less() -> None:
    costs = costs_of([(1, 100.0)] * 10 + [(1, 10.0)] * 8, window=8)
    assert costs.cost().ms_per_token == pytest.approx(10.0)
    costs.add(1, 60_000.0)  # the machine was suspended
    assert costs.cost().ms_per_token < 15.0


def test_surely_above() -> None:
    assert Cost(12.0, 1.0).is_surely_above(Cost(10.0))
    assert not Cost(12.0, 2.0).is_surely_above(Cost(10.0))
    assert not Cost(12.0, 1.0).is_surely_above(Cost(10.0, 1.0), margin=0.1)
