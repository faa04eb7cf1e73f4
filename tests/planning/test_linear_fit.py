from __future__ import annotations

import random

import numpy as np
import pytest

from hf_ssd.planning import LinearFit


def least_squares(measured: list[tuple[float, float]], memory: float) -> tuple[float, float]:
    """`(a, b)` with the newest measurement's weight 1, the one before `memory`, and so on."""
    root = np.sqrt(memory ** np.arange(len(measured) - 1, -1, -1.0))
    n, y = np.array(measured).T
    design = np.stack([np.ones_like(n), n], axis=1)
    (a, b), *_ = np.linalg.lstsq(design * root[:, None], y * root, rcond=None)
    return float(a), float(b)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("memory", [0.95, 1.0])
def test_without_a_belief_it_is_the_line_of_least_squares(seed: int, memory: float) -> None:
    generator = random.Random(seed)
    a, b = generator.uniform(5, 50), generator.uniform(0.1, 3)
    fit, measured = LinearFit(slope=0.03, weight=1e-9, memory=memory), []
    for _ in range(40):
        n = generator.randint(1, 30)
        measured.append((n, (a + b * n) * generator.uniform(0.9, 1.1)))
        fit.update(*measured[-1])
    assert fit.line == pytest.approx(least_squares(measured, memory), rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_enough_measurements_outweigh_the_belief(seed: int) -> None:
    generator = random.Random(seed)
    fit = LinearFit(slope=0.5)
    for _ in range(300):
        n = generator.randint(1, 30)
        fit.update(n, 20 + 0.4 * n)
    a, b = fit.line
    assert b == pytest.approx(0.4, rel=0.1)
    assert a + 15 * b == pytest.approx(26, rel=0.02)


def test_before_the_first_measurement_there_is_no_line() -> None:
    fit = LinearFit(slope=0.03)
    assert fit.line is None
    assert fit(3) is None


@pytest.mark.parametrize("slope", [0.0, 0.03, 0.5])
def test_one_measurement_gives_the_believed_slope_through_it(slope: float) -> None:
    for n in (1, 8):
        fit = LinearFit(slope=slope)
        fit.update(n, 40.0)
        a, b = fit.line
        assert fit(n) == pytest.approx(40.0)
        assert b == pytest.approx(slope * (a + b))


def test_neither_part_is_negative() -> None:
    generator = random.Random(0)
    for _ in range(200):
        fit = LinearFit(slope=0.03)
        for _ in range(generator.randint(1, 20)):
            fit.update(generator.randint(1, 20), generator.uniform(0.01, 100))
            a, b = fit.line
            assert a >= 0
            assert b >= 0
            assert all(fit(n + 1) >= fit(n) for n in range(1, 30))


def test_a_hiccup_counts_little() -> None:
    fit = LinearFit(slope=0.03)
    for n in (1, 5, 9) * 5:
        fit.update(n, 10.0 + n)
    before = fit(5)
    fit.update(5, 5000.0)
    assert before < fit(5) < 1.2 * before


def test_but_a_machine_that_has_become_slower_is_believed() -> None:
    fit = LinearFit(slope=0.03)
    for _ in range(20):
        fit.update(4, 10.0)
    for _ in range(200):
        fit.update(4, 1000.0)
    assert fit(4) == pytest.approx(1000.0, rel=0.05)
    for _ in range(100):
        fit.update(4, 10.0)
    assert fit(4) == pytest.approx(10.0, rel=0.6)
