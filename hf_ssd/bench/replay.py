"""Tries fan-outs on recorded rounds: which outcomes would each of them have prepared, and did the real one hit?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import FAN_OUTS, SSDConfig
from ..planning import AcceptanceEstimate, Calibration, Event, plan_fan_out
from ..theory import outcome_probabilities
from .fan_outs import RecordedRound
from .statistics import Estimate, mean_with_interval

BUDGETS = (4, 8, 16, 32)
PER_INSTANCE = "per_instance"


@dataclass(frozen=True)
class FanOutFigures:
    """Hit rates of the fan-outs at one temperature, all on the same rounds.

    Args:
        temperature: Of the recorded texts; 0 is greedy.
        num_rounds: Rounds that were recorded.
        num_draft_tokens: K of them.
        budgets: The cache budgets B that were tried.
        hit_rates: By fan-out, for each budget the share of rounds whose outcome would have been prepared for.
        leads: By each other fan-out, for each budget how much higher the hit rate of `"per_instance"` is; the
            interval is of the paired differences, round by round.
    """

    temperature: float
    num_rounds: int
    num_draft_tokens: int
    budgets: tuple[int, ...]
    hit_rates: Mapping[str, tuple[Estimate, ...]]
    leads: Mapping[str, tuple[Estimate, ...]]


def compare_fan_outs(
    rounds: Sequence[RecordedRound], config: SSDConfig, temperature: float, budgets: Sequence[int] = BUDGETS
) -> FanOutFigures:
    """Replays rounds under every fan-out and budget.

    Args:
        rounds: In the order they were recorded, all at one temperature.
        config: `expected_acceptance` and `power_law_exponent` are read.
        temperature: Of the rounds.
        budgets: Cache budgets to try.

    Raises:
        ValueError: If there are no rounds.
    """
    if not rounds:
        raise ValueError("`rounds` must hold at least one round, but is empty. Generate longer texts.")
    hits = replay(rounds, config, budgets)
    return FanOutFigures(
        temperature=temperature,
        num_rounds=len(rounds),
        num_draft_tokens=max(len(round_.positions) - 1 for round_ in rounds),
        budgets=tuple(budgets),
        hit_rates={name: tuple(mean_with_interval(hits[name, budget]) for budget in budgets) for name in FAN_OUTS},
        leads={
            name: tuple(
                mean_with_interval(
                    [ours - theirs for ours, theirs in zip(hits[PER_INSTANCE, budget], hits[name, budget], strict=True)]
                )
                for budget in budgets
            )
            for name in FAN_OUTS
            if name != PER_INSTANCE
        },
    )


def replay(
    rounds: Sequence[RecordedRound], config: SSDConfig, budgets: Sequence[int] = BUDGETS
) -> dict[tuple[str, int], list[bool]]:
    """Whether each round's outcome would have been among the prepared ones, by fan-out and budget.

    What a fan-out goes by is learnt on the way, as in a run: each round is planned with what those before it showed.
    """
    acceptance = AcceptanceEstimate(config.expected_acceptance)
    calibration = Calibration(config.expected_acceptance)
    configs = {name: SSDConfig.from_dict({**config.to_dict(), "fan_out": name}) for name in FAN_OUTS}
    hits: dict[tuple[str, int], list[bool]] = {(name, budget): [] for name in FAN_OUTS for budget in budgets}
    for round_ in rounds:
        drafted = [position.draft_prob for position in round_.positions if position.draft_prob is not None]
        by_instance = outcome_probabilities(calibration.chances(Event.ACCEPTED, drafted))
        by_length = outcome_probabilities(acceptance(len(drafted)))
        chances = [calibration.chances(_event(round_, k), each.probs) for k, each in enumerate(round_.positions)]
        candidates = round_.positions[round_.num_accepted].candidates
        for (name, budget), of_fan_out in hits.items():
            stop_probs = by_instance if name == PER_INSTANCE else by_length
            fan_out = plan_fan_out(configs[name], budget, stop_probs, chances)
            of_fan_out.append(round_.bonus_token in candidates[: fan_out[round_.num_accepted]])
        _learn(round_, acceptance, calibration)
    return hits


def _learn(round_: RecordedRound, acceptance: AcceptanceEstimate, calibration: Calibration) -> None:
    """Effects: both estimates take in the round's outcome."""
    num_reached = min(round_.num_accepted + 1, len(round_.positions) - 1)
    acceptance.update(num_reached, round_.num_accepted)
    for k in range(num_reached):
        prob = round_.positions[k].draft_prob
        assert prob is not None
        calibration.update(Event.ACCEPTED, prob, k < round_.num_accepted)
    last = round_.positions[round_.num_accepted]
    for token, prob in zip(last.candidates, last.probs, strict=True):
        calibration.update(_event(round_, round_.num_accepted), prob, token == round_.bonus_token)


def _event(round_: RecordedRound, num_accepted: int) -> Event:
    """What a bonus token is after so many accepted draft tokens."""
    return Event.REPLACED if num_accepted < len(round_.positions) - 1 else Event.APPENDED
