"""Carries out what a policy decides while rows are being decoded: another mode, or another assistant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from transformers.utils import logging

from ..planning import CallPolicy
from ..protocol import DraftRequest, Speculator
from ..recorder import Recorder
from ..row import Decision, Link, Row
from ..types import Plan, RoundStats, Switch

logger = logging.get_logger(__name__)

RequestMaker = Callable[[Row, int], DraftRequest]  # for a row, and an assistant by its number


class Crew(Protocol):
    """Assistants and cores. An assistant that is never asked for costs nothing.

    Attributes:
        feature_layers: Which of the target's states each assistant reads.
    """

    feature_layers: Sequence[tuple[int, ...]]

    def of_row(self, assistant: int, row: int) -> Speculator:
        """That of an assistant, by its number, for a row of that index."""
        ...

    def set_threads(self, speculator: Speculator | None) -> None:
        """Leaves the target what the assistant leaves it, or everything."""
        ...


class PolicyConductor:
    """Asks the policy after each round, and takes the rows from one plan to the next.

    To leave an assistant is to end its row: it then sleeps, and the target has its cores. To come back is to begin a
    row whose prompt is all that there is by now. The assistant knows its first part, reads the rest in one forward, and
    meanwhile the target goes on by one token. So a switch changes nothing about what is verified, or how.

    Args:
        policy: Decides.
        recorder: Takes down the switches.
        crew: Assistants and cores.
    """

    def __init__(self, policy: CallPolicy, recorder: Recorder, crew: Crew) -> None:
        self._policy = policy
        self._recorder = recorder
        self._crew = crew
        self._has_lost = False
        self._round_began_s = 0.0

    def begin(self, rows: Sequence[Row], request: RequestMaker) -> tuple[list[Link], list[DraftRequest]]:
        """The links of rows that are decoded together, and what their speculators need."""
        self._request = request
        self._policy.begin_row()
        self._has_lost = False
        plan = self._policy.plan
        speculators = self._speculators(rows, plan)
        self._crew.set_threads(speculators[0])
        layers = self._crew.feature_layers
        links = [Link(speculator, self._recorder, self._lost, plan, layers) for speculator in speculators]
        return links, [self._request_now(row, plan) for row in rows]

    def _speculators(self, rows: Sequence[Row], plan: Plan) -> list[Speculator | None]:
        """One for each row; none where the plan is to decode plainly."""
        return [None if plan.mode == "ar" else self._crew.of_row(plan.assistant, row.index) for row in rows]

    def prefilled(self) -> None:
        """The prompt has been read: the first round begins."""
        self._round_began_s = time.monotonic()

    def after_round(
        self, active: Sequence[tuple[Row, Link]], decisions: Sequence[Decision], stats: Sequence[RoundStats]
    ) -> None:
        """Takes in a round, and lets the rows go on as is best."""
        before, now = self._policy.plan, time.monotonic()
        duration_ms, self._round_began_s = (now - self._round_began_s) * 1e3, now
        switches: list[Switch] = []
        if self._has_lost:
            self._has_lost = False
            switches = self._policy.lose(before.assistant)
        else:
            likelihood = _likelihood(decisions) if self._policy.wants_likelihood else None
            switches = self._policy.after_round(stats, duration_ms, likelihood)
        for switch in switches:
            logger.info(f"{self._recorder.num_tokens} tokens, {switch}.")
            self._recorder.switch(switch)
        if self._policy.plan != before:
            self._go_on(active, self._policy.plan)

    def _go_on(self, active: Sequence[tuple[Row, Link]], plan: Plan) -> None:
        """Takes rows to a plan."""
        for _, link in active:
            link.stop()  # before another assistant is asked for, which may take a while
        speculators = self._speculators([row for row, _ in active], plan)
        self._crew.set_threads(speculators[0])
        for (row, link), speculator in zip(active, speculators, strict=True):
            link.switch(plan, speculator, None if speculator is None else self._request_now(row, plan))

    def _request_now(self, row: Row, plan: Plan) -> DraftRequest:
        """What an assistant needs to go on with a row from where it is."""
        request = self._request(row, plan.assistant)
        config = replace(request.config, mode="ssd" if plan.mode == "ar" else plan.mode)
        if plan.max_draft_tokens is not None:
            most = min(plan.max_draft_tokens, config.max_draft_tokens)
            tree = min(config.max_tree_tokens, 2 * most) or None
            config = replace(config, num_assistant_tokens=most, draft_tree_size=tree)
        if plan.cache_budget is not None:
            config = replace(config, cache_budget=plan.cache_budget, fan_out="per_instance")
        return replace(
            request,
            prompt_ids=tuple(row.input_ids[0].tolist()),
            max_new_tokens=row.config.max_length - row.input_ids.shape[1],
            config=config,
        )

    def _lost(self) -> None:
        """An assistant has failed: the target has its cores until the round is over."""
        self._has_lost = True
        self._crew.set_threads(None)


def _likelihood(decisions: Sequence[Decision]) -> float:
    """The target's own probability of the tokens that follow, on average. Drafting is easy where it is sure of them."""
    found = [float(decision.logits[0, 0].log_softmax(dim=-1)[decision.tokens[0]].exp()) for decision in decisions]
    return sum(found) / len(found)
