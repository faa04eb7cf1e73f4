"""The speed model. Pure functions of scalars; formulas and their sources are in docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Sequence


def outcome_probabilities(acceptance: Sequence[float]) -> tuple[float, ...]:
    """P(exactly k draft tokens are accepted) for k = 0..K.

    Args:
        acceptance: For each of the K draft positions the chance to be accepted when all before it were.
    """
    reached, probabilities = 1.0, []
    for rate in acceptance:
        probabilities.append(reached * (1.0 - rate))
        reached *= rate
    return (*probabilities, reached)


def tokens_per_round(acceptance: Sequence[float]) -> float:
    """Expected tokens that one verification of a chain gives, the bonus token included."""
    return sum((k + 1) * probability for k, probability in enumerate(outcome_probabilities(acceptance)))


def best_draft_length(acceptance: Sequence[float], verify_ms: float, step_ms: float) -> int:
    """The number of draft tokens that maximises tokens per second when the target waits for them.

    Args:
        acceptance: Chance to be accepted for each position that may be drafted.
        verify_ms: Time of a verification.
        step_ms: Time of one draft token.

    Returns:
        A number from 1 to `len(acceptance)`.
    """

    def speed(length: int) -> float:
        return tokens_per_round(acceptance[:length]) / (verify_ms + length * step_ms)

    return max(range(1, len(acceptance) + 1), key=speed)
