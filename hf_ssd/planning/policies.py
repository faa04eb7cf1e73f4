"""What is done within a call about what its rounds show: one policy of several parts.

Pure: figures of rounds in, decisions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config import SSDConfig
from ..types import Plan, RoundStats, Switch
from .choosing import SETTLING_ROUNDS, PlanChooser, PlanMemory
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
        self._num_rows: int | None = None  # that were decoded together in the round before
        self._num_here = 0  # rounds since the assistant last began to read a row
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
        self._restarted()
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
        num_tokens, before = sum(each.num_emitted for each in stats) / len(stats), self.plan
        self._num_tokens += num_tokens
        self._num_here += 1
        if self.is_done:
            self.plan = Plan("ar")
            is_change = before != self.plan
            return [Switch(before, self.plan, f"{self._token_budget} tokens, the `token_budget`")] if is_change else []
        switch = self._count_rows(len(stats))
        if switch is None and not self._is_stopped:
            switch = self._choose(num_tokens, duration_ms, likelihood)
        if switch is None:
            switch = self._limit(stats, num_tokens, duration_ms)
        self._go_on()
        return [] if switch is None or switch.before == switch.after else [switch]

    def lose(self, assistant: int) -> list[Switch]:
        """Goes on without an assistant that is lost."""
        before, switch = self.plan, self._chooser.drop(assistant)
        self._go_on()
        return [] if switch is None or before == self.plan else [switch]

    def remember(self) -> None:
        """Leaves what was found out to later calls."""
        self._chooser.remember()

    def _go_on(self) -> None:
        before, self.plan = self.plan, self._within_limits(self._chooser.plan)
        if self.plan != before:
            self._restarted()

    def _restarted(self) -> None:
        self._num_here = 0
        self._chooser.restarted()

    def _count_rows(self, num_rows: int) -> Switch | None:
        """Forgets what a round takes where it is of other rows than the one before."""
        before, self._num_rows = self._num_rows, num_rows
        if before in (None, num_rows):
            return None
        self._likelihoods.clear()
        for ladder in (self._latency, self._budget):
            if ladder is not None:
                ladder.forget()
        return self._chooser.rows_changed()

    def _choose(self, num_tokens: float, duration_ms: float, likelihood: float | None) -> Switch | None:
        if likelihood is None:
            self._likelihoods.clear()
        else:
            self._likelihoods.append(likelihood)
        is_known = len(self._likelihoods) == LIKELIHOOD_TOKENS
        mean = sum(self._likelihoods) / LIKELIHOOD_TOKENS if is_known else None
        switch = self._chooser.after_round(num_tokens, duration_ms, mean)
        if switch is not None and switch.after.mode == "ar" and not switch.is_trial and self._latency is not None:
            self._latency.lift()  # drafts are measured whole when they are next tried
        return switch

    def _limit(self, stats: Sequence[RoundStats], num_tokens: float, duration_ms: float) -> Switch | None:
        """Other limits, where home has settled and the round was one that they are about."""
        if self._chooser.is_trying or self._num_here <= SETTLING_ROUNDS[self.plan.mode]:
            return None
        reasons = []
        if self._latency is not None and (self._is_stopped or self.plan.mode != "ar"):
            reasons.append(self._latency.after_round(num_tokens, duration_ms))
        if self._budget is not None and self.plan.mode == "ssd":
            reasons.append(self._budget.after_round(stats, duration_ms))
        told = "; ".join(reason for reason in reasons if reason is not None)
        return Switch(self.plan, self._within_limits(self._chooser.plan), told) if told else None

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
