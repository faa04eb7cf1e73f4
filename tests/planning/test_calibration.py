from __future__ import annotations

import itertools
import random

import pytest

from hf_ssd.planning import Calibration, Event
from hf_ssd.planning.calibration import EDGES

PROBABILITIES = [i / 200 for i in range(201)]


def trained(seed: int, num_observations: int) -> Calibration:
    generator = random.Random(seed)
    calibration = Calibration(generator.uniform(0.05, 0.95))
    for _ in range(num_observations):
        calibration.update(generator.choice(list(Event)), generator.random(), generator.random() < 0.5)
    return calibration


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("num_observations", [0, 10, 2000])
def test_chances_are_chances_and_a_likelier_token_always_counts_more(event, num_observations) -> None:
    for seed in range(5):
        calibration = trained(seed, num_observations)
        chances = [calibration(event, p) for p in PROBABILITIES]
        assert all(0 <= chance <= 1 for chance in chances)
        assert all(first < second for first, second in itertools.pairwise(chances))


@pytest.mark.parametrize("expected", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("event", list(Event))
def test_what_is_not_known_yet_follows_the_assistants_word(event: Event, expected: float) -> None:
    """Over all probabilities, not only within a bin."""
    chances = [Calibration(expected)(event, p) for p in PROBABILITIES]
    assert all(first < second for first, second in itertools.pairwise(chances))
    if event in (Event.REPLACED, Event.APPENDED):
        assert chances == pytest.approx(PROBABILITIES, abs=0.11)


def test_what_is_expected_shows_in_drafted_tokens_only() -> None:
    low, high = Calibration(0.05), Calibration(0.95)
    assert low(Event.ACCEPTED, 0.5) < high(Event.ACCEPTED, 0.5)
    for event in (Event.REPLACED, Event.APPENDED):
        assert low(event, 0.5) == high(event, 0.5)


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("probability", [0.003, 0.3, 0.85, 0.999])
def test_it_follows_what_is_measured(event: Event, rate: float, probability: float) -> None:
    calibration, generator = Calibration(), random.Random(0)
    before = {other: calibration(other, probability) for other in Event if other is not event}
    for _ in range(3000):
        calibration.update(event, probability, generator.random() < rate)
    bin_ = sum(edge <= probability for edge in EDGES)
    bounds = (0.0, *EDGES, 1.0)
    center = (bounds[bin_] + bounds[bin_ + 1]) / 2
    assert calibration(event, center) == pytest.approx(rate, abs=0.06)
    assert {other: calibration(other, probability) for other in before} == before  # each has its own law


def test_old_measurements_fade() -> None:
    calibration = Calibration()
    for happened in [True] * 5000 + [False] * 2500:
        calibration.update(Event.ACCEPTED, 0.5, happened)
    assert calibration(Event.ACCEPTED, 0.475) < 0.05


def test_a_few_measurements_do_not_sweep_the_start_away() -> None:
    calibration = Calibration()
    before = calibration(Event.APPENDED, 0.6)
    calibration.update(Event.APPENDED, 0.6, False)
    assert 0.8 * before < calibration(Event.APPENDED, 0.6) < before


def test_several_at_once() -> None:
    calibration = trained(0, 100)
    assert calibration.chances(Event.REPLACED, [0.1, 0.9]) == [
        calibration(Event.REPLACED, 0.1),
        calibration(Event.REPLACED, 0.9),
    ]
