"""What answers a miss: just in time, from the text and the cache's own branches, or nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from drafting_requests import PROMPT, request
from lookup_model import LookupForCausalLM
from tiny_models import VOCAB_SIZE, make_noisy

from hf_ssd import SSDConfig
from hf_ssd.drafting import AssistantModel, DraftEngine
from hf_ssd.drafting.backup import Copy, RowBackup, borrow
from hf_ssd.drafting.draft_tree import Node
from hf_ssd.planning import BackupPolicy, Event
from hf_ssd.types import Miss, Origin, Outcome, Speculation


def grow(tokens: str, parent: Node | None, *, bonus: bool = False, chance: float = 0.5) -> Node:
    """A chain of nodes below `parent`, one per letter; returns the last."""
    for letter in tokens:
        node = Node(ord(letter), parent, 0, chance=chance, num_drafted=0 if bonus else 1)
        if parent is not None:
            parent.children.append(node)
        parent = node
    assert parent is not None
    return parent


def spelt(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def codes(text: str) -> list[int]:
    return list(map(ord, text))


class TestBorrowing:
    def test_the_longest_match_wins(self) -> None:
        root = grow("a", None)
        grow("xyz12", root)
        grow("byz34", root)
        copy = borrow(root, codes("..abyz"), 8)
        assert (spelt(copy.tokens), copy.length, copy.event) == ("34", 6 - 2, Event.BORROWED)
        assert spelt(borrow(root, codes("..qxyz"), 8).tokens) == "12"

    def test_among_equals_the_likelier(self) -> None:
        root = grow("a", None)
        grow("pz1", root, chance=0.1)
        grow("qz2", root, chance=0.3)
        assert spelt(borrow(root, codes("rz"), 8).tokens) == "2"

    def test_after_a_branch_the_likeliest_follows(self) -> None:
        root = grow("a", None)
        node = grow("bc", root)
        grow("1", node, chance=0.2)
        grow("2", grow("2", node, chance=0.4), chance=0.1)
        assert spelt(borrow(root, codes("abc"), 8).tokens) == "22"
        assert spelt(borrow(root, codes("abc"), 1).tokens) == "2"

    def test_without_a_match_there_is_nothing(self) -> None:
        root = grow("a", None)
        grow("bc", root)
        assert borrow(root, codes("az"), 8) == Copy([], 0, Event.BORROWED)
        assert not borrow(root, codes("ac"), 8).tokens  # nothing was drafted after it

    def test_bonus_tokens_alone_are_nothing_to_copy(self) -> None:
        root = grow("a", None)
        grow("z", grow("b", root), bonus=True)
        assert not borrow(root, codes("xb"), 8).tokens


class Policy(BackupPolicy):
    """Takes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int, int]] = []

    def gave(self, source, num_tokens: int, misses_in_a_row: int) -> None:
        self.told.append((source, num_tokens, misses_in_a_row))


class TestWhatIsMeasured:
    def test_a_copy_is_followed_over_rounds(self) -> None:
        policy = Policy()
        backup = RowBackup(request(SSDConfig()), policy)
        backup.resolved([1], False, None)
        assert backup.choose([5, 6, 7, 8]) == "jit"
        backup.resolved([5, 6], True, 1.0)
        assert policy.told == [("jit", 2, 0)]
        backup.resolved([7, 9], True, 1.0)
        assert policy.told[1:] == [("cache", 2, 1), ("ngram", 4, 0)]

    def test_misses_are_counted_until_a_hit(self) -> None:
        policy = Policy()
        backup = RowBackup(request(SSDConfig(backup="none")), policy)
        for _ in range(3):
            backup.resolved([1], False, 1.0)
            assert backup.choose([2]) == "none"
        backup.resolved([1], True, 1.0)
        backup.resolved([1, 1], False, 1.0)
        # Without a draft a round is no figure of the assistant's, but what copying would have given is known.
        assert policy.told == [("ngram", 1, 0), ("ngram", 1, 1), ("ngram", 1, 2), ("cache", 2, 3)]

    def test_copies_that_were_sent_count_as_they_came_out(self) -> None:
        policy = Policy()
        backup = RowBackup(request(SSDConfig(backup="ngram")), policy)
        backup.resolved([1], False, 1.0)
        assert backup.choose([2, 3]) == "ngram"
        backup.resolved([2, 9], True, 1.0)
        assert policy.told == [("ngram", 2, 0)]

    def test_without_a_policy_drafting_is_just_in_time(self) -> None:
        backup = RowBackup(request(SSDConfig()), None)
        for _ in range(100):
            backup.resolved([1], False, 1.0)
            assert backup.choose([]) == "jit"


class CountingAssistant(AssistantModel):
    num_forwards = 0

    def forward(self, *args, **kwargs):
        self.num_forwards += 1
        return super().forward(*args, **kwargs)


def make_engine(**settings: object) -> DraftEngine:
    fields = {"takes_trees": settings.pop("takes_trees", False), "prompt_ids": PROMPT * 4}
    engine = DraftEngine(CountingAssistant(make_noisy()))
    values = {"backend": "inline", "draft_vocab_size": None, **settings}
    engine.start(request(SSDConfig(**values), **fields))
    return engine


def miss(engine: DraftEngine, bonus_token: int, node: int = 0) -> tuple[Speculation, int]:
    before = engine.assistant.num_forwards
    speculation = engine.resolve(Outcome(node, bonus_token))
    return speculation, engine.assistant.num_forwards - before


class TestEngine:
    def test_none_sends_nothing_and_runs_nothing(self) -> None:
        engine = make_engine(backup="none")
        speculation, num_forwards = miss(engine, 5)
        assert (len(speculation), speculation.origin, speculation.miss) == (0, Origin.NONE, Miss.COLD)
        assert num_forwards == 0

    @pytest.mark.parametrize("takes_trees", [False, True])
    def test_ngram_copies_what_followed_and_runs_nothing(self, takes_trees: bool) -> None:
        engine = make_engine(backup="ngram", takes_trees=takes_trees)
        # The prompt says itself four times: what follows its first token is known.
        speculation, num_forwards = miss(engine, PROMPT[0])
        assert speculation.origin is Origin.NGRAM
        assert speculation.tokens == PROMPT[1 : 1 + len(speculation)]
        assert len(speculation) >= 1
        assert num_forwards == 0

    @pytest.mark.parametrize("length", [1, 2, 4])
    def test_the_policy_hears_of_no_more_than_is_sent(self, length: int, monkeypatch) -> None:
        copies = []
        choose = RowBackup.choose
        monkeypatch.setattr(RowBackup, "choose", lambda self, copy: copies.append(tuple(copy)) or choose(self, copy))
        engine = make_engine(backup="ngram", num_assistant_tokens=length)
        speculation, _ = miss(engine, PROMPT[0])
        assert copies == [speculation.tokens]
        assert 1 <= len(speculation) <= length

    def test_without_copying_there_is_only_nothing_to_choose(self, monkeypatch) -> None:
        monkeypatch.setattr(RowBackup, "choose", lambda self, copy: "ngram")
        engine = make_engine(ngram_drafts=False)
        speculation, num_forwards = miss(engine, PROMPT[0])
        assert (len(speculation), speculation.origin, num_forwards) == (0, Origin.NONE, 0)

    @pytest.mark.parametrize("takes_trees", [False, True])
    @pytest.mark.parametrize("backup", ["ngram", "none"])
    def test_the_assistant_catches_up_and_then_hits(self, backup: str, takes_trees: bool) -> None:
        """What it then has is what an engine has that had read the row in one go."""
        engine = make_engine(backup=backup, takes_trees=takes_trees, num_assistant_tokens=4)
        row = list(PROMPT * 4)
        generator = random.Random(0)
        num_hits = 0
        for _ in range(12):
            node = generator.randint(0, len(engine._sent))
            last = engine._sent[node - 1] if node else engine._root
            drafted = {child.token for child in last.sent_children}
            prepared = [c.token for c in last.children if not c.is_sent and c.is_run and c.children]
            choices = prepared if prepared and generator.random() < 0.5 else range(VOCAB_SIZE)
            token = generator.choice([token for token in choices if token not in drafted])
            row += [*(each.token for each in last.path()), token]
            speculation = engine.resolve(Outcome(node, token))
            num_hits += speculation.origin is Origin.CACHE
            while engine.deepen():
                pass
            assert engine._root.is_run
            alone = engine.assistant.forward(row, engine.assistant.new_cache(), num_hidden=1)[0]
            assert (engine._root.hidden - alone).norm() < 1e-4 * alone.norm()
            for child in engine._sent:
                if child.is_run:
                    path = [*row, *(each.token for each in child.path())]
                    alone = engine.assistant.forward(path, engine.assistant.new_cache(), num_hidden=1)[0]
                    assert (child.hidden - alone).norm() < 1e-4 * alone.norm()
        assert num_hits >= 2

    def test_a_chain_goes_on_with_what_the_text_knows(self) -> None:
        """Just in time a few tokens are drafted; where the text repeats itself, it tells more."""
        follower = torch.arange(1, VOCAB_SIZE + 1) % VOCAB_SIZE  # each token is followed by the next number
        model = LookupForCausalLM.of(10.0 * torch.nn.functional.one_hot(follower).float())
        lengths = {}
        for ngram_drafts in (False, True):
            engine = DraftEngine(AssistantModel(model))
            settings = SSDConfig(backend="inline", draft_vocab_size=None, backup="jit", ngram_drafts=ngram_drafts)
            engine.start(request(settings, takes_trees=False, prompt_ids=tuple(range(30)) * 2))
            speculation = engine.resolve(Outcome(0, 2))
            assert speculation.tokens == tuple(range(3, 3 + len(speculation)))
            assert speculation.origin is Origin.JUST_IN_TIME
            lengths[ngram_drafts] = len(speculation)
        assert lengths[True] >= lengths[False] + 2
