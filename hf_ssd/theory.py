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


def worthwhile_draft_length(acceptance: Sequence[float], token_ms: float, ms_per_token: float) -> int:
    """How many tokens to draft while the target waits for them.

    One more is worth it while the tokens it is expected to add, which is the chance that all up to it are accepted,
    cost less than tokens cost the run on average. Applied round after round, with the run's own average, that comes to
    the length with most tokens per second (Dinkelbach's method).

    Args:
        acceptance: Chance to be accepted for each position that may be drafted.
        token_ms: Time to draft one token.
        ms_per_token: Time of the run per emitted token.

    Returns:
        A number from 1 to `len(acceptance)`.
    """
    reached, length = 1.0, 0
    for rate in acceptance:
        reached *= rate
        if length and reached * ms_per_token <= token_ms:
            break
        length += 1
    return length
