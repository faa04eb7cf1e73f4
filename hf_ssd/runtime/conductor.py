"""Carries out what a policy decides while rows are being decoded: another mode, or another assistant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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

    def of_row(self, assistant: int, place: int) -> Speculator:
        """That of an assistant, by its number, for the row at a place among those that are decoded together."""
        ...

    def release(self, assistant: int) -> None:
        """Gives an assistant up that has failed. Its rows have been stopped, and it is not asked for again."""
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
        self._lost: set[int] = set()  # assistants that have failed, and are not given up yet
        self._places: dict[int, int] = {}  # of rows, by index, among those that are decoded together
        self._round_began_s = 0.0

    def begin(self, rows: Sequence[Row], request: RequestMaker) -> tuple[list[Link], list[DraftRequest]]:
        """The links of rows that are decoded together, and what their speculators need."""
        self._request = request
        self._places = {row.index: place for place, row in enumerate(rows)}
        lost = set(self._lost)
        self._tell(self._lose(lost))
        self._release(lost)
        self._policy.begin_row()
        plan = self._policy.plan
        speculators = self._speculators(rows, plan)
        self._crew.set_threads(speculators[0])
        layers = self._crew.feature_layers
        links = [Link(speculator, self._recorder, self._on_degrade, plan, layers) for speculator in speculators]
        return links, [self._request_now(row, plan) for row in rows]

    def _speculators(self, rows: Sequence[Row], plan: Plan) -> list[Speculator | None]:
        """One for each row; none where the plan is to decode plainly."""
        if plan.mode == "ar":
            return [None] * len(rows)
        return [self._crew.of_row(plan.assistant, self._places[row.index]) for row in rows]

    def prefilled(self) -> None:
        """The prompt has been read: the first round begins."""
        self._round_began_s = time.monotonic()

    def after_round(
        self, active: Sequence[tuple[Row, Link]], decisions: Sequence[Decision], stats: Sequence[RoundStats]
    ) -> None:
        """Takes in a round, and lets the rows go on as is best."""
        before, now = self._policy.plan, time.monotonic()
        duration_ms, self._round_began_s = (now - self._round_began_s) * 1e3, now
        lost = set(self._lost)
        if lost:
            self._tell(self._lose(lost))
        else:
            likelihood = _likelihood(decisions) if self._policy.wants_likelihood else None
            self._tell(self._policy.after_round(stats, duration_ms, likelihood))
        is_change = self._policy.plan != before
        if is_change:
            for _, link in active:
                link.stop()  # before another assistant is asked for, which may take a while
        self._release(lost)
        if is_change:
            self._go_on(active, self._policy.plan)

    def _lose(self, lost: Iterable[int]) -> list[Switch]:
        return [switch for assistant in lost for switch in self._policy.lose(assistant)]

    def _release(self, lost: Iterable[int]) -> None:
        for assistant in lost:
            self._crew.release(assistant)
            self._lost.discard(assistant)

    def _tell(self, switches: Sequence[Switch]) -> None:
        for switch in switches:
            logger.info(f"{self._recorder.num_tokens} tokens, {switch}.")
            self._recorder.switch(switch)

    def _go_on(self, active: Sequence[tuple[Row, Link]], plan: Plan) -> None:
        """Takes rows to a plan. They have been stopped."""
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

    def _on_degrade(self, assistant: int) -> None:
        """An assistant has failed: the target has its cores until the round is over."""
        self._lost.add(assistant)
        self._crew.set_threads(None)


def _likelihood(decisions: Sequence[Decision]) -> float:
    """The target's own probability of the tokens that follow, on average. Drafting is easy where it is sure of them."""
    found = [float(decision.logits[0, 0].log_softmax(dim=-1)[decision.tokens[0]].exp()) for decision in decisions]
    return sum(found) / len(found)
