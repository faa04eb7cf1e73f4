from __future__ import annotations

import itertools
import random

import pytest

from hf_ssd.theory import outcome_probabilities, worthwhile_draft_length


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
