from __future__ import annotations

import itertools
import random

import pytest

from hf_ssd import SSDConfig
from hf_ssd.planning import plan_fan_out
from hf_ssd.planning.fan_out import geometric_weights, likeliest_outcomes, round_to_budget
from hf_ssd.theory import outcome_probabilities


def random_cases(num_cases: int = 300):
    """Chances to stop at each node, of bonus tokens there in falling order, a budget and an exponent."""
    generator = random.Random(0)
    for _ in range(num_cases):
        acceptance = [generator.uniform(0.01, 0.99) for _ in range(generator.randint(0, 8))]
        stops = outcome_probabilities(acceptance)
        candidates = [sorted((generator.random() for _ in range(40)), reverse=True) for _ in stops]
        yield stops, candidates, generator.randint(1, 30), generator.uniform(0.1, 2.0)


@pytest.mark.parametrize("kind", ["per_instance", "geometric", "uniform"])
def test_the_sum_is_the_budget(kind: str) -> None:
    for stops, candidates, budget, exponent in random_cases():
        config = SSDConfig(cache_budget=budget, fan_out=kind, power_law_exponent=exponent)
        fan_out = plan_fan_out(config, budget, stops, candidates)
        assert len(fan_out) == len(stops)
        assert sum(fan_out) == budget
        assert min(fan_out) >= 0
        if kind == "geometric":
            assert fan_out[stops.index(max(stops))] >= 1


def test_by_probability_a_likelier_length_never_gets_less() -> None:
    for stops, candidates, budget, exponent in random_cases():
        config = SSDConfig(fan_out="geometric", power_law_exponent=exponent)
        ranked = sorted(zip(stops, plan_fan_out(config, budget, stops, candidates), strict=True))
        counts = [count for _, count in ranked]
        assert counts == sorted(counts)


def test_equal_acceptance_gives_theorem_12() -> None:
    a, r, length = 0.6, 0.8, 4
    weights = geometric_weights(outcome_probabilities([a] * length), r)
    expected = [a ** (k / (1 + r)) for k in range(length)]
    expected.append(a ** (length / (1 + r)) * (1 - a) ** (-1 / (1 + r)))
    assert [weight / weights[0] for weight in weights] == pytest.approx(expected)


def splits(num_nodes: int, budget: int):
    return (split for split in itertools.product(range(budget + 1), repeat=num_nodes) if sum(split) == budget)


def test_geometric_is_the_best_split() -> None:
    """No other split of the budget misses less, but for rounding, when F bonus tokens miss with probability F^-r."""
    budget, r = 12, 0.8
    stops = outcome_probabilities([0.7, 0.6])

    def misses(fan_out: tuple[int, ...]) -> float:
        return sum(p * (f**-r if f else 1.0) for p, f in zip(stops, fan_out, strict=True))

    best = min(map(misses, splits(3, budget)))
    config = SSDConfig(fan_out="geometric", power_law_exponent=r)
    assert misses(plan_fan_out(config, budget, stops, [[]] * 3)) <= best * 1.02


def test_per_instance_is_the_best_split() -> None:
    """No other split of the same budget hits more often."""
    generator = random.Random(0)
    for _ in range(60):
        stops = [generator.random() for _ in range(3)]
        candidates = [sorted((generator.random() ** 3 for _ in range(7)), reverse=True) for _ in stops]
        budget = generator.randint(1, 7)

        def hits(fan_out: tuple[int, ...], stops=stops, candidates=candidates) -> float:
            return sum(s * sum(c[:count]) for s, c, count in zip(stops, candidates, fan_out, strict=True))

        best = max(map(hits, splits(3, budget)))
        fan_out = likeliest_outcomes(stops, candidates, budget)
        assert sum(fan_out) == budget
        assert hits(fan_out) == pytest.approx(best, abs=1e-12)
        assert plan_fan_out(SSDConfig(), budget, stops, candidates) == fan_out


def test_per_instance_stops_where_there_are_no_more_candidates() -> None:
    assert likeliest_outcomes([0.9, 0.1], [[0.5], [0.2, 0.1]], 8) == (1, 2)


def test_a_list_is_obeyed_and_its_last_number_stands_for_longer() -> None:
    config = SSDConfig(fan_out=[4, 2, 1])
    assert plan_fan_out(config, 3, [0.2] * 5, [[]] * 5) == (4, 2, 1, 1, 1)
    assert plan_fan_out(config, 3, [0.5] * 2, [[]] * 2) == (4, 2)


def test_on_a_tree_a_list_goes_by_depth() -> None:
    assert plan_fan_out(SSDConfig(fan_out=[4, 2, 1]), 3, [0.2] * 5, [[]] * 5, [0, 1, 2, 1, 3]) == (4, 2, 1, 2, 1)


def test_uniform_spreads_evenly() -> None:
    assert sorted(plan_fan_out(SSDConfig(fan_out="uniform"), 10, [0.9] * 4, [[]] * 4)) == [2, 2, 3, 3]


def test_rounding_follows_the_largest_remainders() -> None:
    assert round_to_budget([5.0, 3.0, 2.0], 10) == (5, 3, 2)
    assert round_to_budget([2.6, 2.4], 5) == (3, 2)
    assert round_to_budget([0.1, 0.8, 0.1], 1) == (0, 1, 0)
