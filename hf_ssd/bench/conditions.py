"""What a prediction starts from: a pair of models on some hardware, measured or assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import SSDConfig
from ..planning import plan_fan_out
from ..theory import hit_rate, miss_rate, outcome_probabilities, power_law_exponent, tokens_per_round
from .profile import Profile

# What stands for `cache_budget="auto"`, where the run itself decides how many outcomes it prepares.
NOMINAL_BUDGET = 8

# How many observations what is known otherwise is worth where a position was drafted seldom.
WEIGHT = 4.0

# Misses from which on what is drafted after them, and how fast, is taken to be typical.
MIN_MISSES = 8

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


@dataclass(frozen=True)
class Backup:
    """What is drafted just in time, after a miss.

    Args:
        depths: Shares of the misses after which 0, 1, 2, ... positions held draft tokens.
        steps: Mean number of steps that it took.
    """

    depths: tuple[float, ...]
    steps: float

    @classmethod
    def fixed(cls, length: int) -> Backup:
        """The same number of tokens each time, one per step."""
        return cls((*(0.0,) * length, 1.0), length)

    @property
    def depth(self) -> float:
        """Mean number of positions with draft tokens."""
        return sum(depth * share for depth, share in enumerate(self.depths))


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """A pair of models on some hardware. Times are in milliseconds.

    Args:
        verify_base_ms: `a` in `a + b n`, the target's time for `n` tokens.
        verify_token_ms: `b` in it.
        single_ms: Its time for one token, where that is known to differ: other kernels may run then. `None` is `a + b`.
        overhead_ms: The target's bookkeeping per round.
        token_ms: The assistant's time for a token drafted just in time.
        step_ms: Its time for a step ahead with `budget` branches.
        branch_ms: What one more token adds to one of its forwards.
        budget: The cache budget B that `step_ms` belongs to.
        acceptance: Chance to be accepted for each position that may be drafted.
        exponent: `r` in "F prepared bonus tokens miss with probability (1 + F)^-r".
        miss_scale: What misses by that law are multiplied by. 1 unless a run hit more often than the steepest law says,
            because it prepared more than `budget`.
        fan_out_exponent: The `r` that the split of the budget is planned with.
        width: Draft tokens per position: 1 for chains, more for trees.
        depth_per_step: By how many positions a step ahead makes the branch that hits longer. Below 1, since a step runs
            what is likely, not everything.
        draft_length: Tokens drafted while the target waits; `None` takes the number with most tokens per second.
        backup: What a single row drafted just in time, going on as long as its own tokens promised. `None` drafts
            equally much each time, `draft_length`.
    """

    verify_base_ms: float
    verify_token_ms: float
    overhead_ms: float
    token_ms: float
    step_ms: float
    branch_ms: float
    budget: int
    acceptance: tuple[float, ...]
    exponent: float
    miss_scale: float = 1.0
    fan_out_exponent: float = SSDConfig.power_law_exponent
    width: float = 1.0
    depth_per_step: float = 1.0
    draft_length: int | None = None
    backup: Backup | None = None
    single_ms: float | None = None

    @property
    def target_ms(self) -> float:
        """A target forward of one token."""
        return self.verify_ms(1)

    def verify_ms(self, num_tokens: float) -> float:
        if num_tokens <= 1 and self.single_ms is not None:
            return self.single_ms
        return self.verify_base_ms + self.verify_token_ms * num_tokens

    def draft_ms(self, batch_size: int) -> float:
        """Drafting one token for each row."""
        return self.token_ms + self.branch_ms * (batch_size - 1)

    def tree_step_ms(self, batch_size: int, budget: int) -> float:
        """A step ahead with `budget` branches for each row. Never less than a step of a single branch."""
        return max(self.step_ms + self.branch_ms * (batch_size * budget - self.budget), self.token_ms)

    def hit_rate(self, budget: int) -> float:
        """Share of outcomes of a row that `budget` prepared ones hold."""
        return 1.0 - self.miss_scale * (1.0 - hit_rate(*self._fan_out(budget), self.exponent))

    def with_hit_rate(self, measured: float) -> Conditions:
        """The same with the power law that gives a hit rate at `budget`."""
        fan_out = self._fan_out(self.budget)
        exponent = power_law_exponent(measured, *fan_out)
        scale = (1.0 - measured) / (1.0 - hit_rate(*fan_out, exponent))
        return replace(self, exponent=exponent, miss_scale=min(scale, 1.0))

    def _fan_out(self, budget: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Where acceptance may stop in a typical speculation, and how many bonus tokens are prepared for that."""
        length = min(math.ceil(tokens_per_round(self.acceptance)), len(self.acceptance))
        chances = outcome_probabilities(self.acceptance[:length])
        by_rank = [miss_rate(n, self.fan_out_exponent) - miss_rate(n + 1, self.fan_out_exponent) for n in range(budget)]
        return chances, plan_fan_out(SSDConfig(), budget, chances, [by_rank] * len(chances))

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
            verify_base_ms=(self.verify_base_ms + self.verify_token_ms) * target - token_ms,
            verify_token_ms=token_ms,
            single_ms=None if self.single_ms is None else self.single_ms * target,
            overhead_ms=self.overhead_ms * target,
            token_ms=self.token_ms * assistant,
            step_ms=self.step_ms * assistant + (branch_ms - self.branch_ms * assistant) * (self.budget - 1),
            branch_ms=branch_ms,
            acceptance=self.acceptance if changes.acceptance is None else (changes.acceptance,) * len(self.acceptance),
            exponent=changes.power_law or self.exponent,
            miss_scale=self.miss_scale if changes.power_law is None else 1.0,
            # How far a row should draft just in time depends on times and acceptance.
            backup=self.backup if target == assistant == 1.0 and changes.acceptance is None else None,
        )
        return changed if changes.hit_rate is None else changed.with_hit_rate(changes.hit_rate)

    def with_draft_tokens(self, number: int) -> Conditions:
        """The same with `num_assistant_tokens` set to a number; positions that are not known are like the last."""
        acceptance = (*self.acceptance, *self.acceptance[-1:] * number)[:number]
        return replace(self, acceptance=acceptance, draft_length=number, backup=None)


def conditions_of(config: SSDConfig, profiles: Sequence[Profile]) -> Conditions:
    """The conditions of a run.

    Times, and what came of a step, are those of the first profile: two sides that compute at once slow each other down
    where they share cores or memory. Acceptance is pooled over all: it belongs to the pair and the text. How long
    just-in-time drafting goes on is taken from another arm where there is one. So neither speed, tokens per round nor
    waiting of the first arm go in.

    Args:
        config: The settings of the run.
        profiles: Profiles of its arms, all of the same pair and texts, first the one to be predicted.

    Raises:
        ValueError: If there is no draft token in any of them.
    """
    if not any(profile.acceptance for profile in profiles):
        raise ValueError(
            f"A prediction needs a run with draft tokens, but none of the {len(profiles)} profiles has any. "
            'Run `hf-ssd compare --json` with the arms "sd" and "ssd".'
        )
    main, *others = profiles
    # Without misses nothing was drafted just in time, without a hit no step is told from that.
    typical = [p for p in profiles if sum(p.depths_at_miss) >= MIN_MISSES]
    token_ms = next((p.token_ms for p in (*typical, *profiles) if p.token_ms is not None), main.step_ms or 0.0)
    step_ms = token_ms if main.step_ms is None else main.step_ms
    budget = NOMINAL_BUDGET if config.cache_budget == "auto" else config.cache_budget
    conditions = Conditions(
        verify_base_ms=main.verify_base_ms,
        verify_token_ms=main.verify_token_ms,
        single_ms=main.verify_single_ms,
        overhead_ms=main.overhead_ms,
        token_ms=token_ms,
        step_ms=step_ms,
        branch_ms=max(step_ms - token_ms, 0.0) / max(budget - 1, 1),
        budget=budget,
        acceptance=pooled_acceptance(profiles, config.max_draft_tokens),
        exponent=config.power_law_exponent,
        fan_out_exponent=config.power_law_exponent,
        width=main.width,
        depth_per_step=_depth_per_step(main),
        draft_length=None if config.num_assistant_tokens == "auto" else config.num_assistant_tokens,
        backup=next((_backup(p) for p in (*others, main) if p in typical and p.steps_at_miss is not None), None),
    )
    return conditions if main.hit_rate is None else conditions.with_hit_rate(main.hit_rate)


def pooled_acceptance(profiles: Sequence[Profile], num_positions: int) -> tuple[float, ...]:
    """Chance of each draft position to be accepted when all before it were, over several profiles.

    Positions that were drafted seldom lean on the first one.

    Args:
        profiles: At least one, with draft tokens.
        num_positions: How many positions to give.
    """
    accepted, drafted = [0.0] * num_positions, [0.0] * num_positions
    for profile in profiles:
        for position, (rate, number) in enumerate(zip(profile.acceptance, profile.num_drafted, strict=True)):
            if position < num_positions:
                accepted[position] += rate * number
                drafted[position] += number
    typical = accepted[0] / drafted[0]
    rates, before = [], 1.0
    for position in range(num_positions):
        believed = WEIGHT * before * typical
        until = min((accepted[position] + believed) / (drafted[position] + WEIGHT), before)
        rates.append(until / before if before else 0.0)
        before = until
    return tuple(rates)


def _depth_per_step(profile: Profile) -> float:
    depth, steps = profile.depth_at_hit, profile.steps_at_hit
    return min(depth / steps, 1.0) if depth and steps else 1.0


def _backup(profile: Profile) -> Backup:
    num_misses = sum(profile.depths_at_miss)
    return Backup(tuple(number / num_misses for number in profile.depths_at_miss), profile.steps_at_miss or 0.0)


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
        exponent=SSDConfig.power_law_exponent,
    )
    return conditions.changed(assumed)
