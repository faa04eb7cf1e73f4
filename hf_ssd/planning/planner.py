"""What to draft next, as a matter of cost and gain. Pure functions of numbers.

One currency for all decisions: the tokens that something is expected to add, against the time it takes. `ms_per_token`,
the time that the run takes per emitted token, converts one into the other. Applied round after round with the run's own
average this comes to the choice with most tokens per second (Dinkelbach's method for ratios).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What the run has shown so far. Times are in milliseconds.

    Args:
        ms_per_token: Time of the run per emitted token.
        step_ms: `(a, b)`: a draft step of n tokens takes `a + b n`.
        verify_ms: `(a, b)`: verifying n tokens takes `a + b n`.
        acceptance: Chance that drafting after a token that turns out right gives another right one.
    """

    ms_per_token: float
    step_ms: tuple[float, float]
    verify_ms: tuple[float, float]
    acceptance: float


def step_width(chances: Sequence[float], step_ms: tuple[float, float], least: int = 1) -> int:
    """How many nodes to run in one draft step: as many as give most per millisecond of the step.

    Args:
        chances: Of each node to be reached, in falling order. To run a node gains in proportion to it.
        step_ms: `(a, b)`: a step of n nodes takes `a + b n` milliseconds.
        least: Run at least so many.
    """
    fixed, each = step_ms
    gain, width = sum(chances[:least]), min(least, len(chances))
    for chance in chances[width:]:
        # One more raises the ratio as long as its own ratio is above that so far.
        if chance * (fixed + each * width) <= gain * each:
            break
        gain += chance
        width += 1
    return width


def step_profit_ms(chances: Sequence[float], rates: Rates, time_left_ms: float) -> float:
    """What a draft step on nodes with these chances is worth, less what the target would wait for it.

    A node that is reached gives another accepted token in `acceptance` of all cases. What is drafted while the target
    waits is verified next, so each node has to earn that too; what is drafted ahead may never be.

    Args:
        chances: Of each node to be reached.
        rates: Of the run.
        time_left_ms: Until the outcome is due; 0 when the target is waiting already.
    """
    fixed, each = rates.step_ms
    wait_ms = max(fixed + each * len(chances) - max(time_left_ms, 0.0), 0.0)
    each_verified_ms = rates.verify_ms[1] if time_left_ms <= 0 else 0.0
    gains = (chance * rates.acceptance * rates.ms_per_token - each_verified_ms for chance in chances)
    return sum(max(gain, 0.0) for gain in gains) - wait_ms


def best_step(chances: Sequence[float], rates: Rates, time_left_ms: float) -> int:
    """How many of the likeliest nodes to run now: 0 if waiting for the step costs more than it gains.

    Either as many as give most per millisecond, or as many as are done before the outcome is due.
    """
    if not chances:
        return 0
    fixed, each = rates.step_ms
    widths = {step_width(chances, rates.step_ms)}
    if each > 0 and time_left_ms > fixed:
        widths.add(max(1, min(int((time_left_ms - fixed) / each), *widths)))
    profits = {width: step_profit_ms(chances[:width], rates, time_left_ms) for width in widths}
    best = max(widths, key=lambda width: profits[width])
    return best if profits[best] > 0 else 0


def is_worth_verifying(chance: float, rates: Rates, lag_tokens: float = 0.0) -> bool:
    """Whether the target should verify one more token.

    Args:
        chance: That it is accepted.
        rates: Of the run.
        lag_tokens: What its acceptance costs the next round, which is prepared later than without it, in tokens.
    """
    return chance * (1.0 - lag_tokens) * rates.ms_per_token > rates.verify_ms[1]
