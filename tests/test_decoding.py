"""The round loop under every argument of `generate()` that shapes a text or ends it: each time `=AR`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from grammar import words_only
from plain import INLINE, assert_equals_plain
from streamers import Criterion, Listener
from tiny_models import make_noisy, make_target, prompt
from tiny_pair import byte_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache

from hf_ssd import SSDConfig
from hf_ssd.compat import CACHE_KEY
from hf_ssd.generation import generate_with_ssd

PROCESS = SSDConfig(num_assistant_tokens=4)


def ssd(target, assistant, input_ids, **kwargs):
    kwargs = {"ssd_config": INLINE, "do_sample": False, **kwargs}
    return generate_with_ssd(target, inputs=input_ids, assistant_model=assistant, **kwargs)


class Bans(LogitsProcessor):
    """Bans the tokens of `banned`."""

    def __init__(self, banned: list[int]) -> None:
        self.banned = banned

    def __call__(self, input_ids, scores):
        scores[:, self.banned] = float("-inf")  # in place, as some do
        return scores


class Alternates(LogitsProcessor):
    """Allows even tokens at even lengths and odd ones at odd lengths: wrong at once with a wrong prefix."""

    def __call__(self, input_ids, scores):
        forbidden = torch.arange(scores.shape[1]) % 2 != input_ids.shape[1] % 2
        return scores.masked_fill(forbidden, float("-inf"))


def using(processor: LogitsProcessor):
    """For `assert_equals_plain`, which makes a list of its own for each way."""
    return lambda: LogitsProcessorList([processor])


class TestLength:
    @pytest.mark.parametrize("max_new_tokens", range(1, INLINE.max_draft_tokens + 3))
    def test_never_more_than_max_new_tokens(self, target, twin, prompt_ids, max_new_tokens) -> None:
        """HF46993. With an assistant that is always right, every round would overshoot."""
        assert_equals_plain(target, twin, prompt_ids, max_new_tokens=max_new_tokens)

    def test_a_prompt_of_one_token(self, target, assistant) -> None:
        """mlx-lm 1109: a prefill done differently flips the first token."""
        assert_equals_plain(target, assistant, prompt(1), max_new_tokens=30)

    def test_max_length(self, target, noisy, prompt_ids) -> None:
        assert_equals_plain(target, noisy, prompt_ids, max_length=17)

    def test_no_prompt_but_the_bos_token(self, noisy) -> None:
        target = make_target(bos_token_id=2)
        target.generation_config.bos_token_id = 2
        plain = target.generate(max_new_tokens=12, do_sample=False)
        assert ssd(target, noisy, None, max_new_tokens=12).tolist() == plain.tolist()


class TestStopping:
    @pytest.fixture
    def text(self, target, prompt_ids) -> list[int]:
        """What T writes."""
        return target.generate(prompt_ids, max_new_tokens=40, do_sample=False)[0, prompt_ids.shape[1] :].tolist()

    @pytest.mark.parametrize("position", [0, 2, 3, 7, 8])
    def test_an_eos_in_the_middle_of_a_draft_ends_everything_there(
        self, target, twin, prompt_ids, text, position
    ) -> None:
        """HF48981: ids, cache, scores and streamer, each stop there."""
        eos = text[position]
        kwargs = {
            "max_new_tokens": 40,
            "eos_token_id": eos,
            "return_dict_in_generate": True,
            "output_scores": True,
            "do_sample": False,
        }
        plain = target.generate(prompt_ids, **kwargs)
        streamer = Listener()
        output = ssd(target, twin, prompt_ids, streamer=streamer, **kwargs)
        assert output.sequences.tolist() == plain.sequences.tolist()
        assert output.sequences[0, -1] == eos
        assert output[CACHE_KEY].get_seq_length() == plain[CACHE_KEY].get_seq_length() == output.sequences.shape[1] - 1
        assert len(output.scores) == len(plain.scores)
        assert [token for put in streamer.puts for token in put] == output.sequences[0].tolist()

    def test_a_list_of_eos_tokens(self, target, assistant, prompt_ids, text) -> None:
        assert_equals_plain(target, assistant, prompt_ids, max_new_tokens=40, eos_token_id=[text[22], text[17], 63])

    def test_no_eos_token(self, target, noisy, prompt_ids) -> None:
        """HF46790."""
        assert_equals_plain(target, noisy, prompt_ids, max_new_tokens=20, eos_token_id=None)

    def test_min_new_tokens(self, target, twin, prompt_ids, text) -> None:
        """The EOS is banned up to a length that falls inside a draft."""
        stats = assert_equals_plain(
            target, twin, prompt_ids, max_new_tokens=40, min_new_tokens=11, eos_token_id=[text[4], text[9]]
        )
        assert stats.num_tokens > 11

    def test_stop_strings(self, prompt_ids) -> None:
        tokenizer = byte_tokenizer()
        target, noisy = make_target(vocab_size=len(tokenizer)), make_noisy(vocab_size=len(tokenizer))
        text = target.generate(prompt_ids, max_new_tokens=40, do_sample=False)[0, prompt_ids.shape[1] :]
        stop = next(t for t in (tokenizer.decode(text[i : i + 2]) for i in range(14, 38)) if t.isascii())
        stats = assert_equals_plain(
            target, noisy, prompt_ids, max_new_tokens=40, stop_strings=[stop], tokenizer=tokenizer
        )
        assert stats.num_tokens < 40

    def test_max_time_ends_at_the_first_token_if_it_is_over(self, target, twin, prompt_ids) -> None:
        ids = ssd(target, twin, prompt_ids, max_new_tokens=40, max_time=1e-9)
        assert ids.shape[1] == prompt_ids.shape[1] + 1

    def test_a_users_criterion_sees_every_length_once(self, target, twin, prompt_ids) -> None:
        """It is asked after each token, as in plain decoding, and not once per round."""
        seen: list[list[int]] = []

        def stops_at_12(ids: torch.Tensor) -> bool:
            seen.append(ids[0].tolist())
            return ids.shape[1] == 12

        ids = ssd(
            target,
            twin,
            prompt_ids,
            max_new_tokens=40,
            stopping_criteria=StoppingCriteriaList([Criterion(stops_at_12)]),
        )
        assert ids.shape[1] == 12
        assert seen == [ids[0, :length].tolist() for length in range(7, 13)]

    def test_a_criterion_that_reads_scores(self, target, twin, prompt_ids) -> None:
        lengths = []

        class ReadsScores(Criterion):
            def __call__(self, input_ids, scores, **kwargs):
                lengths.append(len(scores))
                return super().__call__(input_ids, scores)

        criteria = StoppingCriteriaList([ReadsScores(lambda ids: False)])
        options = {"return_dict_in_generate": True, "output_scores": True}
        ssd(target, twin, prompt_ids, max_new_tokens=10, stopping_criteria=criteria, **options)
        assert lengths == list(range(1, 11))


class TestProcessors:
    @pytest.mark.parametrize(
        "settings",
        [
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [9, 11]]},
            {"encoder_repetition_penalty": 1.5},
            {"suppress_tokens": [3, 5, 8], "begin_suppress_tokens": [1, 2]},
            {"forced_eos_token_id": 5},
            {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 9},
            {"sequence_bias": {(9,): 3.0, (4, 6): -5.0}},
            {"remove_invalid_values": True, "renormalize_logits": True},
        ],
        ids=lambda settings: "+".join(settings),
    )
    def test_transformers_own(self, target, assistant, prompt_ids, settings) -> None:
        """VL22987: drift, when a processor is applied to the wrong prefix."""
        assert_equals_plain(target, assistant, prompt_ids, max_new_tokens=60, **settings)

    def test_a_watermark(self, target, noisy, prompt_ids) -> None:
        from transformers import WatermarkingConfig

        assert_equals_plain(target, noisy, prompt_ids, max_new_tokens=30, watermarking_config=WatermarkingConfig())

    def test_they_help_the_assistant_too(self, target, shared_twin, prompt_ids) -> None:
        """A processor that never reached the assistant would show in the acceptance only."""
        for backend in ("inline", "process"):
            # Of a tree it is not always the likeliest token that is sent, and copied tokens are not the assistant's.
            settings = {"num_assistant_tokens": 4, "draft_tree_size": None, "ngram_drafts": False, "backup": "jit"}
            config = SSDConfig(backend=backend, **settings)
            stats = assert_equals_plain(
                target, shared_twin, prompt_ids, config, max_new_tokens=60, logits_processor=using(Bans([1, 9]))
            )
            assert stats.acceptance == 1.0

    @pytest.mark.parametrize("processor", [Bans(list(range(0, 64, 3))), Alternates()], ids=["bans", "alternates"])
    @pytest.mark.parametrize("config", [INLINE, PROCESS], ids=["inline", "process"])
    def test_a_users_own(self, target, shared_noisy, prompt_ids, processor, config) -> None:
        """SG26330: a custom processor bypassed."""
        stats = assert_equals_plain(
            target, shared_noisy, prompt_ids, config, max_new_tokens=60, logits_processor=using(processor)
        )
        assert stats.acceptance > 0.3

    def test_one_that_cannot_be_pickled_is_only_slower(self, target, shared_noisy, prompt_ids) -> None:
        banned = list(range(0, 64, 3))

        class Local(Bans):
            def __init__(self) -> None:
                super().__init__(banned)
                self.reason = lambda: "no pickle takes this"

        assert_equals_plain(
            target, shared_noisy, prompt_ids, PROCESS, max_new_tokens=60, logits_processor=using(Local())
        )

    def test_one_that_only_exists_here_is_only_slower(self, target, shared_noisy, prompt_ids, monkeypatch) -> None:
        """It can be pickled, but the assistant's process cannot make it."""
        monkeypatch.setattr(Alternates, "__module__", "__main__")
        import __main__

        monkeypatch.setattr(__main__, "Alternates", Alternates, raising=False)
        assert_equals_plain(
            target, shared_noisy, prompt_ids, PROCESS, max_new_tokens=30, logits_processor=using(Alternates())
        )

    def test_one_that_leaves_a_single_token(self, target, noisy, prompt_ids) -> None:
        """MTPLX 82: an empty residual. Sampled, and equal to plain decoding, as nothing is left to chance."""

        def only(batch_id: int, ids: torch.Tensor) -> list[int]:
            return [(int(ids[-1]) + 1) % 64]

        for do_sample in (False, True):
            assert_equals_plain(
                target, noisy, prompt_ids, max_new_tokens=20, prefix_allowed_tokens_fn=only, do_sample=do_sample
            )

    @pytest.mark.parametrize("config", [INLINE, PROCESS], ids=["inline", "process"])
    def test_a_grammar_that_does_not_know_other_prefixes(self, target, shared_noisy, config) -> None:
        """It raises on a prefix off its trie, also after the end: draft tokens must not lead it there."""
        allowed = words_only([[11, 12, 13, 1], [11, 15, 16, 1], [21, 22, 23, 1]], num_prompt_tokens=3)

        for seed in range(4):
            assert_equals_plain(
                target,
                shared_noisy,
                prompt(3, seed=seed),
                config,
                max_new_tokens=20,
                eos_token_id=1,
                prefix_allowed_tokens_fn=allowed,
            )

    def test_a_tiny_temperature(self, target, noisy, prompt_ids) -> None:
        """NeMo Automodel 3627: NaN."""
        ids = ssd(target, noisy, prompt_ids, max_new_tokens=40, do_sample=True, temperature=1e-6)
        greedy = target.generate(prompt_ids, max_new_tokens=40, do_sample=False)
        assert ids.tolist() == greedy.tolist()

    @pytest.mark.parametrize(
        "settings", [{"temperature": 0.7, "top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}, {"repetition_penalty": 1.3}]
    )
    def test_an_assistant_that_is_the_target_has_every_draw_accepted(
        self, target, shared_twin, prompt_ids, settings
    ) -> None:
        """So p and q went through the same processors: a difference would reject."""
        for config in (INLINE, PROCESS):
            own_word = dataclasses.replace(config, ngram_drafts=False, backup="jit")  # copied tokens may be wrong
            ssd(target, shared_twin, prompt_ids, ssd_config=own_word, max_new_tokens=60, do_sample=True, **settings)
            assert target.ssd_stats.acceptance > 0.99
            assert target.ssd_stats.degraded is None


class TestOutput:
    OPTIONS = {  # noqa: RUF012
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_attentions": True,
        "output_hidden_states": True,
        "max_new_tokens": 20,
        "do_sample": False,
    }

    def test_every_field_equals_plain_generates(self, assistant, prompt_ids) -> None:
        target = make_target(attn_implementation="eager")
        settings = {**self.OPTIONS, "repetition_penalty": 1.3}
        plain = target.generate(prompt_ids, **settings)
        output = ssd(target, assistant, prompt_ids, **settings)
        assert set(output) - {"ssd_stats"} == set(plain)
        assert output.ssd_stats is target.ssd_stats
        assert output.sequences.tolist() == plain.sequences.tolist()
        for name in ("scores", "logits"):
            torch.testing.assert_close(output[name], plain[name], atol=1e-4, rtol=1e-4)
        for name in ("attentions", "hidden_states"):
            assert len(output[name]) == len(plain[name]) == 20
            for step, expected in zip(output[name], plain[name], strict=True):
                assert isinstance(step, tuple)
                torch.testing.assert_close(step, expected, atol=1e-4, rtol=1e-4)
        cache, expected_cache = output[CACHE_KEY], plain[CACHE_KEY]
        assert type(cache) is type(expected_cache)
        assert cache.get_seq_length() == expected_cache.get_seq_length()
        for layer, expected in zip(cache.layers, expected_cache.layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer.values, expected.values, atol=1e-4, rtol=1e-4)

    def test_fields_that_were_not_asked_for_are_none(self, target, noisy, prompt_ids) -> None:
        output = ssd(target, noisy, prompt_ids, return_dict_in_generate=True, max_new_tokens=5)
        assert output.scores is output.logits is output.attentions is output.hidden_states is None

    def test_a_chat_with_a_cache_of_the_callers_own(self, target, noisy, prompt_ids) -> None:
        """SG8726: prefix reuse. Three turns, the second and third on top of what the cache holds."""
        plain_cache, cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
        plain_ids = ids = prompt_ids
        for turn in range(3):
            plain_ids = target.generate(plain_ids, max_new_tokens=12, do_sample=False, **{CACHE_KEY: plain_cache})
            ids = ssd(target, noisy, ids, max_new_tokens=12, **{CACHE_KEY: cache})
            assert ids.tolist() == plain_ids.tolist()
            assert cache.get_seq_length() == plain_cache.get_seq_length() == ids.shape[1] - 1
            plain_ids = ids = torch.cat([ids, prompt(4, seed=turn + 1)], dim=1)

    def test_the_cache_of_one_call_serves_the_next(self, target, noisy, prompt_ids) -> None:
        first = ssd(target, noisy, prompt_ids, return_dict_in_generate=True, max_new_tokens=12)
        longer = torch.cat([first.sequences, prompt(3)], dim=1)
        expected = target.generate(longer, max_new_tokens=12, do_sample=False)
        assert (
            ssd(target, noisy, longer, max_new_tokens=12, **{CACHE_KEY: first[CACHE_KEY]}).tolist() == expected.tolist()
        )
        # And transformers' own generate() can go on with it.
        again = ssd(target, noisy, prompt_ids, return_dict_in_generate=True, max_new_tokens=12)
        plain = target.generate(longer, max_new_tokens=12, do_sample=False, **{CACHE_KEY: again[CACHE_KEY]})
        assert plain.tolist() == expected.tolist()


class TestStats:
    def test_counts_add_up(self, target, noisy, prompt_ids) -> None:
        ssd(target, noisy, prompt_ids, max_new_tokens=120)
        stats = target.ssd_stats
        assert stats.num_tokens == 120
        assert 1 + sum(r.num_emitted for r in stats.rounds) == 120  # the prefill gives the first
        assert all(r.num_accepted <= min(r.num_draft_tokens, r.depth) for r in stats.rounds)
        assert all(r.num_reached - r.num_accepted in (0, 1) for r in stats.rounds)
        assert any(r.num_draft_tokens > r.depth for r in stats.rounds)  # trees
        assert stats.num_hits + stats.num_misses == stats.num_rounds
        assert min(stats.num_hits, stats.num_misses) > 2

    def test_hits_are_worth_something(self, target, noisy, twin, prompt_ids) -> None:
        """ssd-macos: 99 % hits and slower than AR. So hold the tokens per target forward beside the hit rate."""
        settings = {"backend": "inline", "num_assistant_tokens": 4, "draft_tree_size": None, "fan_out": [3]}
        ssd(target, twin, prompt_ids, max_new_tokens=60, ssd_config=settings)
        assert target.ssd_stats.hit_rate > 0.9
        assert target.ssd_stats.tokens_per_round > 4.5  # of at most 5
        ssd(target, noisy, prompt_ids, max_new_tokens=60, ssd_config=settings)
        ssd_rate = target.ssd_stats.tokens_per_round
        ssd(target, noisy, prompt_ids, max_new_tokens=60, ssd_config={**settings, "mode": "sd"})
        # The same drafts, prepared or just in time.
        assert ssd_rate == pytest.approx(target.ssd_stats.tokens_per_round, rel=0.05)

    def test_a_trace_has_both_sides(self, target, shared_noisy, prompt_ids) -> None:
        ssd(target, shared_noisy, prompt_ids, max_new_tokens=30, ssd_config={"trace": True})
        stats = target.ssd_stats
        assert {"prefill", "verify", "wait", "emit"} <= {span.name for span in stats.verifier_spans}
        assert {"prefill", "draft step", "rank outcomes"} <= {span.name for span in stats.speculator_spans}
        assert all(span.start_ns <= span.end_ns for span in (*stats.verifier_spans, *stats.speculator_spans))
        # One clock: what the assistant did lies within the call.
        assert stats.start_s * 1e9 <= min(span.start_ns for span in stats.speculator_spans)
        assert max(span.end_ns for span in stats.speculator_spans) <= stats.end_s * 1e9
