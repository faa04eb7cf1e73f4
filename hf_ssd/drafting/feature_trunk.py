"""The trunk of an EAGLE-3 head: made of the target's features, as soon as these are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kv_cache import keep_branch
from ..protocol import DraftRequest
from .assistant import AssistantModel, Forward
from .draft_tree import Node
from .eagle3 import Eagle3Assistant
from .reading import Reading
from .together import Work
from .trunk import Trunk, num_common


class FeatureTrunk(Trunk):
    """What an EAGLE-3 head reads of a row.

    The slot of a token holds what the head made of it and of the target's features of the token *before*. So the row's
    first token has no slot, and the reading begins with the second. Nothing can be read before the prefill's outcome
    brings the features of the prompt.

    Nodes of the draft tree are run on the head's own states. A hit makes some of them part of the row. Their entries
    are *provisional* until `read` has run these tokens once more, all in one forward, on the features that came with
    the outcome, and has put the new entries in their place. Nodes after them stay as they are: in a single layer, keys
    and values of a token depend on its own inputs only.

    ```
    cache:  The cat sat │ on the mat │ It ─ purred        a hit: "on the" were drafted, "mat" was prepared for
    read:   The cat sat │ on'the'mat'│ It ─ purred        the same, extended
            target's features             the head's own states
    ```

    Args:
        assistant: The head.
    """

    assistant: Eagle3Assistant
    needs_parents = True

    def __init__(self, assistant: Eagle3Assistant) -> None:
        super().__init__(assistant)
        self._row: list[int] = []
        self._first = 1  # place in the row where the reading begins
        self._num_true = 0  # tokens of the reading whose entries are made of the target's features
        self._features: list[torch.Tensor] = []  # of the tokens before those that come after these

    def begin(self, request: DraftRequest) -> None:
        """Keeps what is right for the prompt too. Which tokens are read is known when their features are."""
        num_common_tokens = num_common(self._row, request.read_ids)
        self._row = request.read_ids
        self._num_row = len(self._row)
        self.reading = Reading([])
        self.reading.is_waiting = True
        if num_common_tokens < self._first:  # a late beginning was that of another row
            self._first, self._features = 1, []
            self._crop(0)
            return
        num_kept = min(self._num_true, num_common_tokens - self._first)
        # Features are of the token before: there may be one more of them.
        num_pending = num_common_tokens + 1 - self._first - num_kept if num_kept == self._num_true else 0
        self._features = [torch.cat(self._features)[:num_pending]] if self._features and num_pending else []
        self._crop(num_kept)

    def learn(self, features: torch.Tensor | None) -> None:
        """Takes the target's features of the tokens that its latest forward read and that belong to the row.

        Args:
            features: Of shape `(num_tokens, feature_size)`, those of the token before the latest last.

        Raises:
            ValueError: If there are none.
        """
        if features is None:
            raise ValueError("The outcome must bring the target's features for an EAGLE-3 head, but got None.")
        if self.reading.is_waiting:
            features = self._features_of_prompt(features)
            self.reading.tokens = self._row[self._first :]
            self.reading.is_waiting = False
        limit = self.assistant.max_length
        if limit is not None and self.num_read >= limit:
            self._features = []  # with one more token there is no position left: nothing of the row is read any more
        else:
            self._features.append(features)

    def _features_of_prompt(self, features: torch.Tensor) -> torch.Tensor:
        """Decides where the reading begins. Returns those features that are not known yet.

        Where the target has read the end of the prompt only (the caller's cache holds the rest, or the row has been
        decoded plainly meanwhile), the trunk goes on if it reaches so far; otherwise the reading begins there.
        """
        num_prompt, num_told = len(self._row), len(features)
        num_known = self._first - 1 + self._num_true + sum(map(len, self._features))
        if num_told < num_prompt and num_prompt - num_told <= num_known:
            return features[num_told - (num_prompt - num_known) :]
        self._first = num_prompt + 1 - num_told
        self._features = []
        self._crop(0)
        return features

    def append(self, tokens: Sequence[int], path: Sequence[Node], kept: Sequence[Node] | None) -> None:
        super().append(tokens, path, kept)
        self._row += tokens

    def _crop(self, num_kept: int) -> None:
        """Drops nodes, and all but the first tokens."""
        self.num_cached = self._num_true = num_kept
        if num_kept:
            keep_branch(self.cache, num_kept, [])
        else:
            self.cache = self.assistant.new_cache()

    def read(self, nodes: Sequence[Node] = ()) -> Work[torch.Tensor]:
        """Runs the tokens of the row that are not in the cache, or there provisionally, on the target's features.

        Effects: what is provisional in the cache is replaced; nodes keep their slots.
        """
        assert not nodes, "they take what this forward gives"
        pending, first_slot = self.pending, self.cache.get_seq_length()
        branch = range(self.num_cached, first_slot)
        states = self.assistant.fuse(torch.cat(self._features))
        positions = mask = None
        if first_slot > self._num_true:
            positions = range(self._num_true, self.num_read)
            mask = self.assistant.mask.build(
                num_trunk=self._num_true,
                num_slots=first_slot + len(pending),
                visible=[(self._num_true, range(first_slot, first_slot + i + 1)) for i in range(len(pending))],
                positions=positions,
            )
        hidden = yield Forward(pending, self.cache, positions, mask, num_hidden=1, states=states)
        keep_branch(self.cache, self._num_true, [*range(first_slot, first_slot + len(pending)), *branch])
        self.num_cached = self._num_true = self.num_read
        self._features = []
        return hidden

    @property
    def is_provisional(self) -> bool:  # type: ignore[override]
        return self._num_true < self.num_cached

    @property
    def pending(self) -> list[int]:
        return self.reading.tokens[self._num_true :]

    def _num_usable(self, num_known: int) -> int:
        return min(num_known, self._num_true)

    def _states(self, nodes: Sequence[Node]) -> torch.Tensor:
        return torch.stack([node.parent.hidden for node in nodes if node.parent and node.parent.hidden is not None])


def make_trunk(assistant: AssistantModel) -> Trunk:
    """The trunk that an assistant needs."""
    return FeatureTrunk(assistant) if isinstance(assistant, Eagle3Assistant) else Trunk(assistant)
