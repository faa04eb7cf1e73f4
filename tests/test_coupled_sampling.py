"""Coupled sampling through the whole loop: a seed gives the same tokens, whatever happens on the way."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch
from broken_models import TakesItsTime
from streamers import Listener
from tiny_models import make_noisy, make_target, make_unrelated, padded_batch, prompt
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd import SSDConfig, disable_ssd, enable_ssd
from hf_ssd.generation import generate_with_ssd, make_custom_generate
from hf_ssd.noise import GumbelNoise, derive_seed
from hf_ssd.runtime import pool
from hf_ssd.vocabulary import UnsupportedError

INLINE = {"backend": "inline", "num_assistant_tokens": 4}
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}


def sample(target, assistant=None, inputs=None, settings=None, **kwargs) -> list[list[int]]:
    config = SSDConfig(**{**INLINE, **(settings or {})})
    inputs = {"inputs": prompt(6)} if inputs is None else inputs
    ids = generate_with_ssd(target, assistant_model=assistant, ssd_config=config, **{**inputs, **SAMPLING, **kwargs})
    return ids.tolist()


def one_by_one(target, row: list[int], seed: int, processors=(), num_tokens: int = 24) -> list[int]:
    """The naive rival: the whole row in a forward per token, and the noise of its place added."""
    noise, row = GumbelNoise(seed), list(row)
    for _ in range(num_tokens):
        with torch.no_grad():
            scores = target(torch.tensor([row])).logits[:, -1]
        scores = LogitsProcessorList(processors)(torch.tensor([row]), scores)
        row.append(int((scores[0] + noise([len(row)], torch.arange(scores.shape[1]))[0]).argmax()))
    return row


@pytest.fixture
def unrelated() -> LlamaForCausalLM:
    return make_unrelated()


PROCESSORS = {
    "plain": ({}, []),
    "temperature and top_k": ({"temperature": 0.7, "top_k": 5}, [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"temperature": 1.3, "min_p": 0.1}, [TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.1)]),
    "repetition": (
        {"repetition_penalty": 1.4, "temperature": 0.9},
        [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.9)],
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_is_the_target_with_the_noise_token_by_token(target, noisy, name: str) -> None:
    settings, processors = PROCESSORS[name]
    for seed in range(6):
        expected = one_by_one(target, prompt(6)[0].tolist(), seed, processors)
        for mode in ("ar", "sd", "ssd"):
            assert sample(target, noisy, settings={"seed": seed, "mode": mode}, **settings) == [expected], mode
    assert 0 < target.ssd_stats.acceptance < 1


@pytest.mark.slow
def test_two_hundred_prompts_and_seeds(target, noisy, unrelated) -> None:
    """SSD, SD and AR, with any assistant, K, budget, tree, rounding of drafts, temperature of the assistant."""
    rng = random.Random(0)
    num_trees = num_hits = 0
    for seed in range(200):
        inputs = {"inputs": prompt(rng.randint(1, 12), seed=seed)}
        kwargs = rng.choice([settings for settings, _ in PROCESSORS.values()]) | {"max_new_tokens": 12}
        expected = sample(target, None, inputs, {"mode": "ar", "seed": seed}, **kwargs)
        settings = {
            "seed": seed,
            "mode": rng.choice(["ssd", "ssd", "sd"]),
            "num_assistant_tokens": rng.choice([1, 2, 5, "auto"]),
            "cache_budget": rng.choice([1, 3, 9, "auto"]),
            "fan_out": rng.choice(["per_instance", "geometric", "uniform", (2, 1)]),
            "draft_tree_size": rng.choice([None, 3, "auto"]),
            "draft_vocab_size": rng.choice([None, 10]),
            "assistant_temperature": rng.choice([None, 0.3, 2.0]),
            "saguaro_coefficient": rng.choice([1.0, 0.3]),
            "ngram_drafts": rng.choice([True, False]),
        }
        assert sample(target, rng.choice([noisy, noisy, unrelated]), inputs, settings, **kwargs) == expected, settings
        num_hits += target.ssd_stats.num_hits
        num_trees += any(r.num_draft_tokens > r.depth for r in target.ssd_stats.rounds)
    assert num_hits > 100
    assert num_trees > 20


@pytest.mark.parametrize("backend", [pytest.param("process", marks=pytest.mark.slow), "stream"])
def test_timing_does_not_show(target, backend: str) -> None:
    assistant = TakesItsTime(make_noisy().config).eval()
    assistant.load_state_dict(make_noisy().state_dict())
    for seed in range(5):
        expected = sample(target, None, settings={"mode": "ar", "seed": seed})
        for budget in (2, "auto"):
            settings = {"backend": backend, "seed": seed, "cache_budget": budget}
            assert sample(target, assistant, settings=settings) == expected
            assert target.ssd_stats.degraded is None
    pool.close_worker(assistant)


def test_a_worker_that_is_killed_does_not_show(target, noisy) -> None:
    settings = {"backend": "process", "seed": 3}
    expected = sample(target, None, settings={"mode": "ar", "seed": 3}, max_new_tokens=40)

    assert sample(target, noisy, settings=settings, max_new_tokens=40) == expected
    kill = Listener(12, lambda: os.kill(pool._WORKERS[noisy].pid, signal.SIGKILL))
    found = sample(target, noisy, settings=settings, max_new_tokens=40, streamer=kill)
    assert found == expected
    assert target.ssd_stats.degraded is not None
    pool.close_worker(noisy)


class TestSeeds:
    def test_rows_of_a_batch_are_as_alone(self, target, noisy) -> None:
        prompts = [prompt(3 + 2 * row, seed=row) for row in range(4)]
        batch = padded_batch(prompts)
        inputs = {"inputs": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        for mode in ("ar", "ssd"):
            together = sample(target, noisy, inputs, {"mode": mode, "seed": (5, 6, 7, 8)})
            for row, ids in enumerate(prompts):
                alone = sample(target, noisy, {"inputs": ids}, {"mode": mode, "seed": 5 + row})
                assert together[row][-24:] == alone[0][-24:]

    def test_one_seed_for_a_batch(self, target, noisy) -> None:
        inputs = {"inputs": prompt(6).expand(3, -1)}
        rows = sample(target, noisy, inputs, {"seed": 9})
        assert rows == sample(target, noisy, inputs, {"seed": [derive_seed(9, row) for row in range(3)]})
        assert rows[0] == sample(target, noisy, settings={"seed": 9})[0]
        assert len({tuple(row) for row in rows}) == 3

    def test_return_sequences_are_independent(self, target, noisy) -> None:
        rows = sample(target, noisy, settings={"seed": 9}, num_return_sequences=5)
        assert len({tuple(row) for row in rows}) == 5
        assert rows == sample(target, None, settings={"seed": 9, "mode": "ar"}, num_return_sequences=5)

    @pytest.mark.parametrize("rule", ["coupled", "token", "block"])
    def test_torch_reproduces_a_call_and_the_next_differs(self, target, noisy, rule: str) -> None:
        def two() -> list[list[list[int]]]:
            torch.manual_seed(1)
            return [sample(target, noisy, settings={"verification": rule}) for _ in range(2)]

        first, second = two()
        assert first != second
        assert two() == [first, second]

    @pytest.mark.parametrize("rule", ["coupled", "token", "block"])
    def test_a_given_seed_needs_no_generator(self, target, noisy, rule: str) -> None:
        settings = {"verification": rule, "seed": 4}
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = sample(target, noisy, settings=settings)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert sample(target, noisy, settings=settings) == first
        assert sample(target, noisy, settings={**settings, "seed": 5}) != first

    def test_a_wrong_number_of_seeds_is_refused_before_the_first_token(self, target, noisy) -> None:
        calls = []
        target.register_forward_hook(lambda *args: calls.append(1))
        with pytest.raises(ValueError, match=r"`seed` must be one number, or one for each of the 2 rows.*got 3"):
            sample(target, noisy, settings={"seed": (1, 2, 3)}, num_return_sequences=2)
        assert not calls

    def test_an_enabled_model_takes_it_from_its_settings(self, target, noisy) -> None:
        expected = sample(target, None, settings={"mode": "ar", "seed": 8})
        enable_ssd(target, noisy, SSDConfig(**INLINE, seed=8))
        assert target.generate(prompt(6), **SAMPLING).tolist() == expected
        disable_ssd(target)


class TestModeAr:
    """It needs no assistant, and serves models that could not be assisted."""

    def test_a_model_with_a_state_draws_as_transformers_does(self) -> None:
        config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0)
        model = MambaForCausalLM(config).eval()
        model.generation_config.eos_token_id = None
        torch.manual_seed(0)
        expected = model.generate(prompt(6, vocab_size=32), do_sample=True, max_new_tokens=5).tolist()
        enable_ssd(model, None, {"mode": "ar"})
        torch.manual_seed(0)
        assert model.generate(prompt(6, vocab_size=32), do_sample=True, max_new_tokens=5).tolist() == expected
        with pytest.raises(UnsupportedError, match=r"`seed` must be None for this call, but got 3.*recurrent state"):
            model.generate(prompt(6), do_sample=True, ssd_config={"mode": "ar", "seed": 3})

    @pytest.mark.parametrize("rule", ["token", "block"])
    def test_a_seed_counts_under_every_rule(self, target, rule: str) -> None:
        settings = {"mode": "ar", "verification": rule}
        first, again, other = (sample(target, None, settings={**settings, "seed": seed}) for seed in (5, 5, 6))
        assert first == again != other

    def test_a_seed_that_cannot_count_is_refused(self, target) -> None:
        with pytest.raises(UnsupportedError, match=r"`seed` must be None for this call, but got 3\. `use_cache`"):
            sample(target, None, settings={"mode": "ar", "seed": 3}, use_cache=False)

    def test_custom_generate_checks_too(self, target) -> None:
        with pytest.raises(UnsupportedError, match="beam search"):
            target.generate(
                prompt(6), custom_generate=make_custom_generate(None, {"mode": "ar"}), num_beams=3, max_new_tokens=4
            )


def test_a_stream_ends_when_a_call_is_refused(target, noisy) -> None:
    streamer = Listener()
    with pytest.raises(ValueError, match="`seed` must be one number"):
        sample(target, noisy, settings={"seed": (1, 2)}, streamer=streamer)
    assert streamer.num_ends == 1


def test_a_whole_number_is_a_temperature(target, noisy) -> None:
    settings = {"seed": 0, "verification": "token", "assistant_temperature": 1}
    assert sample(target, noisy, settings=settings) == sample(
        target, noisy, settings={**settings, "assistant_temperature": 1.0}
    )


class TestScores:
    def test_scores_are_those_of_the_target(self, target, noisy) -> None:
        """As in transformers: after the processors, without noise."""
        kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.7}
        config = SSDConfig(**INLINE, seed=2)
        out = generate_with_ssd(
            target, inputs=prompt(6), assistant_model=noisy, ssd_config=config, **SAMPLING, **kwargs
        )
        with torch.no_grad():
            logits = target(out.sequences).logits[0, 5:-1]
        torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.cat(out.scores), logits / 0.7, atol=1e-4, rtol=1e-4)

    def test_ends_at_the_end_of_the_text(self, noisy) -> None:
        target = make_target()
        for seed in range(10):
            settings = {"seed": seed}
            ids = sample(target, noisy, settings=settings, eos_token_id=[7, 9, 11, 13])[0]
            assert ids == sample(target, None, settings={**settings, "mode": "ar"}, eos_token_id=[7, 9, 11, 13])[0]
            assert not {7, 9, 11, 13} & set(ids[6:-1])
