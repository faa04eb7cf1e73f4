"""An assistant with another tokenizer: the output is the target's own, and drafts are really accepted."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from lookup_model import LookupForCausalLM
from other_tokenizer_pair import make_pair
from tiny_tokenizers import byte_fallback, byte_level, unigram, words
from transformers import pipeline

from hf_ssd import SSDConfig, checks, custom_generate_path, disable_ssd, enable_ssd, load_pair, make_custom_generate
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.token_bytes import token_bytes
from hf_ssd.translation import translation_between
from hf_ssd.vocabulary import UnsupportedError, VocabularyMismatchError

BIG, SMALL = byte_level(420), byte_level(320)
PAIRS = {
    "larger target": (BIG, SMALL),
    "larger assistant": (SMALL, BIG),
    "assistant of another kind": (BIG, byte_fallback()),
    "target of another kind": (byte_fallback(), BIG),
    "assistant without bytes": (BIG, unigram()),
}
INLINE = SSDConfig(backend="inline", num_assistant_tokens=4)
# Each of its tokens is one of any of these tokenizers, so that both models read the same.
SIMPLE = "xq zw kv qj"


def run(target, assistant, tokenizers, text: str | list[str], config: SSDConfig = INLINE, **kwargs: Any) -> SSDStats:
    """Generates both ways, compares, and returns the figures of the call."""
    inputs = tokenizers[0](text, return_tensors="pt", padding=isinstance(text, list))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    kwargs = {"max_new_tokens": 40, "do_sample": False, **kwargs}
    if kwargs["do_sample"]:
        plain = generate_with_ssd(target, **inputs, ssd_config={"mode": "ar", "seed": config.seed}, **kwargs)
    else:
        plain = target.generate(**inputs, **kwargs)
    ids = generate_with_ssd(
        target,
        **inputs,
        assistant_model=assistant,
        tokenizer=tokenizers[0],
        assistant_tokenizer=tokenizers[1],
        ssd_config=config,
        **{name: value for name, value in kwargs.items() if name != "tokenizer"},
    )
    assert ids.tolist() == plain.tolist()
    stats: SSDStats = target.ssd_stats
    assert stats.degraded is None
    return stats


def num_accepted(stats: SSDStats) -> int:
    return sum(round_.num_accepted for round_ in stats.rounds)


@pytest.fixture(scope="module")
def kept_pair():
    """For all tests with a process, which so is started once."""
    return make_pair(BIG, SMALL, own_share=0.2)


class TestTheOutputIsTheTargets:
    @pytest.mark.parametrize("name", PAIRS)
    def test_greedily(self, name):
        target, assistant = make_pair(*PAIRS[name], own_share=0.2)
        stats = run(target, assistant, PAIRS[name], "für 😀 internationalised\n", max_new_tokens=64)
        assert num_accepted(stats) > 2

    @pytest.mark.parametrize("name", PAIRS)
    def test_with_a_seed(self, name):
        """The noise is that of the target's ids; so are the processors."""
        target, assistant = make_pair(*PAIRS[name], own_share=0.2)
        config = SSDConfig(backend="inline", num_assistant_tokens=4, seed=7)
        settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2}
        stats = run(target, assistant, PAIRS[name], SIMPLE, config, **settings)
        assert num_accepted(stats) > 5

    @pytest.mark.parametrize("backend", ["process", "stream"])
    @pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "top_k": 0}])
    def test_in_a_process_and_in_a_thread(self, kept_pair, backend, settings):
        config = SSDConfig(backend=backend, num_assistant_tokens=4, seed=7)
        assert num_accepted(run(*kept_pair, (BIG, SMALL), SIMPLE, config, **settings)) > 3
        run(*kept_pair, (BIG, SMALL), "für 😀 internationalised", config, **settings)

    @pytest.mark.parametrize("name", ["larger assistant", "assistant without bytes"])
    @pytest.mark.parametrize("backup", ["ngram", "none"])
    def test_whatever_answers_a_miss(self, name, backup):
        target, assistant = make_pair(*PAIRS[name], own_share=0.2)
        config = SSDConfig(backend="inline", num_assistant_tokens=4, backup=backup)
        stats = run(target, assistant, PAIRS[name], "The cat sat. The cat sat. The cat", config)
        assert num_accepted(stats) > 0

    @pytest.mark.parametrize("name", ["larger target", "target of another kind"])
    @pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "repetition_penalty": 1.2}])
    def test_with_a_draft_vocabulary(self, name, settings):
        target, assistant = make_pair(*PAIRS[name], own_share=0.2)
        config = SSDConfig(backend="inline", num_assistant_tokens=4, draft_vocab_size=40, seed=3)
        assert num_accepted(run(target, assistant, PAIRS[name], SIMPLE, config, **settings)) > 0

    @pytest.mark.parametrize("backend", ["inline", "process"])
    def test_in_a_batch(self, kept_pair, backend):
        config = SSDConfig(backend=backend, num_assistant_tokens=4)
        stats = run(*kept_pair, (BIG, SMALL), [SIMPLE, "The cat", "für 😀 Größe und"], config)
        assert {round_.row for round_ in stats.rounds} == {0, 1, 2}
        assert num_accepted(stats) > 10

    def test_padded_vocabularies(self):
        target, assistant = make_pair(BIG, SMALL, own_share=0.2, padding=32)
        assert num_accepted(run(target, assistant, (BIG, SMALL), SIMPLE)) > 5

    @pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 6])
    def test_no_more_than_was_asked_for(self, max_new_tokens):
        target, assistant = make_pair(BIG, SMALL)
        run(target, assistant, (BIG, SMALL), SIMPLE, max_new_tokens=max_new_tokens)

    def test_it_ends_where_the_target_does(self):
        target, assistant = make_pair(BIG, SMALL, own_share=0.2)
        inputs = BIG(SIMPLE, return_tensors="pt")["input_ids"]
        ids = target.generate(inputs, max_new_tokens=30, do_sample=False)[0, inputs.shape[1] :].tolist()
        run(target, assistant, (BIG, SMALL), SIMPLE, eos_token_id=ids[12])
        text = BIG.decode(ids[8:10])
        run(target, assistant, (BIG, SMALL), SIMPLE, stop_strings=[text], tokenizer=BIG)

    def test_a_grammar_of_the_targets_tokens(self):
        target, assistant = make_pair(BIG, SMALL, own_share=0.2)
        allowed = [index for index, data in token_bytes(BIG).items() if data.isalpha() or data == b" "]
        stats = run(
            target,
            assistant,
            (BIG, SMALL),
            SIMPLE,
            prefix_allowed_tokens_fn=lambda row, ids: allowed[len(ids) % 3 :: 3],
        )
        assert num_accepted(stats) > 5

    def test_an_assistant_with_a_shorter_context(self):
        target, assistant = make_pair(SMALL, BIG, own_share=0.2, max_position_embeddings=32)
        stats = run(target, assistant, (SMALL, BIG), SIMPLE, max_new_tokens=64)
        num_before = sum(round_.num_accepted for round_ in stats.rounds[: len(stats.rounds) // 2])
        assert num_before > 10


class TestAcceptance:
    """The assistant has the target's weights, so all that it can say it says right."""

    CHAIN = SSDConfig(
        backend="inline",
        num_assistant_tokens=4,
        draft_tree_size=None,
        ngram_drafts=False,
        cache_budget=10,
        fan_out="uniform",
    )

    @pytest.mark.parametrize("name", ["larger target", "larger assistant"])
    def test_what_both_read_alike_is_accepted_and_prepared_for(self, name):
        target, assistant = make_pair(*PAIRS[name], own_share=0.0)
        stats = run(target, assistant, PAIRS[name], SIMPLE, self.CHAIN, max_new_tokens=60)
        assert (stats.acceptance, stats.hit_rate, stats.tokens_per_round) == (1.0, 1.0, pytest.approx(5.0, abs=0.5))

    def test_it_does_not_fade_after_tokens_that_are_not_shared(self):
        """Every fourth of the target's tokens is none of the assistant's, which drafts the three between."""
        tokenizers = words(["a", "b", "c", "other"]), words(["?", "c", "b", "a", "unseen"])
        target = _table([1, 2, 3, 0])
        assistant = _table([3, 0, 1, 2, 0])  # what it does not know is "?" to it, and an "a" comes after it
        stats = run(target, assistant, tokenizers, "a b c other a", self.CHAIN, max_new_tokens=100)
        assert stats.tokens_per_round == pytest.approx(4.0, abs=0.25)
        assert all(round_.num_accepted == 3 for round_ in stats.rounds[1:-1])
        # Copies may hold any token.
        stats = run(target, assistant, tokenizers, "a b c other a", max_new_tokens=100)
        assert stats.tokens_per_round > 4.2

    @pytest.mark.parametrize("assistant_tokenizer", [SMALL, byte_fallback(), unigram()])
    def test_it_does_not_fade_after_characters_of_several_tokens(self, assistant_tokenizer):
        """After each emoji, of tokens that may be others or none of the assistant's, it is right again."""
        tokenizers = BIG, assistant_tokenizer
        text = "🚀xqz"
        target, assistant = _repeating(BIG, text), _repeating(assistant_tokenizer, text)
        stats = run(target, assistant, tokenizers, "a" + text, self.CHAIN, max_new_tokens=120)
        accepted = [round_.num_accepted for round_ in stats.rounds]
        half = len(accepted) // 2
        assert sum(accepted[half:]) >= 0.8 * sum(accepted[:half])
        assert stats.tokens_per_round > 1.5


def _table(following: list[int]) -> LookupForCausalLM:
    """After each token the one that is given for it."""
    table = torch.full((len(following), len(following)), -9.0)
    table[range(len(following)), following] = 0.0
    return LookupForCausalLM.of(table)


def _repeating(tokenizer: Any, text: str) -> LookupForCausalLM:
    """After each token that which follows it in the text, which no token is in twice."""
    ids = tokenizer("a" + text + text, add_special_tokens=False)["input_ids"]
    following = [0] * len(tokenizer)
    for before, after in pairwise(ids):
        following[before] = after
    return _table(following)


class TestWaysToCall:
    @pytest.fixture
    def pair(self):
        return make_pair(BIG, SMALL, own_share=0.2)

    def test_enabled_once_later_calls_need_no_tokenizers(self, pair):
        target, assistant = pair
        inputs = BIG(SIMPLE, return_tensors="pt")["input_ids"]
        plain = target.generate(inputs, max_new_tokens=30, do_sample=False)
        enable_ssd(target, assistant, {"backend": "inline"}, tokenizer=BIG, assistant_tokenizer=SMALL)
        try:
            assert target.generate(inputs, max_new_tokens=30, do_sample=False).tolist() == plain.tolist()
            assert num_accepted(target.ssd_stats) > 3
            enable_ssd(target, ssd_config={"backend": "inline", "mode": "sd"})
            assert target.generate(inputs, max_new_tokens=30, do_sample=False).tolist() == plain.tolist()
            assert num_accepted(target.ssd_stats) > 3
            generate = pipeline("text-generation", model=target, tokenizer=BIG)
            text = generate(SIMPLE, max_new_tokens=30, do_sample=False)[0]["generated_text"]
            assert text == BIG.decode(plain[0], skip_special_tokens=True)
        finally:
            disable_ssd(target)

    def test_enabled_a_call_with_mode_ar_needs_no_assistant(self, pair):
        target, assistant = pair
        inputs = BIG(SIMPLE, return_tensors="pt")["input_ids"]
        plain = target.generate(inputs, max_new_tokens=10, do_sample=False)
        ids = generate_with_ssd(
            target,
            inputs=inputs,
            assistant_model=assistant,
            tokenizer=BIG,
            assistant_tokenizer=SMALL,
            ssd_config={"mode": "ar"},
            max_new_tokens=10,
            do_sample=False,
        )
        assert ids.tolist() == plain.tolist()

    def test_custom_generate(self, pair):
        target, assistant = pair
        inputs = BIG(SIMPLE, return_tensors="pt")["input_ids"]
        kwargs = {"max_new_tokens": 30, "do_sample": False}
        plain = target.generate(inputs, **kwargs)
        custom = make_custom_generate(assistant, {"backend": "inline"}, tokenizer=BIG, assistant_tokenizer=SMALL)
        assert target.generate(inputs, custom_generate=custom, **kwargs).tolist() == plain.tolist()
        assert num_accepted(target.ssd_stats) > 3
        ids = target.generate(
            inputs,
            custom_generate=custom_generate_path(),
            trust_remote_code=True,
            assistant_model=assistant,
            tokenizer=BIG,
            assistant_tokenizer=SMALL,
            ssd_config={"backend": "inline"},
            **kwargs,
        )
        assert ids.tolist() == plain.tolist()
        assert num_accepted(target.ssd_stats) > 3

    def test_load_pair_takes_the_tokenizers_from_the_folders(self, pair, tmp_path):
        for name, model, tokenizer in zip(("target", "assistant"), pair, (BIG, SMALL), strict=True):
            model.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        folders = str(tmp_path / "target"), str(tmp_path / "assistant")
        loaded = load_pair(*folders, ssd_config={"backend": "inline"})
        assert len(loaded) == 3
        assert loaded.assistant_tokenizer.get_vocab() == SMALL.get_vocab()
        inputs = loaded.tokenizer(SIMPLE, return_tensors="pt")["input_ids"]
        plain = pair[0].generate(inputs, max_new_tokens=30, do_sample=False)
        assert loaded.target.generate(inputs, max_new_tokens=30, do_sample=False).tolist() == plain.tolist()
        assert num_accepted(loaded.target.ssd_stats) > 3

    def test_one_process_serves_targets_of_several_tokenizers(self, kept_pair):
        target, assistant = kept_pair
        config = SSDConfig(backend="process", num_assistant_tokens=4)
        # The assistant itself, and one that has its tokenizer.
        other, _ = make_pair(byte_fallback(), SMALL, own_share=0.2)
        same = make_pair(BIG, SMALL)[1]
        inputs = SMALL(SIMPLE, return_tensors="pt")["input_ids"]
        kwargs = {"max_new_tokens": 20, "do_sample": False}
        for _ in range(2):
            assert num_accepted(run(target, assistant, (BIG, SMALL), SIMPLE, config)) > 3
            run(other, assistant, (byte_fallback(), SMALL), SIMPLE, config)
            ids = generate_with_ssd(same, inputs=inputs, assistant_model=assistant, ssd_config=config, **kwargs)
            assert ids.tolist() == same.generate(inputs, **kwargs).tolist()
            assert same.ssd_stats.acceptance > 0.5

    def test_a_tokenizer_that_cannot_be_sent(self, kept_pair, monkeypatch):
        target, assistant = kept_pair
        inputs = BIG(SIMPLE, return_tensors="pt")["input_ids"]
        translation = translation_between(BIG, SMALL, len(BIG), len(SMALL))
        assert translation is not None
        local = dataclasses.replace(translation, encode_text=lambda text: SMALL(text)["input_ids"])
        monkeypatch.setattr(checks, "translation_between", lambda *args: local)
        plain = target.generate(inputs, max_new_tokens=20, do_sample=False)
        ids = generate_with_ssd(
            target,
            inputs=inputs,
            assistant_model=assistant,
            tokenizer=BIG,
            assistant_tokenizer=SMALL,
            ssd_config={"backend": "process"},
            max_new_tokens=20,
            do_sample=False,
        )
        assert ids.tolist() == plain.tolist()
        assert "tokenizer cannot be sent" in target.ssd_stats.degraded


class TestWithoutNeed:
    def test_equal_tokenizers_translate_nothing(self):
        target = make_pair(BIG, SMALL)[0]
        again = byte_level(420, eos="<eos>")
        inputs = BIG("für 😀 internationalised", return_tensors="pt")["input_ids"]
        kwargs = {"max_new_tokens": 40, "do_sample": False}
        plain = target.generate(inputs, **kwargs)
        ids = generate_with_ssd(
            target,
            inputs=inputs,
            assistant_model=target,
            tokenizer=BIG,
            assistant_tokenizer=again,
            ssd_config=TestAcceptance.CHAIN,
            **kwargs,
        )
        assert ids.tolist() == plain.tolist()
        assert target.ssd_stats.acceptance == 1.0


class TestRefusals:
    def refused(self, match: str, error: type[Exception] = UnsupportedError, **kwargs: Any) -> None:
        target, assistant = make_pair(BIG, SMALL)
        inputs = BIG(SIMPLE, return_tensors="pt")["input_ids"]
        with pytest.raises(error, match=match):
            generate_with_ssd(target, inputs=inputs, assistant_model=assistant, ssd_config=INLINE, **kwargs)
        with pytest.raises(error, match=match):
            enable_ssd(target, assistant, INLINE, **kwargs)

    def test_no_tokenizers(self):
        self.refused(
            "knows 320 tokens and the target 409.* Pass both tokenizers, `tokenizer` .* and `assistant_tokenizer`",
            VocabularyMismatchError,
        )

    def test_one_without_the_other(self):
        self.refused("`tokenizer` must be a tokenizer, but got None.*needs both", assistant_tokenizer=SMALL)

    def test_something_else(self):
        self.refused("`assistant_tokenizer` must be a tokenizer, but got 'x'", tokenizer=BIG, assistant_tokenizer="x")

    def test_too_few_shared_tokens(self):
        other = words(["?", *(f"unheard of {index}" for index in range(319))])
        self.refused("only 0 of 320 tokens are the same", tokenizer=BIG, assistant_tokenizer=other)
