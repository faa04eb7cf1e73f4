"""The trunk: a row as the assistant reads it, and the cache that holds it, branches of the draft tree behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from ..kv_cache import keep_branch
from ..protocol import DraftRequest
from .assistant import AssistantModel, Forward
from .draft_tree import Node
from .reading import Reading, make_reading
from .together import Work

MAX_ROOM, MIN_ROOM = 4, 8192  # entries per token of a row, and at least, in a cache that is used again


class Trunk:
    """What the assistant reads of a row, and which part of that it has run.

    The cache holds the first `num_cached` tokens of the reading, and after them the nodes of the draft tree that have
    been run, in the slots that these name.

    Args:
        assistant: The model that drafts.

    Attributes:
        needs_parents: Whether a node can be run only once its parent has been, and not in the same forward.
        is_provisional: Whether some of the tokens in the cache have to be run once more.
        reading: The row in the assistant's tokens.
        cache: The assistant's.
        num_cached: Tokens of the reading that are in it.
    """

    needs_parents = False
    is_provisional = False

    def __init__(self, assistant: AssistantModel) -> None:
        self.assistant = assistant
        self.reading = Reading([])
        self.cache = assistant.new_cache()
        self.num_cached = 0
        self._num_row = 0

    def begin(self, request: DraftRequest) -> None:
        """Becomes the first tokens of what the assistant reads of the prompt, as far as the cache knows that."""
        row = request.read_ids
        before, self.reading = self.reading, make_reading(row, request.translation)
        self._num_row = len(row)
        read = self.reading.tokens
        # Never all of them: the last is to be run.
        self.num_cached = min(self.num_cached, num_common(before.tokens, read), max(len(read) - 1, 0))
        room = max(MAX_ROOM * len(read), MIN_ROOM)
        is_of_use = request.encoder is None and self.cache.capacity <= room and self.assistant.runs_on(self.cache)
        if not self.num_cached or not is_of_use:
            self.num_cached = 0
            self.cache = self.assistant.new_cache(request.encoder)
        keep_branch(self.cache, self.num_cached, [])

    def learn(self, features: torch.Tensor | None) -> None:
        """Takes what an outcome brings of the target's layers, before its tokens are appended."""

    def append(self, tokens: Sequence[int], path: Sequence[Node], kept: Sequence[Node] | None) -> None:
        """Appends tokens to the row, and keeps of the cache what is still right.

        Effects: the nodes in `kept` get other slots.

        Args:
            tokens: What the row got.
            path: The nodes of these tokens, as far as there are any.
            kept: Nodes that have been run after them, where the last token is a node too. Otherwise `None`: it is to be
                run, and nothing is known after it.
        """
        run = [node for node in path if node.slot is not None]
        num_known = self.reading.extend(tokens, len(run))
        self._num_row += len(tokens)
        if kept is None:
            # Some of the row's end may be read anew now; its last token always is, for what follows it.
            num_known = self._num_usable(max(min(num_known, self.num_read - 1), 0))
            run = run[: max(num_known - self.num_cached, 0)]
            self.num_cached = min(self.num_cached, num_known)
        kept = sorted(kept or (), key=_slot)
        keep_branch(self.cache, self.num_cached, [_slot(node) for node in (*run, *kept)])
        self.num_cached += len(run)
        for i, node in enumerate(kept):
            node.slot = self.num_cached + i

    def read(self, nodes: Sequence[Node] = ()) -> Work[torch.Tensor]:
        """Runs the tokens of the row that the cache lacks, and after them a chain of nodes.

        Returns:
            Hidden states of the row's last token and of the nodes, of shape `(1 + len(nodes), hidden_size)`.
        """
        pending = self.pending
        hidden = yield Forward([*pending, *self._read(nodes)], self.cache, num_hidden=1 + len(nodes))
        self.num_cached += len(pending)
        for i, node in enumerate(nodes):
            node.slot = self.num_cached + i
        return hidden

    def run(self, nodes: Sequence[Node]) -> Work[torch.Tensor]:
        """Runs nodes whose ancestors have been run, or are among them.

        Returns:
            Their hidden states, of shape `(len(nodes), hidden_size)`.
        """
        first_slot = self.cache.get_seq_length()
        visible = []
        for i, node in enumerate(nodes):
            node.slot = first_slot + i
            visible.append((self.num_cached, [each.slot for each in node.path() if each.slot is not None]))
        positions = [node.position + self.shift for node in nodes]
        mask = None
        if len(nodes) > 1 or len(visible[0][1]) != first_slot + 1 - self.num_cached:
            mask = self.assistant.mask.build(
                num_trunk=self.num_cached, num_slots=first_slot + len(nodes), visible=visible, positions=positions
            )
        return (yield Forward(self._read(nodes), self.cache, positions, mask, states=self._states(nodes)))

    @property
    def pending(self) -> list[int]:
        """The assistant's tokens of the row that `read` would run."""
        return self.reading.tokens[self.num_cached :]

    @property
    def num_read(self) -> int:
        """Tokens of the row as the assistant reads it."""
        return len(self.reading.tokens)

    @property
    def num_branch_slots(self) -> int:
        """Nodes that are in the cache."""
        return self.cache.get_seq_length() - self.num_cached

    @property
    def shift(self) -> int:
        """How many tokens longer the row is for the assistant."""
        return self.num_read - self._num_row

    def is_readable(self, node: Node) -> bool:
        """Whether the assistant has the token of `node`, and of those before it that have not been run."""
        if node.parent is None or node.is_run:
            return True
        return self.reading.token(node.token) is not None and self.is_readable(node.parent)

    def _num_usable(self, num_known: int) -> int:
        """How many of the first tokens of the reading, whose entries are as they were, may stay in the cache."""
        return num_known

    def _states(self, nodes: Sequence[Node]) -> torch.Tensor | None:
        """What goes into a forward of nodes beside their tokens."""
        return None

    def _read(self, nodes: Sequence[Node]) -> list[int]:
        """The assistant's tokens of nodes that are readable."""
        return [token for node in nodes if (token := self.reading.token(node.token)) is not None]


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """With how many of the same tokens two rows begin."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _slot(node: Node) -> int:
    assert node.slot is not None
    return node.slot
