"""The draft tree: what may follow a row, as far as the assistant has thought ahead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ..planning import Event
from .proposer import DraftDistribution


@dataclass(eq=False, slots=True)
class Node:
    """A token that may follow. The root is the last token of the row.

    Args:
        token: Token id.
        parent: The node before it, `None` for the root.
        position: Its place in the row, padding not counted.
        chance: Estimated probability that the target's text goes through it, given the row.
        confidence: The assistant's probability of the token after its parent.
        event: What has to happen for the text to go through it once its parent is reached.
        match: Strength of the match, where the token also followed earlier in the text.
        num_drafted: Draft tokens up to it, itself included, since the latest bonus token; 0 for a bonus token.
        distribution: What a drafted token was drawn from; `None` under greedy drafting.
        slot: Where its keys are in the assistant's cache, once it has been run.
        hidden: The assistant's hidden state after it, once it has been run.
        is_sent: Whether it belongs to the speculation that is being verified.
        is_ranked: Whether its bonus tokens have been ranked.
        num_planned: Bonus tokens to prepare after it; `None` leaves that to their chances.
        is_planned: Whether it is one of these.
        children: Nodes that may follow it.
    """

    token: int
    parent: Node | None
    position: int
    chance: float = 1.0
    confidence: float = 1.0
    event: Event = Event.ACCEPTED
    match: float | None = None
    num_drafted: int = 0
    distribution: DraftDistribution | None = None
    slot: int | None = None
    hidden: torch.Tensor | None = None
    is_sent: bool = False
    is_ranked: bool = False
    num_planned: int | None = None
    is_planned: bool = False
    children: list[Node] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        return self.hidden is not None

    @property
    def is_copied(self) -> bool:
        """Whether it was copied, without the assistant's word."""
        return self.event in (Event.COPIED, Event.BORROWED)

    @property
    def is_draft(self) -> bool:
        """Whether it was drafted, rather than guessed as a bonus token."""
        return self.num_drafted > 0

    def set_chance(self, chance: float) -> None:
        """Changes the chance, and those below it in proportion."""
        if self.chance > 0 and self.children:
            for node in self.descendants():
                node.chance *= chance / self.chance
        self.chance = chance

    @property
    def sent_children(self) -> list[Node]:
        return [child for child in self.children if child.is_sent]

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def descendants(self) -> Iterator[Node]:
        """All nodes below this one, parents before children."""
        pending = list(self.children)
        while pending:
            node = pending.pop()
            yield node
            pending += node.children

    def child(self, token: int) -> Node | None:
        """The child with this token that is not being verified."""
        return next((child for child in self.children if child.token == token and not child.is_sent), None)


def make_root(node: Node) -> None:
    """Cuts `node` off from what came before it: chances below it are given that it is reached."""
    scale = max(node.chance, 1e-12)
    for each in node.descendants():
        each.chance = min(each.chance / scale, 1.0)
    node.parent = None
    node.chance = 1.0
    node.num_drafted = 0


def become_bonus(node: Node) -> None:
    """Counts draft tokens anew from `node`: it was drafted, but not sent, so it can only come as a bonus token."""
    shift = node.num_drafted
    for each in (node, *node.descendants()):
        each.num_drafted -= shift


def likeliest_first(root: Node, is_worth: Callable[[Node, int], bool]) -> list[Node]:
    """The drafted nodes below `root` with the highest chances, a tree with parents before children.

    Args:
        root: Where to start; not part of the result.
        is_worth: Whether to take one more node, given that node and how many there are. The likeliest node that is
            left is asked about; what follows one that is left out is left out too.
    """
    chosen: list[Node] = []
    number = 0  # ties go to the older node
    heap: list[tuple[float, int, Node]] = []
    nodes = root.children
    while True:
        for node in nodes:
            if node.is_draft:
                heapq.heappush(heap, (-node.chance, number, node))
                number += 1
        if not heap:
            return chosen
        node = heapq.heappop(heap)[2]
        nodes = []
        if is_worth(node, len(chosen)):
            chosen.append(node)
            nodes = node.children
