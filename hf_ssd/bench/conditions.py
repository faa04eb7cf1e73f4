"""What a prediction starts from: a pair of models on some hardware, measured or assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import SSDConfig
from ..planning import plan_fan_out
from ..theory import chain_bound, hit_rate, miss_rate, outcome_probabilities, power_law_exponent
from .profile import Profile

# What stands for `cache_budget="auto"`, where the run itself decides how many outcomes it prepares.
NOMINAL_BUDGET = 8

# How many observations the pair's overall acceptance is worth where a position was tested seldom.
WEIGHT_OF_OVERALL = 4.0

# Reading the weights takes a target as long as computing 200 tokens: 989 TFLOPS over 3.35 TB/s is 295 operations per
# byte on an H100 (its data sheet, bfloat16, dense), of which about two thirds are reached.
TOKEN_SHARE = 1 / 200


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is different from given conditions; `None` is what is not. Times are in milliseconds.

    Args:
        target_ms: A target forward of one token.
        assistant_ms: An assistant forward of one token.
        target_token_ms: What one more token adds to a target forward.
        assistant_token_ms: What one more token adds to an assistant forward.
        acceptance: Chance of each draft token to be accepted when all before it were.
        hit_rate: Share of outcomes that are prepared for.
        power_law: `r` in "F prepared bonus tokens miss with probability (1 + F)^-r".

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
    """

    target_ms: float | None = None
    assistant_ms: float | None = None
    target_token_ms: float | None = None
    assistant_token_ms: float | None = None
    acceptance: float | None = None
    hit_rate: float | None = None
    power_law: float | None = None

    def __post_init__(self) -> None:
        for name in ("target_ms", "assistant_ms", "power_law"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ValueError(f"`{name}` must be a positive number, but got {value}.")
        for name in ("target_token_ms", "assistant_token_ms"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"`{name}` must be 0 or more milliseconds, but got {value}.")
        for name in ("acceptance", "hit_rate"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"`{name}` must be at least 0 and below 1, but got {value}. Give 0.8 for 80 %.")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """A pair of models on some hardware. Times are in milliseconds.

    Args:
        verify_base_ms: `a` in `a + b n`, the target's time for `n` tokens.
        verify_token_ms: `b` in it.
        overhead_ms: The target's bookkeeping per round.
        token_ms: The assistant's time for a token drafted just in time.
        step_ms: Its time for a step ahead with `budget` branches.
        branch_ms: What one more token adds to one of its forwards.
        budget: The cache budget B that `step_ms` belongs to.
        acceptance: Chance to be accepted for each position that may be drafted.
        exponent_rejected: `r` in "F prepared bonus tokens miss with probability (1 + F)^-r", after a rejection.
        exponent_accepted: The same after all draft tokens were accepted: what follows them is easier to foresee.
        fan_out_exponent: The `r` that the split of the budget is planned with.
        draft_length: Tokens drafted while the target waits; `None` takes the number with most tokens per second.
    """

    verify_base_ms: float
    verify_token_ms: float
    overhead_ms: float
    token_ms: float
    step_ms: float
    branch_ms: float
    budget: int
    acceptance: tuple[float, ...]
    exponent_rejected: float
    exponent_accepted: float
    fan_out_exponent: float = SSDConfig.power_law_exponent
    draft_length: int | None = None

    @property
    def target_ms(self) -> float:
        """A target forward of one token."""
        return self.verify_ms(1)

    def verify_ms(self, num_tokens: float) -> float:
        return self.verify_base_ms + self.verify_token_ms * num_tokens

    def draft_ms(self, batch_size: int) -> float:
        """Drafting one token for each row."""
        return self.token_ms + self.branch_ms * (batch_size - 1)

    def tree_step_ms(self, batch_size: int, budget: int) -> float:
        """A step ahead with `budget` branches for each row. Never less than a step of a single branch."""
        return max(self.step_ms + self.branch_ms * (batch_size * budget - self.budget), self.token_ms)

    def hit_rates(self, num_draft_tokens: int, budget: int) -> tuple[float, float]:
        """Hit rates after a rejection and after none, when `num_draft_tokens` are being verified."""
        *rejected, _ = outcome_probabilities(self.acceptance[:num_draft_tokens])
        *before, last = self._fan_out(num_draft_tokens, budget)
        return hit_rate(rejected, before, self.exponent_rejected), hit_rate([1.0], [last], self.exponent_accepted)

    def with_hit_rates(self, rejected: float, accepted: float, num_draft_tokens: int) -> Conditions:
        """The same with power laws that give these hit rates at `budget`, for speculations of `num_draft_tokens`."""
        *chances, _ = outcome_probabilities(self.acceptance[:num_draft_tokens])
        *before, last = self._fan_out(num_draft_tokens, self.budget)
        return replace(
            self,
            exponent_rejected=power_law_exponent(rejected, chances, before),
            exponent_accepted=power_law_exponent(accepted, [1.0], [last]),
        )

    def _fan_out(self, num_draft_tokens: int, budget: int) -> tuple[int, ...]:
        stop_chances = outcome_probabilities(self.acceptance[:num_draft_tokens])
        by_rank = [miss_rate(n, self.fan_out_exponent) - miss_rate(n + 1, self.fan_out_exponent) for n in range(budget)]
        return plan_fan_out(SSDConfig(), budget, stop_chances, [by_rank] * len(stop_chances))

    def changed(self, changes: Changes) -> Conditions:
        """The same pair under other circumstances. All times of a side change in the same ratio."""
        target = 1.0 if changes.target_ms is None else changes.target_ms / self.target_ms
        assistant = 1.0 if changes.assistant_ms is None else changes.assistant_ms / self.token_ms
        token_ms, branch_ms = self.verify_token_ms * target, self.branch_ms * assistant
        if changes.target_token_ms is not None:
            token_ms = changes.target_token_ms
        if changes.assistant_token_ms is not None:
            branch_ms = changes.assistant_token_ms
        changed = replace(
            self,
            verify_base_ms=self.target_ms * target - token_ms,
            verify_token_ms=token_ms,
            overhead_ms=self.overhead_ms * target,
            token_ms=self.token_ms * assistant,
            step_ms=self.step_ms * assistant + (branch_ms - self.branch_ms * assistant) * (self.budget - 1),
            branch_ms=branch_ms,
            acceptance=self.acceptance if changes.acceptance is None else (changes.acceptance,) * len(self.acceptance),
            exponent_rejected=changes.power_law or self.exponent_rejected,
            exponent_accepted=changes.power_law or self.exponent_accepted,
        )
        if changes.hit_rate is None:
            return changed
        length = math.ceil(min(chain_bound(changed.acceptance[0]), len(changed.acceptance)))
        return changed.with_hit_rates(changes.hit_rate, changes.hit_rate, length)

    def with_draft_tokens(self, number: int) -> Conditions:
        """The same with `num_assistant_tokens` set to a number; positions that are not known are like the last."""
        acceptance = (*self.acceptance, *self.acceptance[-1:] * number)[:number]
        return replace(self, acceptance=acceptance, draft_length=number)


def conditions_of(config: SSDConfig, profiles: Sequence[Profile]) -> Conditions:
    """The conditions of a run.

    Times are those of the first profile, since two sides that compute at once slow each other down where they share
    cores or memory; what that arm never did is taken from the others. Acceptance is pooled over all: it belongs to the
    pair and the text. No arm's speed, tokens per round, waiting or draft lengths go in.

    Args:
        config: The settings of the run.
        profiles: Profiles of its arms, all of the same pair and texts.

    Raises:
        ValueError: If no draft token was tested in any of them.
    """
    if not any(profile.acceptance for profile in profiles):
        raise ValueError(
            f"A prediction needs a run that tested draft tokens, but none of the {len(profiles)} profiles has any. "
            'Run `hf-ssd compare --json` with the arms "sd" and "ssd".'
        )
    main = profiles[0]
    # Without a miss no token was drafted alone, without a hit no step is told from it: then one stands for the other.
    token_ms = next((p.token_ms for p in profiles if p.token_ms is not None), main.step_ms or 0.0)
    step_ms = token_ms if main.step_ms is None else main.step_ms
    budget = NOMINAL_BUDGET if config.cache_budget == "auto" else config.cache_budget
    conditions = Conditions(
        verify_base_ms=main.verify_base_ms,
        verify_token_ms=main.verify_token_ms,
        overhead_ms=main.overhead_ms,
        token_ms=token_ms,
        step_ms=step_ms,
        branch_ms=max(step_ms - token_ms, 0.0) / max(budget - 1, 1),
        budget=budget,
        acceptance=pooled_acceptance(profiles, config.max_draft_tokens),
        exponent_rejected=config.power_law_exponent,
        exponent_accepted=config.power_law_exponent,
        fan_out_exponent=config.power_law_exponent,
        draft_length=None if config.num_assistant_tokens == "auto" else config.num_assistant_tokens,
    )
    if main.hit_rate is None:
        return conditions
    return conditions.with_hit_rates(
        main.hit_rate if main.hit_rate_rejected is None else main.hit_rate_rejected,
        main.hit_rate if main.hit_rate_accepted is None else main.hit_rate_accepted,
        math.ceil(sum(main.num_tested) / main.num_rounds),
    )


def pooled_acceptance(profiles: Sequence[Profile], num_positions: int) -> tuple[float, ...]:
    """Acceptance by position over several profiles. Positions that were tested seldom lean on all others.

    Args:
        profiles: At least one, with draft tokens that were tested.
        num_positions: How many positions to give; those that were never tested get the overall acceptance.
    """
    tested, accepted = [0.0] * num_positions, [0.0] * num_positions
    for profile in profiles:
        for position, (rate, number) in enumerate(zip(profile.acceptance, profile.num_tested, strict=True)):
            if position < num_positions:
                tested[position] += number
                accepted[position] += rate * number
    overall = sum(accepted) / sum(tested)
    return tuple(
        (number + WEIGHT_OF_OVERALL * overall) / (of + WEIGHT_OF_OVERALL)
        for number, of in zip(accepted, tested, strict=True)
    )


def assumed_conditions(assumed: Changes) -> Conditions:
    """Conditions of a pair that was not measured.

    What one more token adds to a forward is a share `TOKEN_SHARE` of it unless it is given, and hits follow the power
    law unless their rate is given, which is that of the default budget.

    Args:
        assumed: At least acceptance and both times.

    Raises:
        ValueError: If one of these is missing.
    """
    if assumed.target_ms is None or assumed.assistant_ms is None or assumed.acceptance is None:
        raise ValueError(
            "A prediction needs the file of a measured run, a preset, or `target_ms`, `assistant_ms` and `acceptance`, "
            f"but got {assumed.target_ms}, {assumed.assistant_ms} and {assumed.acceptance} for these. Give one of the "
            "three."
        )
    token_ms, branch_ms = assumed.target_ms * TOKEN_SHARE, assumed.assistant_ms * TOKEN_SHARE
    budget = NOMINAL_BUDGET
    conditions = Conditions(
        verify_base_ms=assumed.target_ms - token_ms,
        verify_token_ms=token_ms,
        overhead_ms=0.0,
        token_ms=assumed.assistant_ms,
        step_ms=assumed.assistant_ms + branch_ms * (budget - 1),
        branch_ms=branch_ms,
        budget=budget,
        acceptance=(assumed.acceptance,) * SSDConfig().max_draft_tokens,
        exponent_rejected=SSDConfig.power_law_exponent,
        exponent_accepted=SSDConfig.power_law_exponent,
    )
    return conditions.changed(assumed)
