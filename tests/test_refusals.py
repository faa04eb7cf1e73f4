"""What is refused: before the first token, and saying what to do instead."""

from __future__ import annotations

import pytest
from streamers import Criterion, Listener
from tiny_models import VOCAB_SIZE, make_noisy, make_target, padded_batch, prompt
from transformers import (
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_ssd import enable_ssd, make_custom_generate
from hf_ssd.checks import UnsupportedError
from hf_ssd.compat import CACHE_KEY
from hf_ssd.generation import generate_with_ssd
from hf_ssd.vocabulary import VocabularyMismatchError

INLINE = {"backend": "inline"}
REMEDY = r'`ssd_config=\{"mode": "ar"\}`'


def mamba() -> MambaForCausalLM:
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).eval()


def t5() -> T5ForConditionalGeneration:
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config).eval()


def assert_refused(target, assistant, match: str, error: type[Exception] = UnsupportedError, **kwargs: object) -> None:
    """Refused by a call of its own, before anything was seen of it."""
    seen: list[object] = []
    streamer = Listener()
    if "streamer" not in kwargs and kwargs.get("num_beams") is None:
        kwargs["streamer"] = streamer
    criteria = StoppingCriteriaList([Criterion(lambda ids: seen.append(ids))])
    if "input_ids" not in kwargs and "inputs_embeds" not in kwargs:
        kwargs["inputs"] = prompt(6)
    with pytest.raises(error, match=match):
        generate_with_ssd(
            target,
            assistant_model=assistant,
            ssd_config=INLINE,
            max_new_tokens=4,
            stopping_criteria=criteria,
            **kwargs,
        )
    assert seen == []
    assert len(streamer.puts) <= 1, "more than the prompt"


class TestModels:
    def test_a_recurrent_target(self, noisy) -> None:
        """HF46741: its state cannot be rewound, and the output would be wrong in silence."""
        assert_refused(mamba(), noisy, f"MambaForCausalLM keeps a recurrent state.*{REMEDY}")

    def test_a_recurrent_assistant(self, target) -> None:
        assert_refused(target, mamba(), "The assistant .*MambaForCausalLM keeps a recurrent state")

    def test_an_encoder_decoder_target(self, noisy) -> None:
        assert_refused(t5(), noisy, "LlamaForCausalLM drafts for T5ForConditionalGeneration. Choose an encoder-decoder")

    def test_an_encoder_decoder_assistant(self, target) -> None:
        assert_refused(target, t5(), "must be decoder-only .* T5ForConditionalGeneration drafts for LlamaForCausalLM")

    def test_another_vocabulary(self, target) -> None:
        """HF46936."""
        other = make_noisy(vocab_size=32)
        assert_refused(target, other, "knows 32 tokens and the target 64", VocabularyMismatchError)

    def test_no_assistant(self, target) -> None:
        assert_refused(target, None, '`assistant_model` must be given for mode "ssd", but got None')

    def test_an_assistant_that_is_no_model(self, target) -> None:
        assert_refused(target, "gpt2", "The assistant must be a transformers model, but got str")

    @pytest.mark.parametrize("make", [mamba, t5])
    def test_enable_refuses_a_pair_at_once(self, target, make) -> None:
        with pytest.raises(UnsupportedError, match=r"The assistant must|must be decoder-only"):
            enable_ssd(target, assistant_model=make(), ssd_config=INLINE)
        assert "_ssd_attachment" not in vars(target)

    def test_the_callable_refuses_too(self, target) -> None:
        with pytest.raises(UnsupportedError, match="MambaForCausalLM"):
            target.generate(prompt(6), custom_generate=make_custom_generate(mamba(), INLINE), max_new_tokens=4)


class TestArguments:
    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"num_beams": 3}, f"ask for beam search.*{REMEDY}"),
            ({"num_beams": 3, "do_sample": True}, "ask for beam sample"),
            ({"use_cache": False}, f"`use_cache` must be True, but got False.*{REMEDY}"),
            ({"cache_implementation": "quantized"}, f'`cache_implementation` .*got "quantized".*{REMEDY}'),
            ({"guidance_scale": 1.5}, f"`guidance_scale` must be None, but got 1.5.*{REMEDY}"),
            ({"synced_gpus": True}, f"`synced_gpus` must be False.*{REMEDY}"),
            ({"assistant_tokenizer": object()}, "`tokenizer` must be a tokenizer, but got None"),
            ({"prompt_lookup_num_tokens": 3}, "ask for assisted generation"),
        ],
        ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
    )
    def test_each_says_what_to_do(self, target, noisy, kwargs, match) -> None:
        assert_refused(target, noisy, match, **kwargs)

    def test_ensemble_weight_is_lossy(self, target, noisy) -> None:
        if not hasattr(target.generation_config, "assistant_ensemble_weight"):
            pytest.skip("this transformers has no such setting")
        assert_refused(
            target, noisy, "`assistant_ensemble_weight` must be None, but got 0.5", assistant_ensemble_weight=0.5
        )

    def test_embeddings_instead_of_tokens(self, target, noisy) -> None:
        embeds = target.get_input_embeddings()(prompt(6))
        assert_refused(target, noisy, f"`inputs_embeds` has no tokens.*{REMEDY}", inputs_embeds=embeds)

    def test_guidance_given_as_a_processor(self, target, noisy) -> None:
        processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target)
        assert_refused(
            target, noisy, "UnbatchedClassifierFreeGuidance", logits_processor=LogitsProcessorList([processor])
        )

    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"max_time": 9.0}, "`max_time` must be None for 2 rows"),
            ({"return_dict_in_generate": True, "output_attentions": True}, "`output_attentions` .* False for 2 rows"),
            ({"return_dict_in_generate": True, "output_hidden_states": True}, "`output_hidden_states` .* for 2 rows"),
        ],
        ids=["max_time", "output_attentions", "output_hidden_states"],
    )
    def test_what_rows_one_by_one_cannot_give(self, target, noisy, kwargs, match) -> None:
        batch = padded_batch([prompt(4), prompt(6)])
        assert_refused(target, noisy, f"{match}.*{REMEDY}", streamer=None, **batch, **kwargs)

    def test_a_watermark_that_remembers_what_is_taken_back(self, target, noisy) -> None:
        config = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
        assert_refused(
            target, noisy, f"`watermarking_config` must not be SynthID.*{REMEDY}", watermarking_config=config
        )

    def test_a_stream_of_several_rows(self, target, noisy) -> None:
        batch = padded_batch([prompt(4), prompt(6)])
        assert_refused(target, noisy, f"`streamer` must be None for 2 rows.*{REMEDY}", streamer=Listener(), **batch)

    def test_the_callers_cache_for_several_rows(self, target, noisy) -> None:
        batch = padded_batch([prompt(4), prompt(6)])
        cache = DynamicCache(config=target.config)
        with pytest.raises(UnsupportedError, match=f"A cache of your own must be for one row.*2.*{REMEDY}"):
            generate_with_ssd(
                target, assistant_model=noisy, ssd_config=INLINE, max_new_tokens=4, **batch, **{CACHE_KEY: cache}
            )
        assert cache.get_seq_length() == 0


class TestEnabledModels:
    """Whoever calls a model may not know that it is enabled: what SSD cannot do runs plainly there."""

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"num_beams": 3},
            {"use_cache": False},
            {"guidance_scale": 1.5},
            {"cache_implementation": "static"},
            {"prompt_lookup_num_tokens": 3},
        ],
        ids=lambda kwargs: next(iter(kwargs)),
    )
    def test_they_run_plainly(self, target, noisy, kwargs) -> None:
        kwargs = {**kwargs, "max_new_tokens": 12, "do_sample": False}
        expected = make_target().generate(prompt(6), **kwargs).tolist()
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        assert target.generate(prompt(6), **kwargs).tolist() == expected

    def test_embeddings(self, target, noisy) -> None:
        embeds = target.get_input_embeddings()(prompt(6)).detach()
        expected = make_target().generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False).tolist()
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        assert target.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False).tolist() == expected

    def test_a_stream_of_several_rows(self, target, noisy) -> None:
        batch = padded_batch([prompt(4), prompt(6)])
        plain, own = Listener(), Listener()
        make_target().generate(**batch, max_new_tokens=4, do_sample=False, streamer=plain)
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        target.generate(**batch, max_new_tokens=4, do_sample=False, streamer=own)
        assert own.puts == plain.puts

    def test_a_batch_with_a_cache(self, target, noisy) -> None:
        batch = padded_batch([prompt(4), prompt(6)])
        settings = {"max_new_tokens": 8, "do_sample": False}
        expected = make_target().generate(**batch, **settings, **{CACHE_KEY: DynamicCache(config=target.config)})
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        ids = target.generate(**batch, **settings, **{CACHE_KEY: DynamicCache(config=target.config)})
        assert ids.tolist() == expected.tolist()
