from __future__ import annotations

import random

import pytest

from hf_ssd.planning import AcceptanceEstimate


def test_it_starts_at_the_belief() -> None:
    assert AcceptanceEstimate(0.7)(3) == pytest.approx((0.7, 0.7, 0.7))


def test_measurements_replace_the_belief() -> None:
    estimate = AcceptanceEstimate(0.7)
    for round_ in range(1000):
        is_accepted = round_ % 4 > 0
        estimate.update(1 + is_accepted, int(is_accepted))
    first, second = estimate(2)
    assert first == pytest.approx(0.75, abs=0.03)
    assert second == pytest.approx(0.0, abs=0.05)  # reached 750 times, never accepted; old rounds fade


def test_old_measurements_fade() -> None:
    """Text changes: code is followed by prose."""
    estimate = AcceptanceEstimate(0.5)
    for is_accepted in [True] * 1000 + [False] * 300:
        estimate.update(1, int(is_accepted))
    assert estimate(1)[0] < 0.1


def test_positions_after_a_rejection_are_not_counted() -> None:
    estimate = AcceptanceEstimate(0.5)
    estimate.update(1, 0)
    first, second, third = estimate(3)
    assert first < 0.5
    assert second == third == first  # unseen: as the one before


def test_an_unseen_position_borrows_from_the_one_before() -> None:
    estimate = AcceptanceEstimate(0.5)
    for _ in range(100):
        estimate.update(1, 1)
    assert estimate(3)[2] == estimate(3)[0] > 0.9


def test_estimates_stay_inside_their_bounds() -> None:
    generator = random.Random(1)
    estimate = AcceptanceEstimate(0.3)
    for _ in range(500):
        num_accepted = generator.randint(0, 8)
        estimate.update(num_accepted + generator.randint(0, 1), num_accepted)
        assert all(0 < value < 1 for value in estimate(10))
