"""The drafting engine against a naive rival that has no cache, no branches and no shared forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny_zoo
import torch
from drafting_requests import PROMPT, request
from tiny_models import VOCAB_SIZE, make_noisy
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor, PreTrainedModel
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from hf_ssd import SSDConfig
from hf_ssd.drafting import AssistantModel, DraftEngine, Work, engine, pace, proposer
from hf_ssd.drafting.draft_tree import Node
from hf_ssd.noise import GumbelNoise
from hf_ssd.planning import Event
from hf_ssd.types import Miss, Origin, Outcome, Speculation

DEPTH = 4


def config(**fields: object) -> SSDConfig:
    values = {"backend": "inline", "num_assistant_tokens": DEPTH, "ngram_drafts": False, "draft_vocab_size": None}
    return SSDConfig(**{**values, **fields})


@pytest.fixture(autouse=True)
def bushy(monkeypatch) -> None:
    """Models this small are sure of nothing; without this the first speculations would hardly ever be trees."""
    monkeypatch.setattr("hf_ssd.drafting.engine.MIN_UNMEASURED_CHANCE", 0.02)


class Rival:
    """The whole row in one forward, for every token."""

    def __init__(self, model: PreTrainedModel, processors: Sequence[LogitsProcessor] = (), padding: int = 0) -> None:
        self.model, self.processors, self.padding = model, processors, padding
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def scores(self, row: Sequence[int]) -> torch.Tensor:
        key = tuple(row)
        if key not in self._known:
            with torch.no_grad():
                scores = self.model(torch.tensor([row])).logits[:, -1]
            for processor in self.processors:
                scores = processor(torch.tensor([[0] * self.padding + list(row)]), scores.clone())
            self._known[key] = scores[0]
        return self._known[key]

    def ranked(self, row: Sequence[int]) -> list[int]:
        return self.scores(row).argsort(descending=True).tolist()

    def chain(self, row: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for _ in range(num_tokens):
            tokens.append(self.ranked([*row, *tokens])[0])
        return tuple(tokens)


class Driver:
    """Plays the verifier, with outcomes that the test chooses."""

    def __init__(self, model: PreTrainedModel, settings: SSDConfig, *, overlaps: bool = False, **fields: Any) -> None:
        self.model = model
        self.engine = DraftEngine(AssistantModel(model), overlaps=overlaps)
        self.request = request(settings, **fields)
        self.rival = Rival(model, self.request.processors, self.request.num_padding)
        self.engine.start(self.request)
        self.row = list(self.request.prompt_ids[self.request.num_padding :])
        self.last = Speculation()
        self.is_prepared = False

    def deepen(self, num_steps: int | None = None) -> int:
        done = 0
        while (num_steps is None or done < num_steps) and self.engine.deepen():
            done += 1
        return done

    @property
    def nodes(self) -> list[Node]:
        """The places where acceptance may stop, in the order of `Outcome.node`."""
        return [self.engine._root, *self.engine._sent]

    def prepared(self) -> list[Outcome]:
        """The outcomes that something has been drafted for."""
        return [
            Outcome(index, child.token)
            for index, node in enumerate(self.nodes)
            for child in node.children
            if not child.is_sent and child.is_run and any(each.is_draft for each in child.children)
        ]

    def path(self, node: int) -> list[int]:
        """The tokens of the latest speculation up to a node, counted from 1."""
        tokens: list[int] = []
        while node:
            tokens.append(self.last.tokens[node - 1])
            node = self.last.parents[node - 1] + 1
        return tokens[::-1]

    def true_outcome(self) -> Outcome:
        """Of a target that is the assistant itself."""
        node, path = 0, []
        while True:
            token = self.rival.ranked([*self.row, *path])[0]
            children = {t: i + 1 for i, (t, p) in enumerate(zip(self.last.tokens, self.last.parents)) if p == node - 1}  # noqa: B905
            if token not in children:
                return Outcome(node, token)
            node = children[token]
            path.append(token)

    def any_outcome(self, generator: random.Random) -> Outcome:
        """One at random. The bonus token is no draft token there: that would have been accepted."""
        node = generator.randint(0, len(self.last))
        drafted = [t for t, p in zip(self.last.tokens, self.last.parents, strict=True) if p == node - 1]
        return Outcome(node, generator.choice([t for t in range(VOCAB_SIZE) if t not in drafted]))

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> Speculation:
        is_prepared = outcome in self.prepared()
        self.row += [*self.path(outcome.node), outcome.bonus_token]
        forward, calls = self.engine.assistant.forward, []
        self.engine.assistant.forward = lambda *a, **k: calls.append(a) or forward(*a, **k)  # type: ignore[method-assign]
        self.last = self.engine.resolve(outcome, verify_ms)
        del self.engine.assistant.forward
        if is_prepared and self.request.config.mode == "ssd":
            assert (self.last.origin, self.last.miss) == (Origin.CACHE, None)
            assert calls == [], "drafted work was done again"
        else:
            assert (self.last.miss is not None) == (self.request.config.mode == "ssd")
            assert self.last.origin is (Origin.JUST_IN_TIME if len(self.last) else Origin.NONE)
        self.is_prepared = is_prepared
        return self.last

    def check_speculation(self) -> None:
        """Each draft token is among the rival's likeliest after exactly its own prefix."""
        tokens, parents = self.last.tokens, self.last.parents
        num_children = engine.NUM_CHILDREN if self.engine._max_tree_tokens else 1
        assert all(-1 <= parent < index for index, parent in enumerate(parents))
        assert len(set(zip(tokens, parents, strict=True))) == len(tokens), "siblings are the same"
        row = self.row
        for node, token in enumerate(tokens, start=1):
            prefix = [*row, *self.path(node)[:-1]]
            scores = self.rival.scores(prefix)
            is_likely = scores[token] >= scores.topk(num_children).values[-1] - 1e-3
            trigrams = set(zip(row, row[1:], row[2:], strict=False)) if self.engine._ngrams is not None else ()
            assert is_likely or (*prefix[-2:], token) in trigrams, (node, prefix)
        assert self.last.depth <= self.request.config.max_draft_tokens
        for node in self.nodes:
            drafted = [child for child in node.children if child.event not in (Event.COPIED, Event.OBJECTED)]
            if node.is_run and drafted and not self.request.do_sample:
                prefix = [*self.row, *(each.token for each in node.path())]
                scores = self.rival.scores(prefix)
                best = max(drafted, key=lambda child: child.confidence)
                assert scores[best.token] >= scores.max() - 1e-3
                assert best.confidence == pytest.approx(scores.softmax(0)[best.token].item(), abs=1e-3)

    def check_cache(self, *, with_contents: bool = False) -> None:
        """mlxcel 994: a draft cache trimmed one entry too far. The output is right, acceptance decays."""
        root, cache = self.engine._root, self.engine._trunk.cache
        run = [node for node in root.descendants() if node.is_run]
        num_trunk = self.engine._trunk.num_cached
        assert num_trunk == len(self.row)
        assert self.engine._tokens == self.row
        assert sorted(node.slot for node in run) == list(range(num_trunk, cache.get_seq_length()))
        for node in root.descendants():
            assert node.position == len(self.row) - 1 + len(node.path())
            assert node.is_run or not any(child.is_run for child in node.children)
            assert node.chance <= node.parent.chance + 1e-6
        if not with_contents:
            return
        for node in (root, *run):
            row = [*self.row, *(each.token for each in node.path())]
            fresh = self.engine.assistant.new_cache()
            with torch.inference_mode():
                hidden = self.engine.assistant.forward(row, fresh, num_hidden=1)[0]
            scale = hidden.abs().max()
            torch.testing.assert_close(node.hidden, hidden, atol=1e-3 * scale.item(), rtol=0)
            slots = [*range(num_trunk), *(each.slot for each in node.path())]
            for layer, expected in zip(cache.layers, fresh.layers, strict=True):
                for kept, right in ((layer.keys, expected.keys), (layer.values, expected.values)):
                    torch.testing.assert_close(kept[..., slots, :], right, atol=2e-3 * right.abs().max(), rtol=0)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trees": ({}, {}),
    "trees with copied tokens": ({"ngram_drafts": True}, {}),
    "small trees": ({"draft_tree_size": 3}, {}),
    "a fixed budget": ({"cache_budget": 6, "ngram_drafts": True}, {}),
    "chains": ({"draft_tree_size": None}, {}),
    "a target that takes no trees": ({}, {"takes_trees": False}),
    "auto": ({"num_assistant_tokens": "auto"}, {}),
}


@pytest.fixture(autouse=True)
def _large_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """At random few tokens are right, so that the engine would soon send one token at a time."""
    monkeypatch.setattr(engine, "MIN_UNMEASURED_CHANCE", 0.01)


def play(driver: Driver, num_rounds: int, *, seed: int = 0, share_of_hits: float = 0.6) -> list[Origin]:
    """A long run of hits at every node and of misses, at every depth that the time may have allowed."""
    generator = random.Random(seed)
    origins = []
    for round_ in range(num_rounds):
        driver.deepen(generator.choice([0, 1, 2, 3, None]))
        prepared = driver.prepared()
        is_hit = prepared and generator.random() < share_of_hits
        driver.resolve(generator.choice(prepared) if is_hit else driver.any_outcome(generator))
        driver.check_speculation()
        driver.check_cache(with_contents=round_ % 5 == 4)
        origins.append(driver.last.origin)
    return origins


class TestAgainstTheRival:
    @pytest.mark.parametrize("overlaps", [True, False], ids=["overlapping", "inline"])
    @pytest.mark.parametrize("way", WAYS)
    def test_every_speculation(self, way: str, overlaps: bool) -> None:
        settings, fields = WAYS[way]
        driver = Driver(make_noisy(), config(**settings), overlaps=overlaps, **fields)
        origins = play(driver, 30)
        assert min(origins.count(Origin.CACHE), origins.count(Origin.JUST_IN_TIME)) >= 4

    @pytest.mark.parametrize("family", [name for name in tiny_zoo.FAMILIES if not name.startswith("bloom")])
    def test_every_family(self, family: str) -> None:
        driver = Driver(tiny_zoo.make(family), config(), overlaps=True)
        origins = play(driver, 15)
        assert min(origins.count(Origin.CACHE), origins.count(Origin.JUST_IN_TIME)) >= 3

    @pytest.mark.parametrize("family", ["mistral, window of 8", "gemma3, mixed layers"])
    def test_branches_longer_than_the_window(self, family: str) -> None:
        """Then a token does not see its own first ancestors."""
        driver = Driver(tiny_zoo.make(family), config(num_assistant_tokens=12, cache_budget=3), takes_trees=False)
        generator = random.Random(0)
        for _ in range(5):
            driver.deepen()
            driver.resolve(generator.choice(driver.prepared()))
            assert len(driver.last) == 12
            driver.check_speculation()
            driver.deepen()
            assert max(len(node.path()) for node in driver.engine._root.descendants() if node.is_run) > 10
            driver.check_cache(with_contents=True)

    def test_an_assistant_that_takes_no_tree_mask(self) -> None:
        """It drafts just in time. What was drafted and not sent may still be a hit."""
        driver = Driver(tiny_zoo.make("bloom, ALiBi"), config(ngram_drafts=True))
        assert not driver.engine.assistant.takes_trees
        assert Origin.JUST_IN_TIME in play(driver, 10)
        assert driver.deepen() == 0

    def test_chains_are_chains_and_the_rivals_own(self) -> None:
        for settings, fields in (WAYS["chains"], WAYS["a target that takes no trees"]):
            driver = Driver(make_noisy(), config(**settings), **fields)
            generator = random.Random(1)
            for _ in range(8):
                driver.deepen()
                driver.resolve(generator.choice(driver.prepared()))
                assert driver.last.is_chain
                assert driver.last.tokens == driver.rival.chain(driver.row, len(driver.last))

    def test_trees_are_trees(self) -> None:
        """Else all that was said above of branches was said of nothing."""
        driver = Driver(make_noisy(), config(expected_acceptance=0.99))
        generator = random.Random(1)
        trees = 0
        for _ in range(20):
            driver.deepen()
            driver.resolve(generator.choice(driver.prepared()))
            trees += not driver.last.is_chain
        assert trees >= 5

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_a_tree_is_no_larger_than_it_may_be(self, size: int, monkeypatch) -> None:
        monkeypatch.setattr(engine, "MIN_UNMEASURED_CHANCE", 0.0)
        driver = Driver(make_noisy(), config(draft_tree_size=size, ngram_drafts=True))
        generator, sizes = random.Random(0), set()
        for _ in range(10):
            driver.deepen()
            driver.resolve(generator.choice(driver.prepared()))
            sizes.add(len(driver.last))
        assert max(sizes) == size

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_in_mode_sd_a_fixed_number_is_drafted(self, do_sample: bool) -> None:
        for overlaps in (False, True):
            for length in (1, 3, 12):
                settings = config(mode="sd", num_assistant_tokens=length, draft_tree_size=None)
                driver = Driver(make_noisy(), settings, overlaps=overlaps, do_sample=do_sample)
                generator = random.Random(0)
                for _ in range(3):
                    assert driver.deepen() == 0
                    driver.resolve(driver.any_outcome(generator), 5.0)
                    assert (driver.last.origin, driver.last.miss) == (Origin.JUST_IN_TIME, None)  # none was looked up
                    assert len(driver.last) == length

    @pytest.mark.parametrize("ngram_drafts", [False, True])
    def test_no_more_than_num_assistant_tokens_follow_each_other(self, ngram_drafts: bool) -> None:
        """Copied tokens included: the text repeats itself, so whole runs could be copied."""
        for length in (1, 2, 5):
            row = PROMPT * 5
            driver = Driver(
                make_noisy(), config(num_assistant_tokens=length, ngram_drafts=ngram_drafts), prompt_ids=row
            )
            for token in PROMPT * 2:
                driver.deepen()
                driver.resolve(Outcome(0, token))
                assert driver.last.depth <= length

    def test_padding_is_not_read(self) -> None:
        processors = (RepetitionPenaltyLogitsProcessor(5.0),)  # sees it, though, as the target's does
        driver = Driver(make_noisy(), config(), prompt_ids=(0, 0, 0, *PROMPT), num_padding=3, processors=processors)
        play(driver, 10)

    @pytest.mark.parametrize(
        "processor", [RepetitionPenaltyLogitsProcessor(2.0), NoRepeatNGramLogitsProcessor(2), TopKLogitsWarper(3)]
    )
    @pytest.mark.parametrize("fields", [{}, {"takes_trees": False}])
    def test_processors(self, processor: LogitsProcessor, fields: dict[str, Any]) -> None:
        driver = Driver(make_noisy(), config(), processors=(processor,), **fields)
        play(driver, 12)

    def test_rows_follow_each_other(self) -> None:
        """An engine serves many rows; nothing of the last may be left."""
        driver = Driver(make_noisy(), config(ngram_drafts=True))
        play(driver, 5)
        driver.engine.start(request(config(ngram_drafts=True), prompt_ids=PROMPT[::-1]))
        driver.row, driver.last = list(PROMPT[::-1]), Speculation()
        play(driver, 8)


class TestOutcomes:
    def by_node(self, fan_out: object, **fields: Any) -> tuple[Driver, dict[int, list[int]]]:
        """After a miss, which leaves a chain of K tokens to be verified."""
        driver = Driver(make_noisy(), config(fan_out=fan_out, **fields), takes_trees=False)
        driver.deepen()
        driver.resolve(Outcome(0, 5))
        driver.deepen()
        by_node: dict[int, list[int]] = {}
        for outcome in driver.prepared():
            by_node.setdefault(outcome.node, []).append(outcome.bonus_token)
        return driver, by_node

    def test_the_prompt_is_prepared_for_while_the_target_reads_it(self) -> None:
        """The prefill is the verification of an empty speculation: its likeliest first token is a hit."""
        driver = Driver(make_noisy(), config())
        driver.deepen()
        likeliest = driver.rival.chain(PROMPT, 1)[0]
        assert {outcome.node for outcome in driver.prepared()} == {0}
        assert driver.resolve(Outcome(0, likeliest)).origin is Origin.CACHE

    @pytest.mark.parametrize("overlaps", [True, False])
    def test_a_list_is_obeyed(self, overlaps: bool) -> None:
        _, by_node = self.by_node([3, 0, 2, 1, 4])
        assert {k: len(tokens) for k, tokens in by_node.items()} == {0: 3, 2: 2, 3: 1, 4: 4}

    @pytest.mark.parametrize("overlaps", [True, False])
    @pytest.mark.parametrize("fan_out", [[3, 2, 2], "geometric", "uniform"])
    def test_planned_outcomes_are_prepared_as_deep_as_the_threshold_lets_drafts_go(
        self, fan_out: str | list[int], overlaps: bool
    ) -> None:
        depths = {}
        for threshold in (0.0, 0.3):
            settings = config(fan_out=fan_out, draft_threshold=threshold, expected_acceptance=0.9)
            driver = Driver(make_noisy(), settings, takes_trees=False, overlaps=overlaps)
            planned, lengths = 0, []
            for _ in range(6):
                driver.deepen(20)
                planned += len(driver.prepared())
                prepared = [node for node in driver.engine._root.descendants() if node.is_draft and not node.is_sent]
                assert all(node.chance >= threshold for node in prepared if node.is_run)
                lengths.append(len(prepared))
                driver.resolve(driver.true_outcome(), 5.0)
            depths[threshold] = planned, sum(lengths)
        assert depths[0.3][0] > 6
        assert depths[0.3][1] < depths[0.0][1]

    @pytest.mark.parametrize("fan_out", ["per_instance", "geometric", "uniform"])
    @pytest.mark.parametrize("budget", [1, 4, 10, 60])
    def test_a_budget_is_spent_whole(self, fan_out: str, budget: int) -> None:
        driver, by_node = self.by_node(fan_out, cache_budget=budget)
        assert sum(map(len, by_node.values())) == budget
        if fan_out == "uniform":
            counts = [len(by_node.get(k, ())) for k in range(len(driver.last) + 1)]
            assert max(counts) - min(counts) <= 1

    @pytest.mark.parametrize("budget", [3, 9])
    def test_on_trees_too_a_budget_is_a_budget(self, budget: int) -> None:
        """What earlier rounds have left counts. No node of what was given up is run any more."""
        driver = Driver(make_noisy(), config(cache_budget=budget, expected_acceptance=0.99, ngram_drafts=True))
        generator, ran = random.Random(0), []
        run = driver.engine._run
        driver.engine._run = lambda nodes: ran.extend(nodes) or run(nodes)
        for _ in range(10):
            ran.clear()
            driver.deepen()
            assert len(driver.prepared()) <= budget
            reachable = {id(node) for node in driver.engine._root.descendants()}
            assert all(id(node) in reachable for node in ran)
            driver.resolve(generator.choice(driver.prepared()))

    def test_they_are_the_likeliest_but_for_the_draft_token(self) -> None:
        """A rejected draft token cannot be the bonus token: a branch for it would be wasted."""
        driver, by_node = self.by_node([4] * (DEPTH + 1))
        assert len(by_node) == DEPTH + 1
        for k, tokens in by_node.items():
            ranked = driver.rival.ranked([*driver.row, *driver.last.tokens[:k]])
            if k < DEPTH:
                ranked.remove(driver.last.tokens[k])
            assert tokens == ranked[:4]

    def test_on_trees_no_outcome_is_a_draft_token(self) -> None:
        driver = Driver(make_noisy(), config(expected_acceptance=0.99))
        generator, trees = random.Random(2), 0
        for _ in range(15):
            driver.deepen()
            sent = {(parent + 1, token) for token, parent in zip(driver.last.tokens, driver.last.parents, strict=True)}
            outcomes = [(outcome.node, outcome.bonus_token) for outcome in driver.prepared()]
            assert not sent & set(outcomes)
            assert len(set(outcomes)) == len(outcomes)
            trees += not driver.last.is_chain
            driver.resolve(generator.choice(driver.prepared()))
        assert trees > 3

    def test_all_branches_reach_the_full_depth(self) -> None:
        driver, _ = self.by_node("uniform", cache_budget=10)
        assert {
            len(list(child.descendants()))
            for node in driver.nodes
            for child in node.children
            if not child.is_sent and child.is_run
        } == {DEPTH}

    def test_the_best_outcome_after_each_likely_node_is_always_prepared(self) -> None:
        """Without a budget chances decide. Where acceptance stops often, the likeliest bonus token is a hit."""
        driver = Driver(make_noisy(), config())
        generator = random.Random(3)
        for _ in range(10):
            driver.deepen()
            prepared = driver.prepared()
            for index, node in enumerate(driver.nodes):
                drafted = {child.token for child in node.children if child.is_sent}
                likeliest = next(
                    t for t in driver.rival.ranked([*driver.row, *(n.token for n in node.path())]) if t not in drafted
                )
                stop = node.chance - sum(child.chance for child in node.children if child.is_sent)
                if stop > 0.3:
                    assert Outcome(index, likeliest) in prepared
            driver.resolve(generator.choice(prepared))


class TestMisses:
    def test_each_says_why(self) -> None:
        driver = Driver(make_noisy(), config(fan_out=[2, 0, 2, 2, 2]), takes_trees=False)
        assert driver.resolve(Outcome(0, 5)).miss is Miss.COLD
        driver.deepen()
        unprepared = next(t for t in range(VOCAB_SIZE) if Outcome(0, t) not in driver.prepared())
        assert driver.resolve(Outcome(0, unprepared)).miss is Miss.TOKEN
        driver.deepen()
        assert driver.resolve(Outcome(1, 5)).miss is Miss.LENGTH

    def test_what_had_no_time_is_unfinished(self) -> None:
        driver = Driver(make_noisy(), config(fan_out=[60]), takes_trees=False, overlaps=True)
        driver.deepen(2)  # ranks, and runs as many as fit
        pending = next(c for c in driver.engine._root.children if c.is_planned and not c.is_run)
        assert driver.resolve(Outcome(0, pending.token)).miss is Miss.UNFINISHED


class TestLimits:
    @pytest.mark.parametrize("way", [name for name in WAYS if name != "small trees"])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_what_cannot_be_emitted_is_not_drafted(self, way: str, do_sample: bool) -> None:
        """The target adds a token to what it accepts, so the last token wanted is never drafted either."""
        settings, fields = WAYS[way]
        for max_new_tokens in (1, 2, 3, 5, 8):
            driver = Driver(
                make_noisy(), config(**settings), max_new_tokens=max_new_tokens, do_sample=do_sample, **fields
            )
            last = len(PROMPT) + max_new_tokens - 1
            generator, depths = random.Random(max_new_tokens), []
            while len(driver.row) < last + 1:
                driver.deepen()
                driver.resolve(Outcome(0, generator.randrange(VOCAB_SIZE)))
                assert len(driver.row) + driver.last.depth <= max(last, len(driver.row))
                assert all(node.position < last for node in driver.engine._root.descendants() if node.is_run)
                depths.append(driver.last.depth)
            assert depths[-1] == 0
            assert max_new_tokens < 3 or depths[0] > 0

    @pytest.mark.parametrize("way", WAYS)
    def test_a_context_that_ends_stops_drafting(self, way: str) -> None:
        settings, fields = WAYS[way]
        driver = Driver(make_noisy(max_position_embeddings=12), config(**settings), **fields)
        depths, generator = [], random.Random(0)
        for _ in range(10):
            driver.deepen()
            driver.resolve(Outcome(0, generator.randrange(VOCAB_SIZE)))
            depths.append(driver.last.depth)
            assert not len(driver.last) or len(driver.row) + driver.last.depth <= 13
            run = [node for node in driver.engine._root.descendants() if node.is_run]
            assert all(node.position < 12 for node in run)
        assert depths[0] > 0
        assert depths[-1] == 0


class FakeClock:
    """Time that only forwards of the assistant and the test take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for module in (engine, pace):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def slow_down(self, assistant: AssistantModel, step_ms: Callable[[int], float]) -> None:
        forward = type(assistant).forward

        def timed(tokens: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
            self.now_s += step_ms(len(tokens)) / 1e3
            return forward(assistant, tokens, *args, **kwargs)

        assistant.forward = timed  # type: ignore[method-assign]


class TestPace:
    """The target must not wait for a step that could not end in time, nor verify what does not pay."""

    def driver(
        self, monkeypatch: pytest.MonkeyPatch, *, step_ms: float, verify_ms: float, **fields: Any
    ) -> tuple[Driver, FakeClock]:
        """After some rounds in which steps and verifications took so long."""
        clock = FakeClock(monkeypatch)
        driver = Driver(make_noisy(), config(num_assistant_tokens="auto", **fields), overlaps=True)
        clock.slow_down(driver.engine.assistant, lambda n: step_ms * (1 + 0.01 * n))
        for round_ in range(20):
            due_s = clock.now_s + verify_ms / 1e3
            driver.deepen(2)
            clock.now_s = max(clock.now_s, due_s)
            self.resolve(driver, driver.true_outcome(), verify_ms if round_ else None)
        return driver, clock

    @staticmethod
    def resolve(driver: Driver, outcome: Outcome, verify_ms: float | None) -> None:
        driver.row += [*driver.path(outcome.node), outcome.bonus_token]
        driver.last = driver.engine.resolve(outcome, verify_ms)

    def test_the_first_step_is_always_taken_and_a_late_one_is_not(self, monkeypatch) -> None:
        driver, _ = self.driver(monkeypatch, step_ms=1000.0, verify_ms=10.0, draft_tree_size=None)
        steps = []
        run = driver.engine._run
        driver.engine._run = lambda nodes: steps.append(len(nodes)) or run(nodes)
        driver.deepen()
        assert len(steps) == 1

    def test_nor_with_little_memory(self, monkeypatch) -> None:
        """Of the time that is there the memory takes away, and adds nothing."""
        of_a_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
        for num_tokens in (4, 40):
            fields = {"draft_tree_size": None, "memory_budget": num_tokens * of_a_token}
            driver, _ = self.driver(monkeypatch, step_ms=1000.0, verify_ms=10.0, **fields)
            steps = []
            run = driver.engine._run
            driver.engine._run = lambda nodes, steps=steps, run=run: steps.append(len(nodes)) or run(nodes)
            driver.deepen()
            assert len(steps) == 1
            assert steps[0] <= num_tokens

    def test_while_there_is_time_everything_likely_is_drafted(self, monkeypatch) -> None:
        driver, clock = self.driver(monkeypatch, step_ms=1.0, verify_ms=100_000.0)
        sent_at = clock.now_s
        driver.deepen()
        assert clock.now_s - sent_at < 100.0
        pending = [node for node in driver.engine._root.descendants() if not node.is_run and node.chance > 0.05]
        assert all(not node.is_sent and node.num_drafted == 16 for node in pending)

    def test_no_step_overruns_for_less_than_it_costs(self, monkeypatch) -> None:
        driver, clock = self.driver(monkeypatch, step_ms=10.0, verify_ms=95.0)
        due = clock.now_s + 0.095
        ends, worth = [], []
        run, rates = driver.engine._run, driver.engine._pace.rates

        def note(nodes: list[Node]) -> Work[None]:
            worth.append(sum(node.chance for node in nodes) * rates(0.7).ms_per_token)
            yield from run(nodes)
            ends.append(clock.now_s)

        driver.engine._run = note
        driver.deepen()
        assert len(ends) >= 5
        for end, gain_ms in zip(ends[1:], worth[1:], strict=True):
            assert (end - due) * 1e3 <= gain_ms + 1e-6

    def test_just_in_time_drafting_goes_as_far_as_it_pays(self, monkeypatch) -> None:
        depths = {}
        for step_ms in (0.1, 1000.0):
            driver, _ = self.driver(monkeypatch, step_ms=step_ms, verify_ms=100.0, mode="sd")
            self.resolve(driver, Outcome(0, 5), 100.0)
            depths[step_ms] = max(len(node.path()) for node in driver.engine._root.descendants())
        assert depths[1000.0] == 1
        assert depths[0.1] > 3

    def test_draft_steps_are_timed_by_the_tokens_that_they_run(self, monkeypatch) -> None:
        """Just in time too, where a step may run several nodes."""
        driver, _ = self.driver(monkeypatch, step_ms=5.0, verify_ms=500.0)
        fixed, each = driver.engine._pace.step.line
        assert fixed + each == pytest.approx(5.0 * 1.01, rel=0.05)
        assert each == pytest.approx(5.0 * 0.01, rel=0.6)

    def test_a_pause_of_the_machine_does_not_make_drafting_run_away(self, monkeypatch) -> None:
        """Rounds that seem to take minutes make tokens seem dear, so that everything seems worth to wait for."""
        driver, clock = self.driver(monkeypatch, step_ms=1.0, verify_ms=50.0, mode="sd")
        for pause_s in (0.0, 5000.0, 0.0, 0.0):
            clock.now_s += 0.05 + pause_s
            ran: list[Node] = []
            run = driver.engine._run
            with monkeypatch.context() as patch:
                patch.setattr(driver.engine, "_run", lambda nodes, ran=ran, run=run: ran.extend(nodes) or run(nodes))
                self.resolve(driver, driver.true_outcome(), 50.0)
            assert len(ran) <= driver.request.config.max_tree_tokens
            assert driver.engine._pace.rates(0.7).ms_per_token < 100.0

    def test_while_nobody_reads_the_text_memory_stays_bounded(self, monkeypatch) -> None:
        monkeypatch.setattr(engine, "MIN_CHANCE", 0.0)
        monkeypatch.setattr(engine, "MAX_PREPARED_TOKENS", 300)
        driver, _ = self.driver(monkeypatch, step_ms=1.0, verify_ms=1e9)
        driver.deepen()
        run = [node for node in driver.engine._root.descendants() if node.is_run]
        assert 300 <= len(run) < 300 + engine.MAX_STEP_TOKENS

    def test_where_verifying_is_dear_trees_are_small(self, monkeypatch) -> None:
        sizes = {}
        for ms_per_token in (0.01, 1e4):
            driver, _ = self.driver(monkeypatch, step_ms=1.0, verify_ms=50.0)
            driver.deepen()
            for _ in range(40):  # the line learns what one more token costs
                driver.engine._pace.verify.update(1, 50.0)
                driver.engine._pace.verify.update(20, 50.0 + 19 * ms_per_token)
            driver.resolve(driver.prepared()[0], 50.0)
            sizes[ms_per_token] = len(driver.last)
        assert sizes[1e4] == 1
        assert sizes[0.01] > 4


class TestDraftVocabulary:
    def test_continuations_come_from_the_active_set_and_are_its_best(self) -> None:
        driver = Driver(make_noisy(), config(draft_vocab_size=12), takes_trees=False)
        generator = random.Random(1)
        for _ in range(12):
            driver.deepen()
            active = set(driver.engine._proposer._vocabulary.tokens.tolist())
            assert set(range(12)) | set(driver.row[-20:]) <= active
            assert len(active) < VOCAB_SIZE
            driver.resolve(generator.choice(driver.prepared()))
            row = list(driver.row)
            for token in driver.last.tokens:
                assert token == next(t for t in driver.rival.ranked(row) if t in active)
                row.append(token)

    def test_outcomes_come_from_the_full_vocabulary(self) -> None:
        driver = Driver(make_noisy(), config(draft_vocab_size=4, fan_out=[20]))
        driver.deepen()
        assert len(driver.prepared()) == 20
        assert any(outcome.bonus_token >= 4 for outcome in driver.prepared())

    def test_trees_use_it_too(self) -> None:
        driver = Driver(make_noisy(), config(draft_vocab_size=12))
        generator, active = random.Random(1), set()
        for _ in range(8):
            driver.deepen()
            active |= set(driver.engine._proposer._vocabulary.tokens.tolist())
            driver.resolve(generator.choice(driver.prepared()))
            assert set(driver.last.tokens) <= active  # of this round, or of one whose drafts are left
            driver.check_cache(with_contents=True)


class Draws:
    """Notes what the engine draws for each prefix, and may put another token in the place of one draw."""

    def __init__(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch, *, instead_of: tuple[int, int] | None = None
    ) -> None:
        self.by_prefix: dict[tuple[int, ...], list[Node]] = {}
        self.place: dict[int, tuple[int, int]] = {}  # of each node: number of the call, and row in it
        self.num_calls = 0
        self.forced = -1
        draw, add = proposer.draw, driver.engine._add_drafts

        def draw_and_note(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            choices = draw(probs, generator)
            if instead_of is not None and instead_of[0] == self.num_calls:
                row = instead_of[1]
                others = probs[row].clone()
                others[choices[row]] = 0.0
                choices[row] = others.argmin() if others.min() > 0 else others.argmax()
                self.forced = int(choices[row])
            self.num_calls += 1
            return choices

        def add_and_note(nodes: Sequence[Node], *args: Any) -> None:
            before = {id(child) for node in nodes for child in node.children}
            call = self.num_calls
            add(nodes, *args)
            for row, node in enumerate(nodes):
                prefix = (*driver.engine._tokens, *(each.token for each in node.path()))
                for child in node.children:
                    if id(child) not in before:
                        self.by_prefix.setdefault(prefix, []).append(child)
                        self.place[id(child)] = (call, row)

        monkeypatch.setattr(proposer, "draw", draw_and_note)
        driver.engine._add_drafts = add_and_note  # type: ignore[method-assign]


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k and a temperature": {"processors": (TemperatureLogitsWarper(0.7), TopKLogitsWarper(5))},
    "repetition_penalty": {"processors": (RepetitionPenaltyLogitsProcessor(1.5),)},
    "draft vocabulary": {"draft_vocab_size": 12},
    "mode sd": {"mode": "sd"},
    "auto": {"num_assistant_tokens": "auto"},
    "a fixed budget": {"cache_budget": 5, "fan_out": "geometric"},
}


class TestSampling:
    def driver(self, way: str, *, overlaps: bool = True, seed: int = 3) -> Driver:
        settings = {"verification": "token", **SAMPLING[way]}
        fields = {key: settings.pop(key) for key in ("processors",) if key in settings}
        return Driver(make_noisy(), config(**settings), overlaps=overlaps, do_sample=True, seed=seed, **fields)

    @pytest.mark.parametrize("overlaps", [True, False], ids=["overlapping", "inline"])
    @pytest.mark.parametrize("way", SAMPLING)
    def test_each_token_is_drawn_once_sent_and_told_with_what_it_was_drawn_from(
        self, way: str, overlaps: bool, monkeypatch
    ) -> None:
        driver = self.driver(way, overlaps=overlaps)
        draws = Draws(driver, monkeypatch)
        generator, num_hits = random.Random(2), 0
        for _ in range(50):
            driver.deepen(generator.choice([0, 2, 3, None]))
            prepared = driver.prepared()
            is_hit = prepared and generator.random() < 0.6
            speculation = driver.resolve(generator.choice(prepared) if is_hit else driver.any_outcome(generator))
            num_hits += speculation.origin is Origin.CACHE
            assert speculation.is_chain
            row = list(driver.row)
            for token, probs in zip(speculation.tokens, speculation.draft_probs, strict=True):
                drawn = draws.by_prefix[tuple(row)]
                assert [node.token for node in drawn] == [token]  # once, and it is what is sent
                assert torch.equal(probs, drawn[0].distribution.to_dense(VOCAB_SIZE))
                expected = driver.rival.scores(row)
                if drawn[0].distribution.token_ids is not None:
                    is_active = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
                    is_active[drawn[0].distribution.token_ids] = True
                    expected = expected.masked_fill(~is_active, float("-inf"))
                    assert 12 <= is_active.sum() < VOCAB_SIZE
                torch.testing.assert_close(probs, expected.softmax(0), atol=1e-4, rtol=1e-3)
                assert probs[token] > 0
                row.append(token)
            assert tuple(row) not in draws.by_prefix, "a drawn token was not sent"
        assert num_hits > 4 or way == "mode sd"

    @pytest.mark.parametrize("way", ["plain", "auto", "mode sd", "draft vocabulary", "a fixed budget"])
    def test_whether_a_token_is_sent_does_not_depend_on_it(self, way: str, monkeypatch) -> None:
        """Each drawn token of a few rounds is replaced by the unlikeliest one: it must be sent all the same."""

        def run(instead_of: tuple[int, int] | None, num_rounds: int) -> tuple[Driver, Draws]:
            with monkeypatch.context() as patch:
                clock = FakeClock(patch)
                driver = self.driver(way)
                clock.slow_down(driver.engine.assistant, lambda n: 8.0 + n)
                draws = Draws(driver, patch, instead_of=instead_of)
                for round_ in range(num_rounds):
                    driver.deepen(4)
                    clock.now_s += 0.03
                    prepared = driver.prepared()
                    if outcomes[round_] is None:
                        outcomes[round_] = prepared[round_ % len(prepared)] if prepared else Outcome(0, 7)
                    driver.row += [*driver.path(outcomes[round_].node), outcomes[round_].bonus_token]
                    driver.last = driver.engine.resolve(outcomes[round_], 30.0 if round_ else None)
            return driver, draws

        num_checked = 0
        outcomes: list[Outcome | None] = [None] * 6
        for num_rounds in range(1, 7):
            driver, draws = run(None, num_rounds)
            for index, node in enumerate(driver.engine._sent):
                other, forced = run(draws.place[id(node)], num_rounds)
                expected = driver.last.tokens[:index]
                assert other.last.tokens[:index] == expected
                vocabulary = node.distribution.token_ids
                token = forced.forced if vocabulary is None else int(vocabulary[forced.forced])
                assert token != node.token
                assert other.last.tokens[index] == token
                num_checked += 1
        assert num_checked >= 6

    @pytest.mark.parametrize("mode", ["ssd", "sd"])
    def test_coupled_it_takes_the_likeliest_with_the_noise(self, mode: str) -> None:
        """Draft tokens and bonus tokens alike, at the place in the row that they are for."""
        processors = (RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.7), TopKLogitsWarper(9))
        settings = config(mode=mode, draft_tree_size=None)
        driver = Driver(make_noisy(), settings, do_sample=True, seed=5, processors=processors)
        noise, scores = GumbelNoise(5), driver.rival.scores
        driver.rival.scores = lambda row: scores(row) + noise([len(row)], torch.arange(VOCAB_SIZE))[0]
        generator, num_hits = random.Random(0), 0
        for _ in range(12):
            driver.deepen()
            prepared = driver.prepared()
            outcome = generator.choice(prepared) if prepared else driver.any_outcome(generator)
            speculation = driver.resolve(outcome)
            num_hits += speculation.origin is Origin.CACHE
            assert speculation.draft_probs is None
            assert speculation.tokens == driver.rival.chain(driver.row, len(speculation))
            assert len(speculation) > 0
        assert num_hits > 4 or mode == "sd"

    def test_the_seed_decides_the_draws(self) -> None:
        def tokens(seed: int) -> tuple[int, ...]:
            return self.driver("mode sd", seed=seed).resolve(Outcome(0, 5)).tokens

        assert tokens(1) == tokens(1)
        assert len({tokens(seed) for seed in range(8)}) > 1

    def test_draft_probs_are_zero_outside_the_draft_vocabulary(self) -> None:
        driver = self.driver("draft vocabulary", overlaps=False)
        driver.deepen()
        active = driver.engine._proposer._vocabulary.tokens.tolist()
        probs = driver.resolve(driver.prepared()[0]).draft_probs
        outside = [token for token in range(VOCAB_SIZE) if token not in active]
        assert probs.shape == (len(driver.last), VOCAB_SIZE)
        assert (probs[:, outside] == 0).all()
        torch.testing.assert_close(probs.sum(dim=1), torch.ones(len(driver.last)))

    def test_where_processors_leave_nothing_a_point_mass_is_drawn_from(self) -> None:
        class BansAll(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return torch.full_like(scores, float("-inf"))

        driver = Driver(make_noisy(), config(mode="sd", verification="token"), do_sample=True, processors=(BansAll(),))
        speculation = driver.resolve(Outcome(0, 5))
        assert torch.equal(speculation.draft_probs, torch.eye(VOCAB_SIZE)[list(speculation.tokens)])
