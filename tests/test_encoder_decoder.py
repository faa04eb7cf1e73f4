"""Encoder-decoder models for texts, as targets and assistants."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny_models import make_noisy
from transformers import PreTrainedModel

from hf_ssd import SSDConfig, SSDStats, enable_ssd
from hf_ssd.checks import UnsupportedError
from hf_ssd.generation import generate_with_ssd
from hf_ssd.matrix.encoders import ENCODER_FAMILIES, EncoderFamily
from hf_ssd.matrix.trials import PASSES, REFUSED, try_family
from hf_ssd.target_trees import Masks, masks_of

INLINE = SSDConfig(backend="inline", num_assistant_tokens=4)
FEW = [("mbart", "eager"), ("t5", "sdpa"), ("prophetnet", "eager")]


def family(model_type: str) -> EncoderFamily:
    return next(each for each in ENCODER_FAMILIES if each.model_type == model_type)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return family("mbart").make()


@pytest.fixture(scope="module")
def assistant() -> PreTrainedModel:
    return family("mbart").make_assistant()


def compare(target: PreTrainedModel, assistant: PreTrainedModel, config: SSDConfig = INLINE, **kwargs: Any) -> SSDStats:
    kwargs = {"max_new_tokens": 20, "do_sample": False, **kwargs}
    if config.seed is None:
        expected = target.generate(**kwargs)
    else:
        expected = generate_with_ssd(target, ssd_config=SSDConfig(mode="ar", seed=config.seed), **kwargs)
    found = generate_with_ssd(target, assistant_model=assistant, ssd_config=config, **kwargs)
    assert found.tolist() == expected.tolist()
    stats: SSDStats = target.ssd_stats
    assert stats.degraded is None
    assert sum(each.num_accepted for each in stats.rounds) > 1
    return stats


@pytest.mark.parametrize(("model_type", "attention"), FEW)
def test_one_of_each_way(model_type: str, attention: str) -> None:
    tiny = family(model_type)
    result = try_family(tiny, attentions=[attention])
    assert result.result == (REFUSED if tiny.is_refused else PASSES), result.reason


@pytest.mark.slow
@pytest.mark.parametrize("tiny", ENCODER_FAMILIES, ids=lambda each: f"{each.model_type}, {each.remark}")
def test_all(tiny: EncoderFamily) -> None:
    result = try_family(tiny)
    assert result.result == (REFUSED if tiny.is_refused else PASSES), result.reason


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_trees_where_positions_are_no_argument(attention: str) -> None:
    """BART and its kin count positions by themselves."""
    target = family("mbart").make(attn_implementation=attention)
    assistant = family("mbart").make_assistant(attn_implementation=attention)
    assert masks_of(target) is not Masks.OWN
    stats = compare(target, assistant, max_new_tokens=40, **family("mbart").prompts(1))
    assert any(each.num_draft_tokens > each.depth for each in stats.rounds), "no tree was verified"
    assert stats.num_hits > 0
    stats = compare(target, family("mbart").make(attn_implementation=attention), **family("mbart").prompts(1))
    assert stats.hit_rate > 0.8, "a copy of the target has most outcomes ready"
    assert not target.get_decoder().embed_positions._forward_pre_hooks
    assert not assistant.get_decoder().embed_positions._forward_pre_hooks


def test_relative_positions_get_chains_just_in_time() -> None:
    target, assistant = family("t5").make(), family("t5").make_assistant()
    assert masks_of(target) is Masks.OWN
    stats = compare(target, assistant, **family("t5").prompts(1))
    assert stats.num_hits == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"forced_bos_token_id": 9, "forced_eos_token_id": 3},
        {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.3},
        {"repetition_penalty": 1.2, "min_new_tokens": 6, "eos_token_id": [17, 42]},
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_processors(target, assistant, settings: dict[str, Any], num_rows: int) -> None:
    compare(target, assistant, **family("mbart").prompts(num_rows), **settings)


def test_a_prompt_for_the_decoder_as_long_as_the_encoders(target, assistant) -> None:
    """The encoder's padding is none of the decoder's."""
    prompts = family("mbart").prompts(3)
    start = torch.randint(3, 60, prompts["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    start[:, 0] = 2
    compare(target, assistant, decoder_input_ids=start, **prompts)


def test_several_texts_of_one_input(target, assistant) -> None:
    config = SSDConfig(backend="inline", num_assistant_tokens=4, seed=5)
    prompts = family("mbart").prompts(2)
    compare(target, assistant, config, do_sample=True, temperature=0.5, num_return_sequences=2, **prompts)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_outputs_as_a_dict(target, assistant, num_rows: int) -> None:
    kwargs = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    if num_rows == 1:
        kwargs |= {"output_hidden_states": True}
    kwargs |= family("mbart").prompts(num_rows)
    expected = target.generate(**kwargs)
    found = generate_with_ssd(target, assistant_model=assistant, ssd_config=INLINE, **kwargs)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(found.scores, expected.scores, strict=True))
    assert found.ssd_stats is target.ssd_stats
    if num_rows == 1:
        states = zip(found.decoder_hidden_states[1:], expected.decoder_hidden_states[1:], strict=True)
        assert all(torch.allclose(one[-1], other[-1], atol=1e-4) for one, other in states)
        assert torch.equal(found.encoder_hidden_states[-1], expected.encoder_hidden_states[-1])


def test_two_threads_on_one_target(target, assistant) -> None:
    """Positions are given to one thread's forward while the other runs its own."""
    prompts = [family("mbart").prompts(1), {"input_ids": torch.tensor([[5, 9, 33, 2, 8]])}]
    expected = [target.generate(**each, max_new_tokens=30, do_sample=False) for each in prompts]
    found: dict[int, list[Any]] = {0: [], 1: []}

    def run(index: int) -> None:
        for _ in range(3):
            kwargs = {"max_new_tokens": 30, "do_sample": False, **prompts[index]}
            found[index].append(generate_with_ssd(target, assistant_model=assistant, ssd_config=INLINE, **kwargs))

    threads = [threading.Thread(target=run, args=(index,)) for index in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, texts in found.items():
        assert len(texts) == 3
        assert all(text.tolist() == expected[index].tolist() for text in texts)


def test_a_process_of_the_assistants_own(assistant) -> None:
    target = family("mbart").make()
    plain = target.generate(**family("mbart").prompts(3), max_new_tokens=20, do_sample=False)
    enable_ssd(target, assistant_model=assistant, ssd_config={"backend": "process"})
    assert target.generate(**family("mbart").prompts(3), max_new_tokens=20, do_sample=False).equal(plain)
    assert target.ssd_stats.degraded is None
    assert target.ssd_stats.acceptance > 0.2


def test_an_assistant_without_an_encoder_is_refused_by_name(target) -> None:
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM drafts for MBartForConditionalGeneration"):
        generate_with_ssd(
            target, assistant_model=make_noisy(), ssd_config=INLINE, max_new_tokens=4, **family("mbart").prompts(1)
        )
