"""Which verification outcomes are prepared for: bonus tokens after the nodes of a speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import SSDConfig
from ..planning import AcceptanceEstimate, Calibration, Event, plan_fan_out
from ..theory import outcome_probabilities
from .draft_tree import Node
from .proposer import Candidate

NUM_CANDIDATES = 16  # bonus tokens considered after each node, where no number is planned
MIN_STOP_CHANCE = 0.01  # nodes where acceptance stops more rarely are not looked at
DEFAULT_BUDGET = 8  # of a fan-out that needs a budget, where none is given
TYPICAL_LENGTH = 5  # of a chain
# Chances of the first, second, ... candidate where a node's own are not known yet: the power law with r = 0.8.
TYPICAL_CHANCES = tuple((rank + 1) ** -0.8 - (rank + 2) ** -0.8 for rank in range(NUM_CANDIDATES))


class OutcomeRanker:
    """Turns the assistant's word about bonus tokens into nodes with chances.

    Args:
        config: `fan_out` and `cache_budget` are read.
        calibration: What the assistant's probabilities have turned out to mean.
        acceptance: What draft positions have turned out to be accepted.
    """

    def __init__(self, config: SSDConfig, calibration: Calibration, acceptance: AcceptanceEstimate) -> None:
        self._config = config
        self._calibration = calibration
        self._acceptance = acceptance

    def due(self, root: Node, sent: Sequence[Node]) -> list[Node]:
        """The nodes of the speculation, the root included, that have been run but whose bonus tokens are not ranked."""
        return [
            node
            for node in (root, *sent)
            if node.is_run and not node.is_ranked and (_stop_chance(node) >= MIN_STOP_CHANCE or node.num_planned)
        ]

    def plan(self, root: Node, sent: Sequence[Node], ranked: Mapping[Node, Sequence[Candidate]] | None = None) -> None:
        """Splits the cache budget over the nodes. Without one, chances decide, step by step.

        Args:
            root: Where the speculation begins.
            sent: Its nodes.
            ranked: The bonus tokens after some of them, which the per-instance fan-out goes by. Of the others it
                assumes what is typical.
        """
        budget = self._config.cache_budget
        if self._config.fan_out == "per_instance" and budget == "auto":
            return
        nodes = [root, *sent]
        depths = [node.position - root.position for node in nodes]
        stop_chances = [_stop_chance(node) for node in nodes]
        if self._config.fan_out == "geometric":
            stop_chances = self._by_depth(depths, stop_chances)
        ranked = ranked or {}
        candidate_chances = [
            self._calibration.chances(_event(node), [candidate.probability for candidate in ranked[node]])
            if node in ranked
            else TYPICAL_CHANCES
            for node in nodes
        ]
        budget = DEFAULT_BUDGET if budget == "auto" else budget
        fan_out = plan_fan_out(self._config, budget, stop_chances, candidate_chances, depths)
        for node, count in zip(nodes, fan_out, strict=True):
            node.num_planned = count

    def expected_fan_out(self) -> tuple[int, ...]:
        """How many bonus tokens are likely to be prepared after 0, 1, 2, ... accepted draft tokens of a chain."""
        budget = self._config.cache_budget
        num_tokens = min(self._config.max_draft_tokens, TYPICAL_LENGTH)
        stop_chances = outcome_probabilities(self._acceptance(num_tokens))
        return plan_fan_out(
            self._config,
            DEFAULT_BUDGET if budget == "auto" else budget,
            stop_chances,
            [TYPICAL_CHANCES] * len(stop_chances),
        )

    def num_candidates(self, nodes: Sequence[Node]) -> int:
        """How many bonus tokens to look at after each of `nodes`."""
        budget = self._config.cache_budget
        least = max(NUM_CANDIDATES, 0 if budget == "auto" or self._config.fan_out != "per_instance" else budget)
        return max(least, *(node.num_planned or 0 for node in nodes))

    def add(self, node: Node, candidates: Sequence[Candidate]) -> list[Node]:
        """Adds bonus tokens after `node`. What had been prepared for one of them stays.

        Returns:
            The new nodes.
        """
        node.is_ranked = True
        event = _event(node)
        stop_chance = _stop_chance(node)
        known = {child.token: child for child in node.children if not child.is_sent}
        new = []
        for rank, candidate in enumerate(candidates[: node.num_planned]):
            chance = stop_chance * self._calibration(event, candidate.probability)
            child = known.pop(candidate.token, None)
            if child is None:
                child = Node(candidate.token, node, node.position + 1)
                node.children.append(child)
                new.append(child)
            child.set_chance(chance)
            child.confidence, child.event = candidate.probability, event
            child.is_planned = node.num_planned is not None and rank < node.num_planned
        if node.num_planned is not None:
            # A budget is a budget.
            node.children = [child for child in node.children if child.token not in known or child.is_sent]
        return new

    def _by_depth(self, depths: Sequence[int], stop_chances: Sequence[float]) -> list[float]:
        """The chance to stop at each node by what its depth has shown, shared among the nodes of a depth."""
        of_depth = outcome_probabilities(self._acceptance(max(depths)))
        totals = [
            sum(c for d, c in zip(depths, stop_chances, strict=True) if d == depth) for depth in range(len(of_depth))
        ]
        return [
            of_depth[depth] * chance / totals[depth] if totals[depth] > 0 else 0.0
            for depth, chance in zip(depths, stop_chances, strict=True)
        ]


def _event(node: Node) -> Event:
    """What a bonus token after `node` is."""
    return Event.REPLACED if node.sent_children else Event.APPENDED


def _stop_chance(node: Node) -> float:
    """The chance that acceptance stops at `node`."""
    return max(node.chance - sum(child.chance for child in node.sent_children), 0.0)
