from __future__ import annotations

import itertools
import random

import pytest

from hf_ssd import SSDConfig
from hf_ssd.planning import AcceptanceEstimate, plan_fan_out
from hf_ssd.planning.fan_out import geometric_weights, round_to_budget
from hf_ssd.theory import outcome_probabilities
from hf_ssd.types import Outcome


def random_cases(num_cases: int = 300):
    generator = random.Random(0)
    for _ in range(num_cases):
        acceptance = [generator.uniform(0.01, 0.99) for _ in range(generator.randint(0, 8))]
        yield acceptance, generator.randint(1, 30), generator.uniform(0.1, 2.0)


def test_the_sum_is_the_budget_and_the_likeliest_length_gets_one() -> None:
    for acceptance, budget, exponent in random_cases():
        for kind in ("geometric", "uniform"):
            config = SSDConfig(cache_budget=budget, fan_out=kind, power_law_exponent=exponent)
            fan_out = plan_fan_out(config, acceptance)
            assert len(fan_out) == len(acceptance) + 1
            assert sum(fan_out) == budget
            assert min(fan_out) >= 0
            if kind == "geometric":
                probabilities = outcome_probabilities(acceptance)
                assert fan_out[probabilities.index(max(probabilities))] >= 1


def test_a_likelier_length_never_gets_less() -> None:
    for acceptance, budget, exponent in random_cases():
        config = SSDConfig(cache_budget=budget, power_law_exponent=exponent)
        ranked = sorted(zip(outcome_probabilities(acceptance), plan_fan_out(config, acceptance), strict=True))
        counts = [count for _, count in ranked]
        assert counts == sorted(counts)


def test_equal_acceptance_gives_theorem_12() -> None:
    a, r, length = 0.6, 0.8, 4
    weights = geometric_weights([a] * length, r)
    expected = [a ** (k / (1 + r)) for k in range(length)]
    expected.append(a ** (length / (1 + r)) * (1 - a) ** (-1 / (1 + r)))
    assert [weight / weights[0] for weight in weights] == pytest.approx(expected)


def test_geometric_is_the_best_split() -> None:
    """No other split of the budget misses less, but for rounding, when F bonus tokens miss with probability F^-r."""
    acceptance, budget, r = [0.7, 0.6], 12, 0.8
    probabilities = outcome_probabilities(acceptance)

    def misses(fan_out: tuple[int, ...]) -> float:
        return sum(p * (f**-r if f else 1.0) for p, f in zip(probabilities, fan_out, strict=True))

    splits = [split for split in itertools.product(range(budget + 1), repeat=3) if sum(split) == budget]
    best = min(map(misses, splits))
    config = SSDConfig(cache_budget=budget, power_law_exponent=r)
    assert misses(plan_fan_out(config, acceptance)) <= best * 1.02


def test_a_list_is_obeyed_and_its_last_number_stands_for_longer() -> None:
    config = SSDConfig(fan_out=[4, 2, 1], cache_budget=3)
    assert plan_fan_out(config, [0.5] * 4) == (4, 2, 1, 1, 1)
    assert plan_fan_out(config, [0.5]) == (4, 2)


def test_uniform_spreads_evenly() -> None:
    assert sorted(plan_fan_out(SSDConfig(fan_out="uniform", cache_budget=10), [0.9] * 3)) == [2, 2, 3, 3]


def test_rounding_follows_the_largest_remainders() -> None:
    assert round_to_budget([5.0, 3.0, 2.0], 10) == (5, 3, 2)
    assert round_to_budget([2.6, 2.4], 5) == (3, 2)
    assert round_to_budget([0.1, 0.8, 0.1], 1) == (0, 1, 0)


class TestAcceptanceEstimate:
    def test_starts_at_the_belief(self) -> None:
        assert AcceptanceEstimate(0.7)(3) == pytest.approx((0.7, 0.7, 0.7))

    def test_measurements_replace_the_belief(self) -> None:
        estimate = AcceptanceEstimate(0.7)
        for round_ in range(1000):
            estimate.update(2, Outcome(num_accepted=1 if round_ % 4 else 0, bonus_token=0))
        first, second = estimate(2)
        assert first == pytest.approx(0.75, abs=0.03)
        assert second == pytest.approx(0.0, abs=0.05)  # reached 750 times, never accepted; old rounds fade

    def test_old_measurements_fade(self) -> None:
        """Text changes: code is followed by prose."""
        estimate = AcceptanceEstimate(0.5)
        for is_accepted in [True] * 1000 + [False] * 300:
            estimate.update(1, Outcome(int(is_accepted), 0))
        assert estimate(1)[0] < 0.1

    def test_positions_after_a_rejection_are_not_counted(self) -> None:
        estimate = AcceptanceEstimate(0.5)
        estimate.update(3, Outcome(0, 0))
        first, second, third = estimate(3)
        assert first < 0.5
        assert second == third == first  # unseen: as the one before

    def test_an_unseen_position_borrows_from_the_one_before(self) -> None:
        estimate = AcceptanceEstimate(0.5)
        for _ in range(100):
            estimate.update(1, Outcome(1, 0))
        assert estimate(3)[2] == estimate(3)[0] > 0.9

    def test_estimates_stay_inside_their_bounds(self) -> None:
        generator = random.Random(1)
        estimate = AcceptanceEstimate(0.3)
        for _ in range(500):
            length = generator.randint(0, 8)
            estimate.update(length, Outcome(generator.randint(0, length), 0))
            assert all(0 < value < 1 for value in estimate(10))
