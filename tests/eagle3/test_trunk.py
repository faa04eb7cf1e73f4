"""After every round the cache of a head is what it would be if it were rebuilt from the target's features."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting.test_engine import FakeClock
from drafting_requests import request
from eagle3.rebuilding import check, checking
from tiny_head import make_calm_target, make_head, make_trained_head
from tiny_models import VOCAB_SIZE, prompt
from transformers import PreTrainedModel

from hf_ssd import SSDConfig
from hf_ssd.drafting import DraftEngine, make_assistant
from hf_ssd.drafting.engine import MAX_STEP_TOKENS
from hf_ssd.eagle3 import Eagle3Head, capture_features, feature_layers
from hf_ssd.types import Origin, Outcome

WAYS = {
    "trees": {},
    "trees with copied tokens": {"ngram_drafts": True},
    "chains": {"draft_tree_size": None},
    "a fixed budget": {"cache_budget": 6},
    "copies after misses": {"backup": "ngram", "ngram_drafts": True},
    "chains and copies after misses": {"backup": "ngram", "ngram_drafts": True, "draft_tree_size": None},
    "nothing after misses": {"backup": "none"},
    "no drafting ahead": {"mode": "sd"},
}


class Driver:
    """Plays the verifier: outcomes are those that the test chooses, features those of the target."""

    def __init__(self, target: PreTrainedModel, head: Eagle3Head, settings: SSDConfig, **fields: object) -> None:
        self.target = target
        self.layers = feature_layers(target, head)
        self.request = request(settings, feature_layers=self.layers, prompt_ids=tuple(prompt(7)[0].tolist()), **fields)
        self.engine = DraftEngine(make_assistant(head, None), overlaps=False)
        self.engine.start(self.request)
        self.row = list(self.request.prompt_ids)
        self.num_told = 0

    @torch.no_grad()
    def features(self, row: Sequence[int]) -> torch.Tensor:
        with capture_features(self.target, self.layers) as features:
            self.target(torch.tensor([row]))
            return features()[0]

    def resolve(self, node: int, bonus: int):
        last = self.engine._sent[node - 1] if node else self.engine._root
        path = [each.token for each in last.path()]
        # All tokens but the bonus have been read by the target.
        read = [*self.row, *path]
        features = self.features(read)[self.num_told :]
        self.row, self.num_told = [*read, bonus], len(read)
        return self.engine.resolve(Outcome(node, bonus, features))  # untimed: nothing depends on the machine

    def check(self) -> None:
        engine = self.engine
        assert engine._tokens == self.row
        assert engine._trunk.reading.tokens == (self.row[1:] if self.num_told else [])
        slots = [node.slot for node in engine._root.descendants() if node.is_run]
        assert len(set(slots)) == len(slots)
        assert all(engine._trunk.num_cached <= slot < engine._trunk.cache.get_seq_length() for slot in slots)
        if engine._root.is_run and not engine._trunk.is_provisional:
            check(engine._trunk, self.features(self.row)[:-1], engine._root.hidden)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_calm_target()


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "random"])
@pytest.mark.parametrize("way", WAYS)
def test_the_cache_is_right_whatever_comes(target, way: str, is_trained: bool) -> None:
    head = make_trained_head(target) if is_trained else make_head(target)
    settings = SSDConfig(**{"num_assistant_tokens": 3, "ngram_drafts": False, **WAYS[way]})
    driver, rng = Driver(target, head, settings), random.Random(0)
    checks: list[None] = []
    num_hits = num_provisional = num_copied = 0
    with checking(lambda: checks.append(None)):
        driver.engine.start(driver.request)  # anew, watched
        for _ in range(30):
            # Sometimes the outcome comes before the trunk has been corrected, or in the middle of everything.
            for _ in range(rng.choice([0, 1, 3, 50, 50])):
                if not driver.engine.deepen():
                    break
            driver.check()
            sent = driver.engine._sent
            node = rng.randrange(len(sent) + 1)
            last = sent[node - 1] if node else driver.engine._root
            prepared = [child.token for child in last.children if not child.is_sent and child.is_run]
            drafted = {child.token for child in last.sent_children}
            others = [token for token in range(VOCAB_SIZE) if token not in drafted]
            bonus = rng.choice(prepared) if prepared and rng.random() < 0.8 else rng.choice(others)
            speculation = driver.resolve(node, bonus)
            num_hits += speculation.origin is Origin.CACHE
            num_copied += speculation.origin is Origin.NGRAM
            num_provisional += driver.engine._trunk.is_provisional
            driver.check()
    assert len(checks) > 8
    if settings.mode == "ssd" and is_trained:  # the other is sure of nothing
        assert num_hits > 3
    assert num_provisional >= num_hits
    if settings.backup == "ngram":
        assert num_copied > 0


def test_a_hit_is_answered_before_anything_is_run(target) -> None:
    driver = Driver(target, make_trained_head(target), SSDConfig(num_assistant_tokens=3, ngram_drafts=False))
    driver.resolve(0, 9)
    forward, calls = driver.engine.assistant.forward, []
    while driver.engine.deepen():
        pass
    root = driver.engine._root
    bonus = next(c.token for c in root.children if not c.is_sent and any(each.is_draft for each in c.children))
    driver.engine.assistant.forward = lambda *a, **k: calls.append(len(a[0])) or forward(*a, **k)
    assert driver.resolve(0, bonus).origin is Origin.CACHE
    assert not calls
    own = driver.engine._root.hidden
    assert driver.engine.deepen()
    assert calls == [1], "the bonus token is read once more, on the target's features"
    assert not torch.allclose(driver.engine._root.hidden, own)
    driver.check()


def test_draft_tokens_are_of_the_draft_vocabulary_and_others_are_missed(target) -> None:
    head = make_trained_head(target)
    driver = Driver(target, head, SSDConfig(num_assistant_tokens=3, ngram_drafts=False, cache_budget=64))
    driver.resolve(0, 9)
    while driver.engine.deepen():
        pass
    drafted = set(head.draft_tokens.tolist())
    nodes = list(driver.engine._root.descendants())
    assert {node.token for node in nodes} <= drafted
    unknown = next(token for token in range(VOCAB_SIZE) if token not in drafted)
    speculation = driver.resolve(0, unknown)
    assert speculation.origin is Origin.JUST_IN_TIME
    assert speculation.miss is not None
    assert set(speculation.tokens) <= drafted
    driver.check()


def test_a_prompt_of_which_the_target_reads_the_end_only(target) -> None:
    """As when the caller's cache holds the beginning."""
    driver = Driver(target, make_trained_head(target), SSDConfig(num_assistant_tokens=3))
    features = driver.features(driver.row)[4:]
    driver.engine.resolve(Outcome(0, 9, features), 1.0)
    trunk = driver.engine._trunk
    assert trunk.reading.tokens == [*driver.row[5:], 9]
    check(trunk, features, driver.engine._root.hidden)


@pytest.mark.parametrize("num_common", [0, 2])
def test_another_row_after_a_late_beginning(target, num_common: int) -> None:
    """As with two chats in turn, each on a cache of its own: the second is shorter than where the first one began."""
    driver = Driver(target, make_trained_head(target), SSDConfig(num_assistant_tokens=3))
    driver.engine.resolve(Outcome(0, 9, driver.features(driver.row)[5:]))
    row = [*driver.row[:num_common], *prompt(5 - num_common, seed=3)[0].tolist()]
    driver.engine.start(replace(driver.request, prompt_ids=tuple(row)))
    features = driver.features(row)[-2:]
    driver.engine.resolve(Outcome(0, 11, features))
    trunk = driver.engine._trunk
    assert trunk.reading.tokens == [row[-1], 11]
    check(trunk, features, driver.engine._root.hidden)


@pytest.mark.parametrize("num_unseen", [0, 3])
def test_a_row_that_goes_on_as_a_new_one(target, num_unseen: int) -> None:
    """As after a change of mode, or in a next turn on the caller's cache. What it missed ends what the head knows."""
    driver = Driver(target, make_trained_head(target), SSDConfig(num_assistant_tokens=3, ngram_drafts=False))
    for bonus in (9, 11, 14):
        driver.resolve(0, bonus)
        while driver.engine.deepen():
            pass
    row = [*driver.row, *range(20, 20 + num_unseen)]
    driver.engine.start(replace(driver.request, prompt_ids=tuple(row)))
    features = driver.features(row)
    driver.engine.resolve(Outcome(0, 30, features[-1:]))
    trunk = driver.engine._trunk
    if num_unseen:
        assert trunk.reading.tokens == [30]
        check(trunk, features[-1:], driver.engine._root.hidden)
    else:
        assert trunk.reading.tokens == [*row[1:], 30]
        check(trunk, features, driver.engine._root.hidden)
    # With the features of all of it, everything is made anew.
    driver.engine.start(replace(driver.request, prompt_ids=tuple(row)))
    driver.engine.resolve(Outcome(0, 31, 2 * features))
    check(trunk, 2 * features, driver.engine._root.hidden)


@pytest.mark.parametrize("num_tokens", [20, 60])
def test_reading_the_prompt_is_no_draft_step(target, num_tokens: int, monkeypatch) -> None:
    """Nor drafting after a miss, nor part of a round, where it is longer than any step."""
    prompt_ids = tuple(prompt(num_tokens)[0].tolist())
    driver = Driver(target, make_trained_head(target), SSDConfig(mode="sd", num_assistant_tokens=3))
    driver.engine.start(replace(driver.request, prompt_ids=prompt_ids))
    driver.row, clock = list(prompt_ids), FakeClock(monkeypatch)
    clock.slow_down(driver.engine.assistant, lambda n: 10.0 * n)
    misses: list[float] = []
    monkeypatch.setattr(driver.engine._backup, "jit_took", misses.append)
    is_long = num_tokens > MAX_STEP_TOKENS
    driver.resolve(0, 9)
    pace = driver.engine._pace
    assert misses == pytest.approx([20.0 if is_long else 20.0 + 10.0 * num_tokens])
    assert pace.step(1) == pytest.approx(10.0, rel=0.3)
    assert (pace._resolved_at is None) == is_long
    driver.resolve(0, 11)
    assert misses[1:] == pytest.approx([30.0])
    assert pace.step(1) == pytest.approx(10.0, rel=0.3)


def test_features_of_what_is_never_read_are_dropped(target) -> None:
    """As from there on where the head's positions end."""
    limit = 16
    head = make_trained_head(target)
    head.config.layer.max_position_embeddings = limit
    driver = Driver(target, head, SSDConfig(num_assistant_tokens=3))
    for bonus in range(5, 25):
        driver.resolve(0, bonus)
        while driver.engine.deepen():
            pass
        assert sum(map(len, driver.engine._trunk._features)) <= 2
    assert driver.engine._trunk.num_cached <= limit
    # The next row begins with the same tokens, and is read from what is known of them.
    driver.engine.start(replace(driver.request, prompt_ids=tuple(driver.row[:12])))
    features = driver.features(driver.row[:12])
    driver.engine.resolve(Outcome(0, 30, features[-1:]))
    assert driver.engine._trunk.reading.tokens == [*driver.row[1:12], 30]
    check(driver.engine._trunk, features, driver.engine._root.hidden)


def test_an_outcome_without_features_is_an_error(target) -> None:
    driver = Driver(target, make_head(target), SSDConfig())
    with pytest.raises(ValueError, match="must bring the target's features"):
        driver.engine.resolve(Outcome(0, 9))
