"""Statistics against enumeration, closed forms and naive rivals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hf_ssd.evaluation.statistics import (
    chi_square,
    chi_square_p_value,
    count_outcomes,
    holm,
    mean_difference_test,
    total_variation,
    total_variation_test,
)


def test_total_variation_of_small_samples() -> None:
    assert total_variation("aab", "abb") == pytest.approx(1 / 3)
    assert total_variation("aa", "bbb") == 1
    assert total_variation("ab", "baab") == 0
    assert [list(counts) for counts in count_outcomes("aab", "bc")] == [[2, 1, 0], [0, 1, 1]]


def test_chi_square_by_hand() -> None:
    # 30 and 10 against 20 and 20: expected 25 and 15 in each sample.
    statistic, freedom = chi_square("a" * 30 + "b" * 10, "a" * 20 + "b" * 20)
    assert statistic == pytest.approx(25 / 25 + 25 / 15 + 25 / 25 + 25 / 15)
    assert freedom == 1
    # With one degree of freedom it is a squared normal variable, with two an exponential one.
    assert chi_square_p_value(statistic, 1) == pytest.approx(math.erfc(math.sqrt(statistic / 2)))
    assert chi_square_p_value(3.0, 2) == pytest.approx(math.exp(-1.5))
    assert chi_square_p_value(0.0, 0) == 1


def test_rare_outcomes_are_pooled() -> None:
    left, right = "a" * 20 + "bcdef", "a" * 20 + "ghijk"
    statistic, freedom = chi_square(left, right)
    assert freedom == 1  # a, and all others together
    assert statistic == 0


def exact_p_value(left: list[list[float]], right: list[list[float]], statistic) -> float:
    """Over every way to give each prompt's pooled samples to the two sides."""
    pools = [a + b for a, b in zip(left, right, strict=True)]
    splits = []
    for a, pool in zip(left, pools, strict=True):
        options = []
        for chosen in itertools.combinations(range(len(pool)), len(a)):
            rest = [pool[i] for i in range(len(pool)) if i not in chosen]
            options.append(([pool[i] for i in chosen], rest))
        splits.append(options)
    observed = statistic(list(zip(left, right, strict=True)))
    values = [statistic(list(way)) for way in itertools.product(*splits)]
    return sum(value >= observed - 1e-9 for value in values) / len(values)


LEFT = [[1, 1, 2, 3], [5, 5, 5, 6]]
RIGHT = [[1, 2, 2, 2], [6, 6, 6, 7]]


def test_permutations_of_total_variation_agree_with_enumeration() -> None:
    def mean_distance(pairs) -> float:
        return sum(total_variation(a, b) for a, b in pairs) / len(pairs)

    exact = exact_p_value(LEFT, RIGHT, mean_distance)
    test = total_variation_test(LEFT, RIGHT, num_permutations=20_000)
    assert test.value == pytest.approx(mean_distance(list(zip(LEFT, RIGHT, strict=True))))
    assert test.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000))


def test_permutations_of_means_agree_with_enumeration() -> None:
    def distance(pairs) -> float:
        return abs(sum(np.mean(a) - np.mean(b) for a, b in pairs))

    exact = exact_p_value(LEFT, RIGHT, distance)
    test = mean_difference_test(LEFT, RIGHT, num_permutations=20_000)
    assert test.mean_if_equal == pytest.approx(0, abs=4 * test.sd_if_equal / 141)
    assert test.value == pytest.approx((7 / 4 - 7 / 4 + 21 / 4 - 25 / 4) / 2)
    assert test.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000))


def test_p_values_of_equal_samplers_are_uniform() -> None:
    generator = np.random.default_rng(0)
    p_values = []
    for trial in range(200):
        draws = generator.integers(4, size=(2, 3, 12)).tolist()
        p_values.append(total_variation_test(draws[0], draws[1], num_permutations=99, seed=trial).p_value)
    for level in (0.05, 0.2, 0.5):
        expected = 200 * level
        assert sum(p <= level for p in p_values) <= expected + 4 * math.sqrt(expected)
    assert np.mean(p_values) > 0.4


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="samples for the same prompts, but got 1 and 2 prompts"):
        total_variation_test([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="some may be empty"):
        mean_difference_test([[]], [[1.0]])


def test_holm_by_hand() -> None:
    # Sorted: .01 x 4, .02 x 3, .03 x 2, .5 x 1; never below the one before.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx((0.06, 0.04, 0.5, 0.06))
    assert holm([0.6, 0.9]) == (1.0, 1.0)
    assert holm([]) == ()
