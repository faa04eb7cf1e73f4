"""Speculating less, step by step, while a figure is out of bounds. Pure: figures of rounds in, decisions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from ..config import SSDConfig
from ..types import Origin, RoundStats
from .costs import RoundCosts

Level = TypeVar("Level")


class Ladder(Generic[Level]):
    """Levels from what the settings allow down to the least, of which one is in force.

    Going down is on trial: where tokens take longer after it than before, it goes up again, and next time not for twice
    as many rounds. At the lowest level it turns round: after the hold it goes up on trial, as far as that makes tokens
    faster.

    Args:
        levels: From the top down.
        num_rounds: Before a level is judged.
    """

    FIRST_HOLD, MAX_HOLD = 64, 1024  # rounds
    MARGIN = 0.04  # by which going up on trial has to make tokens faster

    def __init__(self, levels: Sequence[Level], num_rounds: int = 16) -> None:
        self._levels = levels
        self._index = 0
        self._costs = RoundCosts(num_rounds)
        self._num_rounds = num_rounds
        self._step = 1  # that is tried next: down, or up again from the lowest level
        self._before: tuple[int, float] | None = None  # the level that a trial began from, and its time per token
        self._hold, self._num_held = self.FIRST_HOLD, self.FIRST_HOLD

    @property
    def level(self) -> Level:
        """What is in force."""
        return self._levels[self._index]

    @property
    def ms_per_token(self) -> float | None:
        """Over the latest rounds on this level; `None` until there are enough."""
        cost = self._costs.cost()
        return cost.ms_per_token if cost is not None and len(self._costs) == self._num_rounds else None

    def add(self, num_tokens: float, duration_ms: float) -> None:
        """Takes in a round."""
        self._costs.add(num_tokens, duration_ms)
        self._num_held += 1

    def reconsider(self) -> str | None:
        """Goes back where a trial has made tokens slower. Returns why, if it did."""
        now = self.ms_per_token
        if now is None or self._before is None:
            return None
        (index, before), self._before = self._before, None
        is_lower = self._index > index
        if now <= (before if is_lower else before * (1.0 - self.MARGIN)):
            return None
        self._hold = min(2 * self._hold, self.MAX_HOLD)
        self._go_to(index, 1)
        self._num_held = 0
        return f"{'less' if is_lower else 'more'} did not help: {now:.1f} instead of {before:.1f} ms per token"

    def try_next(self) -> bool:
        """Goes to the next level on trial, if there is one and it is time. Returns whether it did."""
        if len(self._levels) == 1 or self._num_held < self._hold:
            return False
        now = self.ms_per_token
        self._before = None if now is None else (self._index, now)
        self._go_to(self._index + self._step, self._step)
        return True

    def up(self) -> bool:
        """Goes up a level, if there is one and it is time. Returns whether it did."""
        if not self._index or self._num_held < self._hold:
            return False
        self._before = None
        self._go_to(self._index - 1, 1)
        self._num_held = 0
        return True

    def lift(self) -> None:
        """Goes to the top: what was found out is of no use any more."""
        self.forget()
        self._go_to(0, 1)

    def forget(self) -> None:
        """Forgets what rounds took. The level stays."""
        self._before = None
        self._costs.clear()

    def _go_to(self, index: int, step: int) -> None:
        """Goes to a level, and from there, in time, by this step. At both ends the way turns, after the hold."""
        self._index, self._step = index, step
        if index == 0 or index + 1 == len(self._levels):
            self._step, self._num_held = 1 if index == 0 else -1, 0
        self._costs.clear()


class LatencyPolicy:
    """Fewer draft tokens per round, and none at last, while tokens take longer than they may.

    Measured is the time of the latest 16 rounds, with all that belongs to them, per token of a row. The limit is raised
    again when tokens take less than four fifths of what they may, and from time to time where nothing is drafted.

    Args:
        target_ms: Most milliseconds that a token may take.
        most: Draft tokens that the settings allow.
    """

    WELL_BELOW = 0.8  # of the target

    def __init__(self, target_ms: float, most: int) -> None:
        self._target_ms = target_ms
        self._ladder = Ladder[int | None]([None, *(limit for limit in (8, 4, 2, 1) if limit < most), 0])

    @property
    def limit(self) -> int | None:
        """Most draft tokens in one speculation; `None` for what the settings allow, 0 for plain decoding."""
        return self._ladder.level

    def after_round(self, tokens_per_row: float, duration_ms: float) -> str | None:
        """Takes in a round with this limit. Returns why the limit is another now, if it is."""
        self._ladder.add(tokens_per_row, duration_ms)
        now = self._ladder.ms_per_token
        if now is None:
            return None
        reason = self._ladder.reconsider()
        is_above, is_well_below = now > self._target_ms, now < self.WELL_BELOW * self._target_ms
        if reason is None and ((is_above and self._ladder.try_next()) or (is_well_below and self._ladder.up())):
            return f"{now:.1f} ms per token, where {self._target_ms:g} are allowed"
        return reason

    def lift(self) -> None:
        """Sets no limit any more, until tokens take longer again."""
        self._ladder.lift()

    def forget(self) -> None:
        """Forgets what rounds took. The limit stays."""
        self._ladder.forget()


class BudgetPolicy:
    """Another cache budget while too few outcomes hit, where the settings give one.

    Below the floor the budget goes to the likeliest single outcomes, whatever the fan-out was to be; then it is halved,
    so that what is prepared is prepared deeper. At the target it goes back. With `cache_budget="auto"` there is nothing
    to do: the planner prepares an outcome when its chance is worth the time.

    Args:
        config: `cache_budget` and `fan_out` are read.
    """

    FLOOR, TARGET = 0.5, 0.7  # of the hit rate
    NUM_LOOKED_UP = 32  # outcomes that it is over

    def __init__(self, config: SSDConfig) -> None:
        budget = sum(config.fan_out) if isinstance(config.fan_out, tuple) else config.cache_budget
        levels: list[int | None] = [None]
        if isinstance(budget, int):
            first = budget if config.fan_out != "per_instance" else budget // 2
            levels += [first // 2**step for step in range(4) if first // 2**step >= 2]
        self._ladder = Ladder(levels, self.NUM_LOOKED_UP)
        self._hits: deque[bool] = deque(maxlen=self.NUM_LOOKED_UP)

    @property
    def budget(self) -> int | None:
        """Outcomes to prepare, by their chances; `None` for what the settings say."""
        return self._ladder.level

    def after_round(self, stats: Sequence[RoundStats], duration_ms: float) -> str | None:
        """Takes in a round. Returns why the budget is another now, if it is."""
        self._hits += [each.origin is Origin.CACHE for each in stats if each.miss or each.origin is Origin.CACHE]
        self._ladder.add(sum(each.num_emitted for each in stats) / len(stats), duration_ms)
        if len(self._hits) < self.NUM_LOOKED_UP:
            return None
        rate = sum(self._hits) / len(self._hits)
        reason = self._ladder.reconsider()
        is_low, is_high = rate < self.FLOOR, rate >= self.TARGET
        if reason is None and ((is_low and self._ladder.try_next()) or (is_high and self._ladder.up())):
            reason = f"the hit rate is {rate:.2f}"
        if reason is not None:
            self._hits.clear()
        return reason

    def forget(self) -> None:
        """Forgets what rounds took. The budget stays."""
        self._ladder.forget()
