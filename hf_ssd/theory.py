"""The speed model. Pure functions of scalars; formulas and their sources are in docs/algorithms.md.

Times may be in any unit, the same for all arguments of a function; names that end in `_ms` are in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# The steepest power law to believe. On code, a large and a small model of one family come to 3.5.
MAX_EXPONENT = 4.0

# Tokens


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
    """Expected tokens of a round, the bonus token included: `1 + a_1 + a_1 a_2 + ...`.

    Args:
        acceptance: As for [`outcome_probabilities`].
    """
    reached, tokens = 1.0, 1.0
    for rate in acceptance:
        reached *= rate
        tokens += reached
    return tokens


def chain_bound(acceptance_rate: float) -> float:
    """Most tokens per target forward of a chain whose tokens are all accepted with the same chance: `1 / (1 - a)`."""
    return math.inf if acceptance_rate >= 1.0 else 1.0 / (1.0 - acceptance_rate)


def entropy_bound(entropy: float, entropy_second_moment: float, num_tokens: int) -> float | None:
    """Most tokens per target forward of any draft, up to a constant: `(mu + mu2) log P / mu^2` (arXiv 2512.11718).

    Args:
        entropy: Mean entropy of the target's distribution, in nats.
        entropy_second_moment: Mean of `sum p log^2 p` over the target's distributions.
        num_tokens: Draft tokens that are verified at once, a chain or a tree.

    Returns:
        `None` where the bound says nothing: at temperature 0, whose entropy is 0.
    """
    if entropy <= 0.0:
        return None
    return (entropy + entropy_second_moment) * math.log(num_tokens) / entropy**2


# Draft lengths


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


def anytime_steps(
    gains: Sequence[float], *, hit_rate: float, step_ms: float, verify_ms: float, ms_per_token: float
) -> int:
    """How many steps of drafting ahead are started while the target verifies.

    The first always is. A later one that ends after the verification makes the target wait for its rest, which pays
    while the tokens it is expected to add cost less than tokens cost the run on average: the rule of the drafting
    engine, in a world without jitter.

    Args:
        gains: For each step that may be made the tokens that it is expected to add if the outcome is prepared for; for
            chains `a_1`, `a_1 a_2`, ...
        hit_rate: Chance that the outcome is prepared for.
        step_ms: Time of a step.
        verify_ms: Time of the verification.
        ms_per_token: Time of the run per emitted token.

    Returns:
        A number from 1 to `len(gains)`.
    """
    steps = 1
    for gain in gains[1:]:
        overrun_ms = (steps + 1) * step_ms - verify_ms
        if hit_rate * gain * ms_per_token <= overrun_ms:
            break
        steps += 1
    return steps


# Hits


def miss_rate(fan_out: int, exponent: float) -> float:
    """Chance that none of F prepared bonus tokens is the real one: `(1 + F)^-r`.

    This is the power law `F^-r` of arXiv 2603.03251, moved by one: so it also holds where nothing or a single token is
    prepared. docs/algorithms.md compares both with measured ranks.
    """
    return (1.0 + fan_out) ** -exponent


def hit_rate(chances: Sequence[float], fan_out: Sequence[int], exponent: float) -> float:
    """Share of outcomes that are prepared for, by the power law.

    Args:
        chances: How likely each accepted length is; some or all of [`outcome_probabilities`].
        fan_out: How many bonus tokens are prepared for each.
        exponent: The power law's r.

    Returns:
        0 where there are no such outcomes.
    """
    hits = sum(chance * (1.0 - miss_rate(number, exponent)) for chance, number in zip(chances, fan_out, strict=True))
    return hits / sum(chances) if any(chances) else 0.0


def power_law_exponent(
    measured: float, chances: Sequence[float], fan_out: Sequence[int], most: float = MAX_EXPONENT
) -> float:
    """The `r` by which the power law gives a measured hit rate. Hit rates rise with it, so halving finds it.

    Args:
        measured: Share of outcomes that were prepared for.
        chances: As for [`hit_rate`].
        fan_out: As for [`hit_rate`].
        most: The largest to believe: a few rounds may all have hit.
    """
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        if hit_rate(chances, fan_out, middle) < measured:
            low = middle
        else:
            high = middle
    return high


# Times of a round, and speed


def sd_round(verify: float, draft: float, overhead: float = 0.0) -> float:
    """Time of a round of SD: one verification, then drafting, beside which the target's own bookkeeping runs."""
    return verify + max(draft, overhead)


def ssd_round(
    hit_rate: float, verify: float, backup: float, *, rest: float = 0.0, overhead: float = 0.0, batch_size: int = 1
) -> float:
    """Expected time of a round of SSD. A batch waits for the backup if any row misses.

    Without overhead this is `v + w + (1 - h^b) T_b`. For a tree of fixed size that takes `T_p` to prepare, the rest is
    `w = max(T_p - v, 0)`; for anytime drafting, what is left of the step that the outcome interrupts.

    Args:
        hit_rate: Share of outcomes that are prepared for, of one row.
        verify: Time of a verification.
        backup: Time of the backup, drafting just in time.
        rest: Time from the outcome until the assistant can answer it.
        overhead: The target's bookkeeping after a verification; it runs beside the above.
        batch_size: Rows that are verified together.
    """
    all_hit = hit_rate**batch_size
    return verify + all_hit * max(rest, overhead) + (1.0 - all_hit) * max(rest + backup, overhead)


def tokens_per_second(tokens: float, round_ms: float, batch_size: int = 1) -> float:
    """Tokens per second of all rows together.

    Args:
        tokens: Expected tokens of a round, per row.
        round_ms: Its time, in milliseconds.
        batch_size: Number of rows.
    """
    return batch_size * tokens * 1e3 / round_ms


def critical_batch_size(hit_rate: float, tokens_ratio: float, backup: float) -> float:
    """From which batch size on a backup that takes no time beats drafting just in time (arXiv 2603.03251, theorem 17).

    Drafting just in time wins while `tokens_ratio > 1 + (1 - h^b) T`, that is up to
    `b* = log(1 - (tokens_ratio - 1) / T) / log h`.

    Args:
        hit_rate: Share of outcomes that are prepared for, of one row.
        tokens_ratio: Tokens per round with drafting just in time over those with the backup that takes no time.
        backup: Time to draft just in time, in units of a round without it.

    Returns:
        0 where the fast backup always wins, infinity where it never does.
    """
    gain = tokens_ratio - 1.0
    if gain <= 0.0:
        return 0.0
    if gain >= backup or hit_rate >= 1.0:
        return math.inf
    if hit_rate <= 0.0:
        return 0.0
    return math.log(1.0 - gain / backup) / math.log(hit_rate)
