"""What is done within a call about what its rounds show: one policy of several parts.

Pure: figures of rounds in, decisions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config import SSDConfig
from ..types import Plan, RoundStats, Switch
from .choosing import PlanChooser, PlanMemory
from .ladders import BudgetPolicy, LatencyPolicy

LIKELIHOOD_TOKENS = 16  # that the target's own probability is averaged over


class CallPolicy:
    """Decides after each round how a call goes on: the plan of the chooser, within what limits leave of it.

    Args:
        config: Of the call: `mode`, `sla_ms_per_token`, `token_budget`, and the cache budget.
        num_assistants: That may draft.
        memory: What earlier calls of the kind have shown.
        is_available: Asked before another plan is tried.

    Attributes:
        plan: The plan for the next round.
    """

    def __init__(
        self,
        config: SSDConfig,
        num_assistants: int = 1,
        memory: PlanMemory | None = None,
        is_available: Callable[[Plan], bool] = lambda plan: True,
    ) -> None:
        self._chooser = PlanChooser(plans_for(config, num_assistants), memory, is_available)
        self._latency = (
            None if config.sla_ms_per_token is None else LatencyPolicy(config.sla_ms_per_token, config.max_draft_tokens)
        )
        # Where the mode is given, so is the budget.
        self._budget = BudgetPolicy(config) if config.mode == "auto" else None
        self._token_budget = config.token_budget
        self._num_tokens = 0.0  # of a row
        self._likelihoods: deque[float] = deque(maxlen=LIKELIHOOD_TOKENS)
        self.plan = self._chooser.plan

    @property
    def wants_likelihood(self) -> bool:
        """Whether the target's own probabilities of the next tokens are of use."""
        return self.plan.mode == "ar" and not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether the row's assistant will not be asked any more."""
        return self._token_budget is not None and self._num_tokens >= self._token_budget

    def begin_row(self) -> None:
        """A row begins that is decoded by itself."""
        self._num_tokens = 0.0
        self.plan = self._within_limits(self._chooser.plan)

    def after_round(
        self, stats: Sequence[RoundStats], duration_ms: float, likelihood: float | None = None
    ) -> list[Switch]:
        """Takes in a round.

        Args:
            stats: Of each row that took part.
            duration_ms: From the end of the round before to its own.
            likelihood: The target's probability of the tokens, on average, where it was looked at.

        Returns:
            What was decided. `plan` is what it comes to.
        """
        if self.is_done:
            return []
        num_tokens, before = sum(each.num_emitted for each in stats), self.plan
        self._num_tokens += num_tokens / len(stats)
        if self.is_done:
            self.plan = Plan("ar")
            is_change = before != self.plan
            return [Switch(before, self.plan, f"{self._token_budget} tokens, the `token_budget`")] if is_change else []
        switches = [] if self._is_stopped else self._choose(num_tokens, duration_ms, likelihood)
        for reason in self._limit(stats, num_tokens / len(stats), duration_ms):
            switches.append(Switch(before, self._within_limits(self._chooser.plan), reason))
        self.plan = self._within_limits(self._chooser.plan)
        return switches

    def lose(self, assistant: int) -> list[Switch]:
        """Goes on without an assistant that is lost."""
        switch = self._chooser.drop(assistant)
        before, self.plan = self.plan, self._within_limits(self._chooser.plan)
        return [] if switch is None or before == self.plan else [switch]

    def remember(self) -> None:
        """Leaves what was found out to later calls."""
        self._chooser.remember()

    def _choose(self, num_tokens: int, duration_ms: float, likelihood: float | None) -> list[Switch]:
        if likelihood is None:
            self._likelihoods.clear()
        else:
            self._likelihoods.append(likelihood)
        is_known = len(self._likelihoods) == LIKELIHOOD_TOKENS
        mean = sum(self._likelihoods) / LIKELIHOOD_TOKENS if is_known else None
        switch = self._chooser.after_round(num_tokens, duration_ms, mean)
        return [] if switch is None else [switch]

    def _limit(self, stats: Sequence[RoundStats], tokens_per_row: float, duration_ms: float) -> list[str]:
        """Why limits are others now, as far as they are."""
        reasons = []
        if self._latency is not None:
            reasons.append(self._latency.after_round(tokens_per_row, duration_ms))
        if self._budget is not None and self.plan.mode == "ssd" and not self._chooser.is_trying:
            reasons.append(self._budget.after_round(stats, duration_ms))
        return [reason for reason in reasons if reason is not None]

    @property
    def _is_stopped(self) -> bool:
        """Whether tokens take so long that nothing is drafted."""
        return self._latency is not None and self._latency.limit == 0

    def _within_limits(self, plan: Plan) -> Plan:
        if plan.mode == "ar":
            return plan
        if self.is_done or self._is_stopped:
            return Plan("ar")
        limit = None if self._latency is None else self._latency.limit
        budget = None if self._budget is None or plan.mode != "ssd" else self._budget.budget
        return replace(plan, max_draft_tokens=limit, cache_budget=budget)


def plans_for(config: SSDConfig, num_assistants: int) -> list[Plan]:
    """What a call may choose from, the first being where it begins."""
    if config.mode != "auto":
        return [Plan(config.mode, assistant) for assistant in range(num_assistants)]
    drafting = [Plan("ssd", assistant) for assistant in range(num_assistants)]
    return [*drafting, Plan("ar"), *(Plan("sd", assistant) for assistant in range(num_assistants))]


def needs_policy(config: SSDConfig, num_assistants: int) -> bool:
    """Whether anything can change within a call."""
    if config.mode == "ar" or not num_assistants:
        return False
    has_limits = config.sla_ms_per_token is not None or config.token_budget is not None
    return config.mode == "auto" or num_assistants > 1 or has_limits
