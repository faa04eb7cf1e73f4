"""Compares the cache of an EAGLE-3 head with one that is rebuilt from the tokens and features that there have been.

In a module of its own, which the assistant's process can import: the processor, which changes no scores, brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import LogitsProcessor

from hf_ssd.compat import CACHE_KEY
from hf_ssd.drafting.feature_trunk import FeatureTrunk


@torch.no_grad()
def rebuild(trunk: FeatureTrunk, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and the last hidden state of the whole reading in one forward of the head's own, without the trunk.

    Args:
        trunk: Tells the tokens.
        features: The target's, of the token before each of them.
    """
    head = trunk.assistant.model
    tokens = trunk.reading.tokens
    assert len(features) == len(tokens)
    cache = head.new_cache()
    output = head(torch.tensor([tokens]), head.fuse(features)[None], **{CACHE_KEY: cache})
    return cache.layers[0].keys, cache.layers[0].values, output.hidden_states[0, -1]


def check(trunk: FeatureTrunk, features: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
    """The trunk holds what a forward from scratch gives, and nothing of it is provisional."""
    keys, values, last = rebuild(trunk, features)
    assert not trunk.is_provisional
    assert trunk.num_cached == trunk.num_read
    layer = trunk.cache.layers[0]
    torch.testing.assert_close(layer.keys[..., : trunk.num_read, :], keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.values[..., : trunk.num_read, :], values, atol=1e-4, rtol=1e-4)
    if hidden is not None:
        torch.testing.assert_close(hidden, last, atol=1e-4, rtol=1e-4)


@contextmanager
def checking(note: Callable[[], None]) -> Iterator[None]:
    """Within it every trunk is checked each time that it has read something; `note` is called after each check."""
    begin, learn, read = FeatureTrunk.begin, FeatureTrunk.learn, FeatureTrunk.read
    known: dict[int, dict[int, torch.Tensor]] = {}  # of each trunk, by place in the row

    def checked_begin(self, request):
        begin(self, request)
        known.setdefault(id(self), {})

    def checked_learn(self, features):
        # Of the end of the prompt, or of the last token and what was drafted after it.
        first = len(self._row) - (len(features) if self.reading.is_waiting else 1)
        known[id(self)].update(enumerate(features.clone(), start=first))
        learn(self, features)

    def checked_read(self, nodes=()):
        branch = [self.cache.layers[0].keys[..., self.num_cached :, :].clone()] if self.cache.layers else []
        hidden = yield from read(self, nodes)
        first = self._first - 1  # the features of a token are those of the one before
        features = [known[id(self)][place] for place in range(first, first + self.num_read)]
        check(self, torch.stack(features), hidden[0])
        for before in branch:  # nodes stay where they are
            torch.testing.assert_close(self.cache.layers[0].keys[..., self.num_cached :, :], before, atol=0, rtol=0)
        note()
        return hidden

    FeatureTrunk.begin, FeatureTrunk.learn, FeatureTrunk.read = checked_begin, checked_learn, checked_read
    try:
        yield
    finally:
        FeatureTrunk.begin, FeatureTrunk.learn, FeatureTrunk.read = begin, learn, read


class CheckingProcessor(LogitsProcessor):
    """Wherever it is unpickled all trunks are checked from there on; a file gets a dot for each check."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, input_ids, scores):
        return scores

    def __reduce__(self):
        return _unpickle, (self.path,)


_FOREVER = ExitStack()  # as long as the process lives


def _unpickle(path: Path) -> CheckingProcessor:
    def note() -> None:
        with path.open("a") as file:
            file.write(".")

    _FOREVER.enter_context(checking(note))
    return CheckingProcessor(path)
