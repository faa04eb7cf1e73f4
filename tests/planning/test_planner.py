from __future__ import annotations

import random

import pytest

from hf_ssd.planning import Rates, best_step, is_worth_verifying, step_width
from hf_ssd.planning.planner import step_profit_ms


def cases(num_cases: int = 400):
    generator = random.Random(0)
    for _ in range(num_cases):
        count = generator.randint(1, 20)
        chances = sorted((generator.random() ** generator.choice([1, 4]) for _ in range(count)), reverse=True)
        step_ms = (generator.uniform(0.1, 40), generator.choice([0.0, generator.uniform(0.01, 5)]))
        rates = Rates(generator.uniform(1, 300), step_ms, (generator.uniform(5, 200), generator.uniform(0, 5)), 0.7)
        yield chances, rates, generator.choice([0.0, -5.0, generator.uniform(0, 100)])


def test_a_step_is_as_wide_as_gives_most_per_millisecond() -> None:
    for chances, rates, _ in cases():
        fixed, each = rates.step_ms

        def per_ms(width: int, chances=chances, fixed=fixed, each=each) -> float:
            return sum(chances[:width]) / (fixed + each * width)

        width = step_width(chances, rates.step_ms)
        assert per_ms(width) == pytest.approx(max(per_ms(n) for n in range(1, len(chances) + 1)))


def test_where_more_nodes_cost_nothing_all_are_run() -> None:
    assert step_width([0.5, 0.1, 0.01], (10.0, 0.0)) == 3


def test_at_least_as_many_as_are_asked_for() -> None:
    assert step_width([0.9, 0.001, 0.001], (0.1, 10.0)) == 1
    assert step_width([0.9, 0.001, 0.001], (0.1, 10.0), least=2) == 2
    assert step_width([0.9], (0.1, 10.0), least=2) == 1


def test_profit_by_hand() -> None:
    rates = Rates(ms_per_token=100.0, step_ms=(10.0, 1.0), verify_ms=(50.0, 2.0), acceptance=0.5)
    assert step_profit_ms([0.5, 0.3], rates, 20.0) == pytest.approx(0.8 * 50)  # done in time
    assert step_profit_ms([0.5, 0.3], rates, 5.0) == pytest.approx(0.8 * 50 - 7)  # 12 ms, of which 5 are left
    assert step_profit_ms([0.5, 0.3], rates, 0.0) == pytest.approx(0.8 * 50 - 2 * 2 - 12)  # verified at once
    assert step_profit_ms([0.5, 0.3], rates, -9.0) == step_profit_ms([0.5, 0.3], rates, 0.0)


def test_a_step_is_run_only_at_a_profit() -> None:
    for chances, rates, time_left_ms in cases():
        width = best_step(chances, rates, time_left_ms)
        fixed, each = rates.step_ms
        if width:
            assert step_profit_ms(chances[:width], rates, time_left_ms) > 0
        else:
            assert step_profit_ms(chances[: step_width(chances, rates.step_ms)], rates, time_left_ms) <= 0
        if time_left_ms > fixed + each * len(chances):
            assert width >= 1  # time that would pass anyway costs nothing


def test_no_width_between_the_two_would_be_much_better() -> None:
    """Against all widths. Two are looked at, so a little may be lost."""
    lost, total = 0.0, 0.0
    for chances, rates, time_left_ms in cases():
        profits = [step_profit_ms(chances[:n], rates, time_left_ms) for n in range(1, len(chances) + 1)]
        width = best_step(chances, rates, time_left_ms)
        total += max(*profits, 0.0)
        lost += max(*profits, 0.0) - (profits[width - 1] if width else 0.0)
    assert lost < 0.2 * total


def test_nothing_to_run() -> None:
    assert best_step([], Rates(100.0, (1.0, 0.1), (50.0, 1.0), 0.7), 100.0) == 0


def test_verifying_one_more_pays_by_what_a_token_is_worth() -> None:
    rates = Rates(100.0, (1.0, 0.1), (50.0, 2.0), 0.7)
    assert is_worth_verifying(0.021, rates)
    assert not is_worth_verifying(0.02, rates)
    assert is_worth_verifying(0.043, rates, lag_tokens=0.5)
    assert not is_worth_verifying(0.04, rates, lag_tokens=0.5)
