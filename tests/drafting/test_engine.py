"""The drafting engine against a naive rival that has no cache, no branches and no shared forward."""

from __future__ import annotations

import random

import pytest
import tiny_zoo
import torch
from tiny_models import VOCAB_SIZE, make_noisy, prompt
from transformers import PreTrainedModel

from hf_ssd import SSDConfig
from hf_ssd.drafting import AssistantModel, DraftEngine
from hf_ssd.protocol import DraftRequest
from hf_ssd.types import Miss, Origin, Outcome, Speculation

PROMPT = tuple(prompt(6)[0].tolist())
DEPTH = 4


def request(config: SSDConfig, **fields: object) -> DraftRequest:
    values = {"prompt_ids": PROMPT, "num_padding": 0, "vocab_size": VOCAB_SIZE, "do_sample": False}
    values["max_new_tokens"] = 10_000
    return DraftRequest(**{**values, "processors": (), "seed": 0, "config": config, **fields})


def config(**fields: object) -> SSDConfig:
    values = {"backend": "inline", "num_assistant_tokens": DEPTH, "cache_budget": 8, "draft_vocab_size": None}
    return SSDConfig(**{**values, **fields})


def greedy_tokens(model: PreTrainedModel, row: list[int], num_tokens: int) -> list[int]:
    """The naive rival: the whole row in one forward, for every token."""
    row = list(row)
    for _ in range(num_tokens):
        with torch.no_grad():
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(row) - num_tokens :] if num_tokens else []


class Driver:
    """Plays the verifier: outcomes at random, of which some are hits."""

    def __init__(self, model: PreTrainedModel, settings: SSDConfig, **fields: object) -> None:
        self.model = model
        self.engine = DraftEngine(AssistantModel(model))
        self.engine.start(request(settings, **fields))
        self.row = list(PROMPT)
        self.draft: tuple[int, ...] = ()

    def deepen(self, num_steps: int | None = None) -> int:
        done = 0
        while (num_steps is None or done < num_steps) and self.engine.deepen():
            done += 1
        return done

    def prepared(self) -> dict[Outcome, list[int]]:
        """Outcome to the draft tokens prepared for it."""
        return {branch.outcome: branch.tokens[1:] for branch in self.engine._branches}

    def resolve(self, outcome: Outcome) -> Speculation:
        speculation = self.engine.resolve(outcome)
        self.row += [*self.draft[: outcome.num_accepted], outcome.bonus_token]
        self.draft = speculation.tokens
        return speculation

    def check_cache(self) -> None:
        """All but the last token is in it. mlxcel 994: a cache trimmed one entry too far costs acceptance only."""
        assert self.engine._cache.get_seq_length() == len(self.row) + max(len(self.draft) - 1, 0) - (not self.draft)


@pytest.mark.parametrize("family", [None, "mistral, window of 8", "gemma3, mixed layers", "gpt2", "opt"])
def test_every_speculation_equals_the_rivals(family: str | None) -> None:
    """Over a long run of hits at every k, and of misses, at every depth that the time may have allowed."""
    model = make_noisy() if family is None else tiny_zoo.make(family)
    driver = Driver(model, config())
    generator = random.Random(0)
    origins = []
    for round_ in range(40 if family is None else 15):
        driver.deepen(generator.choice([0, 1, 2, 3, None]))
        prepared = driver.prepared()
        ready = [outcome for outcome, tokens in prepared.items() if tokens]
        if ready and generator.random() < 0.6:
            outcome = generator.choice(ready)
        else:
            outcome = Outcome(generator.randint(0, len(driver.draft)), generator.randrange(VOCAB_SIZE))
        speculation = driver.resolve(outcome)
        assert list(speculation.tokens) == greedy_tokens(model, driver.row, len(speculation)), f"round {round_}"
        assert speculation.parents == tuple(range(-1, len(speculation) - 1))
        assert len(speculation) >= 1
        if outcome in ready:
            assert (speculation.origin, speculation.miss) == (Origin.CACHE, None)
            assert list(speculation.tokens) == prepared[outcome]
        else:
            assert speculation.origin is Origin.JUST_IN_TIME
            assert speculation.miss is not None
        driver.check_cache()
        origins.append(speculation.origin)
    assert min(origins.count(Origin.CACHE), origins.count(Origin.JUST_IN_TIME)) >= 4


def test_drafted_work_is_not_redone() -> None:
    """A hit costs no forward: its branch's keys and hidden states are kept."""
    driver = Driver(make_noisy(), config())
    driver.deepen()
    outcome = max(driver.prepared(), key=lambda outcome: len(driver.prepared()[outcome]))
    calls = []
    driver.engine.assistant.forward = lambda *args, **kwargs: calls.append(args)  # type: ignore[method-assign]
    assert driver.resolve(outcome).origin is Origin.CACHE
    assert calls == []


def test_the_prompt_is_prepared_for_while_the_target_reads_it() -> None:
    """The prefill is the verification of an empty speculation: its likeliest first token is a hit."""
    model = make_noisy()
    driver = Driver(model, config())
    driver.deepen()
    likeliest = greedy_tokens(model, list(PROMPT), 1)[0]
    assert {outcome.num_accepted for outcome in driver.prepared()} == {0}
    assert driver.resolve(Outcome(0, likeliest)).origin is Origin.CACHE


def test_padding_is_not_read() -> None:
    model = make_noisy()
    driver = Driver(model, config(), prompt_ids=(0, 0, 0, *PROMPT), num_padding=3)
    speculation = driver.resolve(Outcome(0, 5))
    assert list(speculation.tokens) == greedy_tokens(model, [*PROMPT, 5], len(speculation))


class TestCandidates:
    def branches(self, fan_out: object, **fields: object) -> tuple[Driver, dict[int, list[int]]]:
        driver = Driver(make_noisy(), config(fan_out=fan_out, **fields))
        driver.deepen()
        driver.resolve(Outcome(0, 5))
        driver.deepen()
        by_length: dict[int, list[int]] = {}
        for outcome in driver.prepared():
            by_length.setdefault(outcome.num_accepted, []).append(outcome.bonus_token)
        return driver, by_length

    def test_a_list_of_fan_outs_is_obeyed(self) -> None:
        _, by_length = self.branches([3, 0, 2, 1, 4])
        assert {k: len(tokens) for k, tokens in by_length.items()} == {0: 3, 2: 2, 3: 1, 4: 4}

    def test_they_are_the_likeliest_but_for_the_draft_token(self) -> None:
        """A rejected draft token cannot be the bonus token: a branch for it would be wasted."""
        driver, by_length = self.branches([4] * (DEPTH + 1))
        for k, tokens in by_length.items():
            with torch.no_grad():
                row = torch.tensor([[*driver.row, *driver.draft[:k]]])
                ranked = driver.model(row).logits[0, -1].argsort(descending=True).tolist()
            if k < len(driver.draft):
                ranked.remove(driver.draft[k])
                assert driver.draft[k] not in tokens
            assert tokens == ranked[:4]

    def test_all_branches_reach_the_full_depth(self) -> None:
        driver, _ = self.branches("uniform", cache_budget=10)
        assert len(driver.prepared()) == 10
        assert {len(tokens) for tokens in driver.prepared().values()} == {DEPTH}


class TestPace:
    """The target must not wait for a step that could not end in time."""

    def driver(self, *, verify_ms: float) -> Driver:
        """After the prefill and a round that was verified in `verify_ms`."""
        driver = Driver(make_noisy(), config())
        driver.engine.resolve(Outcome(0, 5))
        driver.engine.resolve(Outcome(0, 5), verify_ms)
        return driver

    def test_the_first_step_is_always_taken_and_a_late_one_is_not(self) -> None:
        driver = self.driver(verify_ms=10.0)
        assert driver.engine.deepen()
        driver.engine._pace.step_ms = 1e6
        assert not driver.engine.deepen()
        assert {len(tokens) for tokens in driver.prepared().values()} <= {0, 1}

    def test_steps_in_time_are_all_taken(self) -> None:
        driver = self.driver(verify_ms=1e6)
        driver.deepen()
        assert {len(tokens) for tokens in driver.prepared().values()} == {DEPTH}


class TestMisses:
    def test_each_says_why(self) -> None:
        driver = Driver(make_noisy(), config(fan_out=[2, 0, 2, 2, 2]))
        assert driver.resolve(Outcome(0, 5)).miss is Miss.COLD
        driver.deepen()
        prepared = driver.prepared()
        unprepared = next(t for t in range(VOCAB_SIZE) if Outcome(0, t) not in prepared)
        assert driver.resolve(Outcome(0, unprepared)).miss is Miss.TOKEN
        driver.deepen()
        assert driver.resolve(Outcome(1, 5)).miss is Miss.LENGTH

    def test_mode_sd_prepares_nothing(self) -> None:
        driver = Driver(make_noisy(), config(mode="sd"))
        assert driver.deepen() == 0
        speculation = driver.resolve(Outcome(0, 5))
        assert (speculation.origin, speculation.miss) == (Origin.JUST_IN_TIME, Miss.COLD)


class TestDraftVocabulary:
    def test_continuations_come_from_the_active_set_and_are_its_best(self) -> None:
        model = make_noisy()
        driver = Driver(model, config(draft_vocab_size=12))
        generator = random.Random(1)
        for _ in range(12):
            driver.deepen()
            ready = sorted(driver.prepared(), key=lambda o: (o.num_accepted, o.bonus_token))
            active = set(driver.engine._proposer._vocabulary.tokens.tolist())
            assert set(range(12)) | set(driver.row[-20:]) <= active
            assert len(active) < VOCAB_SIZE
            outcome = generator.choice(ready)
            row = [*driver.row, *driver.draft[: outcome.num_accepted], outcome.bonus_token]
            speculation = driver.resolve(outcome)
            for token in speculation.tokens:
                with torch.no_grad():
                    logits = model(torch.tensor([row])).logits[0, -1]
                assert token == max(active, key=lambda t: logits[t].item())
                row.append(token)

    def test_outcomes_come_from_the_full_vocabulary(self) -> None:
        driver = Driver(make_noisy(), config(draft_vocab_size=4, fan_out=[20]))
        driver.deepen()
        assert len(driver.prepared()) == 20
        assert any(outcome.bonus_token >= 4 for outcome in driver.prepared())

    def test_draft_probs_are_zero_outside(self) -> None:
        driver = Driver(make_noisy(), config(draft_vocab_size=12), do_sample=True)
        driver.deepen()
        active = driver.engine._proposer._vocabulary.tokens.tolist()
        outcome = next(iter(driver.prepared()))
        probs = driver.resolve(outcome).draft_probs
        outside = [token for token in range(VOCAB_SIZE) if token not in active]
        assert probs.shape == (DEPTH, VOCAB_SIZE)
        assert (probs[:, outside] == 0).all()
        torch.testing.assert_close(probs.sum(dim=1), torch.ones(DEPTH))


def test_draft_probs_are_the_assistants() -> None:
    model = make_noisy()
    driver = Driver(model, config(), do_sample=True, seed=3)
    generator = random.Random(2)
    for _ in range(6):
        driver.deepen(generator.choice([0, None]))
        ready = list(driver.prepared())
        speculation = driver.resolve(generator.choice(ready) if ready else Outcome(0, 5))
        row = list(driver.row)
        for token, probs in zip(speculation.tokens, speculation.draft_probs, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(
                    probs, model(torch.tensor([row])).logits[0, -1].softmax(0), atol=1e-4, rtol=1e-3
                )
            row.append(token)


def test_the_seed_decides_the_draws() -> None:
    def tokens(seed: int) -> tuple[int, ...]:
        return Driver(make_noisy(), config(mode="sd"), do_sample=True, seed=seed).resolve(Outcome(0, 5)).tokens

    assert tokens(1) == tokens(1)
    assert len({tokens(seed) for seed in range(8)}) > 1


def test_rows_follow_each_other() -> None:
    """An engine serves many rows; nothing of the last may be left."""
    model = make_noisy()
    driver = Driver(model, config())
    driver.deepen()
    driver.resolve(Outcome(0, 5))
    driver.deepen()
    driver.engine.start(request(config(), prompt_ids=PROMPT[::-1]))
    driver.row, driver.draft = list(PROMPT[::-1]), ()
    driver.deepen()
    speculation = driver.resolve(next(iter(driver.prepared())))
    assert list(speculation.tokens) == greedy_tokens(model, driver.row, DEPTH)


def test_a_context_that_ends_stops_drafting() -> None:
    model = make_noisy(max_position_embeddings=12)
    driver = Driver(model, config())
    lengths = []
    for _ in range(8):
        driver.deepen()
        speculation = driver.resolve(Outcome(0, 5))
        lengths.append(len(speculation))
        assert not len(speculation) or len(driver.row) + len(speculation) <= 13
    assert lengths[0] > 0
    assert lengths[-1] == 0
