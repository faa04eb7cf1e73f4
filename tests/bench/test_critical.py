"""The critical batch size, from the arms of a benchmark."""

from __future__ import annotations

import math

import pytest

from hf_ssd.bench.critical import compare_backups, measured_critical_batch_size
from hf_ssd.theory import critical_batch_size
from hf_ssd.types import Miss, Origin, RoundStats

HIT = RoundStats(3, 2, 3, Origin.CACHE, verify_ms=90.0, wait_ms=10.0)
JIT = RoundStats(2, 2, 3, Origin.JUST_IN_TIME, Miss.TOKEN, verify_ms=90.0, wait_ms=60.0)
NOTHING = RoundStats(0, 0, 1, Origin.NONE, Miss.TOKEN, verify_ms=90.0, wait_ms=10.0)


def test_what_the_formula_takes() -> None:
    figures = compare_backups([HIT] * 3 + [JIT], [HIT] * 3 + [NOTHING], 20.0, 25.0)
    assert figures is not None
    assert (figures.hit_rate, figures.jit, figures.speed_ratio) == (0.75, 0.5, 1.25)
    assert figures.tokens_ratio == pytest.approx(3.0 / 2.5)
    assert figures.formula == pytest.approx(critical_batch_size(0.75, 1.2, 0.5))


def test_never_is_none_so_that_it_can_be_written_as_json() -> None:
    free = RoundStats(2, 2, 3, Origin.JUST_IN_TIME, Miss.TOKEN, verify_ms=90.0, wait_ms=10.0)
    figures = compare_backups([HIT, free], [HIT, NOTHING], 25.0, 20.0)
    assert figures is not None
    assert figures.formula is None


def test_without_misses_there_is_nothing_to_compare() -> None:
    assert compare_backups([HIT], [HIT, NOTHING], 1.0, 1.0) is None
    assert compare_backups([HIT, JIT], [HIT], 1.0, 1.0) is None


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({}, None),
        ({1: 0.9, 2: 0.95, 4: 0.99}, math.inf),
        ({1: 1.1, 4: 1.0, 8: 1.2}, 0.0),
        ({2: 0.9, 8: 1.1}, 4.0),
        ({1: 1.05, 2: 0.9, 8: 1.1}, 4.0),
    ],
)
def test_where_the_arms_cross(ratios: dict[int, float], expected: float | None) -> None:
    found = measured_critical_batch_size(ratios)
    assert found == (None if expected is None else pytest.approx(expected))
