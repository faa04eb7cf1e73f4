from __future__ import annotations

import itertools
import math
import random

import pytest

from hf_ssd.theory import (
    MAX_EXPONENT,
    anytime_steps,
    chain_bound,
    critical_batch_size,
    entropy_bound,
    hit_rate,
    miss_rate,
    outcome_probabilities,
    power_law_exponent,
    sd_round,
    ssd_round,
    tokens_per_round,
    tokens_per_second,
    worthwhile_draft_length,
)


def by_enumeration(acceptance: list[float]) -> list[float]:
    """P(k accepted), from every pattern of accepted and rejected draft tokens."""
    probabilities = [0.0] * (len(acceptance) + 1)
    for pattern in itertools.product([True, False], repeat=len(acceptance)):
        chance = 1.0
        for rate, is_accepted in zip(acceptance, pattern, strict=True):
            chance *= rate if is_accepted else 1 - rate
        accepted = pattern.index(False) if False in pattern else len(pattern)
        probabilities[accepted] += chance
    return probabilities


def random_rates(seed: int, length: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.random() for _ in range(length)]


@pytest.mark.parametrize("length", range(5))
def test_outcome_probabilities_equal_an_enumeration(length: int) -> None:
    acceptance = random_rates(length, length)
    assert outcome_probabilities(acceptance) == pytest.approx(by_enumeration(acceptance))


@pytest.mark.parametrize("seed", range(20))
def test_draft_lengths_settle_where_most_tokens_per_second_are(seed: int) -> None:
    """Round after round the run's own average decides; where it settles no other length is better."""
    generator = random.Random(seed)
    acceptance = random_rates(seed, 6)
    verify_ms, token_ms = generator.uniform(1, 100), generator.uniform(1, 100)

    def ms_per_token(length: int) -> float:
        tokens = sum((k + 1) * chance for k, chance in enumerate(by_enumeration(acceptance[:length])))
        return (verify_ms + length * token_ms) / tokens

    length = generator.randint(1, 6)
    for _ in range(10):
        length = worthwhile_draft_length(acceptance, token_ms, ms_per_token(length))
    assert ms_per_token(length) == pytest.approx(min(ms_per_token(n) for n in range(1, 7)))


def test_draft_lengths_at_their_ends() -> None:
    assert worthwhile_draft_length([0.9] * 8, token_ms=0.0, ms_per_token=10.0) == 8  # drafting is free
    assert worthwhile_draft_length([0.01] * 8, token_ms=100.0, ms_per_token=1.0) == 1  # drafting is in vain


@pytest.mark.parametrize("length", range(5))
def test_tokens_per_round_equal_an_enumeration(length: int) -> None:
    acceptance = random_rates(length, length)
    expected = sum((k + 1) * chance for k, chance in enumerate(by_enumeration(acceptance)))
    assert tokens_per_round(acceptance) == pytest.approx(expected)


def test_a_long_chain_comes_close_to_its_bound() -> None:
    assert tokens_per_round([0.8] * 100) == pytest.approx(chain_bound(0.8))
    assert tokens_per_round([0.8] * 8) < chain_bound(0.8)
    assert chain_bound(1.0) == math.inf


def test_the_entropy_bound_of_a_uniform_target() -> None:
    """There mu = log V and mu2 = log^2 V: the bound is (1 + 1 / log V) log P."""
    size, num_tokens = 50, 16
    entropy = -sum(1 / size * math.log(1 / size) for _ in range(size))
    second_moment = sum(1 / size * math.log(1 / size) ** 2 for _ in range(size))
    expected = (1 + 1 / math.log(size)) * math.log(num_tokens)
    assert entropy_bound(entropy, second_moment, num_tokens) == pytest.approx(expected)
    assert entropy_bound(0.0, 0.0, num_tokens) is None


@pytest.mark.parametrize("seed", range(30))
def test_steps_ahead_equal_those_started_on_a_clock(seed: int) -> None:
    generator = random.Random(seed)
    acceptance, hit_rate = random_rates(seed, 6), generator.random()
    step_ms, verify_ms, ms_per_token = generator.uniform(1, 50), generator.uniform(1, 100), generator.uniform(1, 100)
    now, depth = step_ms, 1
    while depth < len(acceptance):
        end = now + step_ms
        late = max(end - verify_ms, 0.0)
        if late and hit_rate * math.prod(acceptance[: depth + 1]) * ms_per_token <= late:
            break
        now, depth = end, depth + 1
    gains = [math.prod(acceptance[:n]) for n in range(1, 7)]
    steps = anytime_steps(gains, hit_rate=hit_rate, step_ms=step_ms, verify_ms=verify_ms, ms_per_token=ms_per_token)
    assert steps == depth


def test_hit_rates_equal_an_enumeration() -> None:
    acceptance, fan_out, exponent = random_rates(1, 3), (5, 2, 0, 9), 0.7
    expected = 0.0
    for k, chance in enumerate(by_enumeration(acceptance)):
        expected += chance * (1 - (1 + fan_out[k]) ** -exponent)
    assert hit_rate(outcome_probabilities(acceptance), fan_out, exponent) == pytest.approx(expected)
    assert hit_rate([], [], exponent) == hit_rate([0.0], [8], exponent) == 0.0


def test_miss_rates_follow_the_power_law() -> None:
    assert miss_rate(0, 0.5) == 1.0
    assert miss_rate(3, 0.5) == pytest.approx(0.5)


# Share of 836 bonus tokens after a rejection that were not among the assistant's F likeliest: embedded pair, greedy.
MEASURED_MISSES = {1: 0.774, 2: 0.646, 4: 0.523, 8: 0.414, 16: 0.328, 32: 0.254}


def test_the_power_law_holds_for_ranks_that_were_measured() -> None:
    """One measured rate gives the exponent, and that the others."""
    exponent = power_law_exponent(1 - MEASURED_MISSES[8], [1.0], [8])
    for fan_out, measured in MEASURED_MISSES.items():
        assert miss_rate(fan_out, exponent) == pytest.approx(measured, abs=0.025)


@pytest.mark.parametrize("seed", range(10))
def test_the_exponent_behind_a_hit_rate_is_found(seed: int) -> None:
    chances = outcome_probabilities(random_rates(seed, 3))
    exponent = random.Random(seed).uniform(0.1, 3.0)
    measured = hit_rate(chances, (4, 2, 0, 3), exponent)
    assert power_law_exponent(measured, chances, (4, 2, 0, 3)) == pytest.approx(exponent)


def test_exponents_at_their_ends() -> None:
    assert power_law_exponent(0.0, [1.0], [8]) == pytest.approx(0.0)
    assert power_law_exponent(1.0, [1.0], [8]) == MAX_EXPONENT
    assert power_law_exponent(0.5, [1.0], [0]) == MAX_EXPONENT  # nothing was prepared, yet it hit


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_round_of_ssd_equals_an_enumeration_of_its_rows(batch_size: int) -> None:
    hit_rate, verify, backup, rest, overhead = 0.7, 10.0, 6.0, 1.0, 2.0
    expected = 0.0
    for rows in itertools.product([True, False], repeat=batch_size):
        chance = math.prod(hit_rate if is_hit else 1 - hit_rate for is_hit in rows)
        answered = rest + (0.0 if all(rows) else backup)
        expected += chance * (verify + max(answered, overhead))
    time = ssd_round(hit_rate, verify, backup, rest=rest, overhead=overhead, batch_size=batch_size)
    assert time == pytest.approx(expected)


def test_a_tree_of_fixed_size_takes_the_time_of_the_paper() -> None:
    """In units of a verification: `max(1, T_p) + (1 - h) T_b` for SSD, `1 + T_p` for SD."""
    for prepare, backup, hits in itertools.product([0.5, 1.5], [0.0, 0.7], [0.0, 0.6, 1.0]):
        time = ssd_round(hits, 1.0, backup, rest=max(prepare - 1.0, 0.0))
        assert time == pytest.approx(max(1.0, prepare) + (1 - hits) * backup)
        assert sd_round(1.0, prepare) == 1.0 + prepare
    assert tokens_per_second(3.0, 150.0, batch_size=2) == pytest.approx(40.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_critical_batch_size_is_where_the_backups_cross(seed: int) -> None:
    generator = random.Random(seed)
    hit_rate, ratio, backup = generator.random(), generator.uniform(1.0, 2.0), generator.uniform(0.1, 2.0)
    critical = critical_batch_size(hit_rate, ratio, backup)
    for batch_size in range(1, 60):
        just_in_time = ratio / ssd_round(hit_rate, 1.0, backup, batch_size=batch_size)
        assert (just_in_time > 1.0) is (batch_size < critical)


def test_the_critical_batch_size_at_its_ends() -> None:
    assert critical_batch_size(0.9, 1.0, 0.5) == 0  # it gains no token
    assert critical_batch_size(0.9, 0.9, 0.5) == 0
    assert critical_batch_size(0.9, 1.5, 0.5) == math.inf  # it gains more than it costs, even if every round misses
    assert critical_batch_size(1.0, 1.1, 0.5) == math.inf  # nothing ever misses
    assert critical_batch_size(0.0, 1.1, 0.5) == 0  # everything does
