"""What is not for SSD: it reaches transformers as it was, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from callers.enabled import GREEDY, assert_speculated, enabled_target
from plain import INLINE
from tiny_models import make_noisy, make_target, prompt
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from hf_ssd import enable_ssd, make_custom_generate
from hf_ssd.vocabulary import UnsupportedError

DECODING = {
    "beam search": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.mark.parametrize("settings", DECODING.values(), ids=list(DECODING))
class TestOtherDecoding:
    def test_an_enabled_model_runs_it_as_transformers_does(self, settings: dict[str, Any]) -> None:
        kwargs = {**GREEDY, "max_new_tokens": 12, **settings}
        model = enabled_target()
        torch.manual_seed(4)
        expected = make_target().generate(prompt(), **kwargs).tolist()
        torch.manual_seed(4)
        assert model.generate(prompt(), **kwargs).tolist() == expected
        assert model.ssd_stats.mode == "ar"
        assert model.generate(prompt(), **GREEDY).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
        assert_speculated(model)

    def test_with_settings_for_ssd_it_is_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedError, match="SSD decodes greedily or by sampling, but these arguments ask for"):
            enabled_target().generate(prompt(), ssd_config=INLINE, **{**GREEDY, **settings})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group"),
        ({"dola_layers": "low"}, "dola"),
    ],
    ids=["contrastive search", "group beams", "DoLa"],
)
def test_what_transformers_moved_to_the_hub_is_its_own_refusal(settings: dict[str, Any], name: str) -> None:
    """It asks for code from the hub, with or without SSD."""
    messages = []
    for model in (make_target(), enabled_target()):
        with pytest.raises((ValueError, OSError), match=f"(?i){name}") as caught:
            model.generate(prompt(), max_new_tokens=8, do_sample=False, **settings)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


def test_a_callers_own_decoding_loop() -> None:
    def repeats_the_last_token(model, input_ids, generation_config, **kwargs):
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    model = enabled_target()
    ids = model.generate(prompt(), custom_generate=repeats_the_last_token, max_new_tokens=4)
    assert ids[0].tolist() == [*prompt()[0].tolist(), prompt()[0, -1]]


def test_our_loop_given_to_an_enabled_model() -> None:
    model = enabled_target(make_target())
    ids = model.generate(prompt(), custom_generate=make_custom_generate(make_noisy(), INLINE), **GREEDY)
    assert ids.tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(model)


def test_continuous_batching() -> None:
    """`generate_batch()` schedules requests by a loop of its own, in which SSD has no part."""
    prompts = [prompt(4 + row, seed=row)[0].tolist() for row in range(3)]
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, block_size=32, max_batch_tokens=64)
    found = []
    for model in (make_target(), enabled_target()):
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=small)
        found.append([outputs[key].generated_tokens for key in sorted(outputs)])
    assert found[0] == found[1]
    assert all(len(tokens) > 0 for tokens in found[0])
    assert model.ssd_stats is None
    assert model.generate(prompt(), **GREEDY).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(model)


class OfTheCallersOwn(LlamaForCausalLM):
    """Names its first argument as it likes."""

    def generate(self, prompt_ids, **kwargs):
        return super().generate(prompt_ids, **kwargs)


class PassesOn(LlamaForCausalLM):
    """Does something beside, and names nothing."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def as_one_of(kind: type[LlamaForCausalLM], target) -> LlamaForCausalLM:
    """The target's weights in a class of the caller's."""
    model = kind(target.config).eval()
    model.load_state_dict(target.state_dict())
    model.generation_config = target.generation_config
    return model


def test_a_class_that_passes_positional_arguments_on(target, noisy) -> None:
    model = as_one_of(PassesOn, target)
    expected = model.generate(prompt(), max_new_tokens=12)
    enable_ssd(model, noisy, {"backend": "inline"})
    assert model.generate(prompt(), max_new_tokens=12).tolist() == expected.tolist()
    assert model.ssd_stats.num_hits > 0


def test_a_class_with_a_generate_of_its_own_takes_positional_arguments(target, noisy) -> None:
    model = as_one_of(OfTheCallersOwn, target)
    expected = model.generate(prompt(), max_new_tokens=12)
    enable_ssd(model, noisy, {"backend": "inline"})
    assert model.generate(prompt(), max_new_tokens=12).tolist() == expected.tolist()
    assert model.ssd_stats.num_hits > 0
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(prompt(), prompt_ids=prompt())
