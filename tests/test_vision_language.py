"""Vision-language targets with assistants that only read the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting_requests import request
from tiny_models import make_noisy, make_target, padded_batch, prompt
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.checks import UnsupportedError, check_model
from hf_ssd.generation import generate_with_ssd
from hf_ssd.matrix.multimodal import IMAGE, VISION_FAMILIES, VisionFamily
from hf_ssd.matrix.trials import PASSES, try_family

INLINE = SSDConfig(backend="inline", num_assistant_tokens=4)


def family(model_type: str) -> VisionFamily:
    return next(each for each in VISION_FAMILIES if each.model_type == model_type)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [*((each.model_type, "sdpa") for each in VISION_FAMILIES), ("gemma3", "eager"), ("qwen2_vl", "eager")],
)
def test_each_family(model_type: str, attention: str) -> None:
    """Greedily and by coupled sampling, with the image in the prompt."""
    tiny = family(model_type)
    result = try_family(tiny, attentions=[attention])
    assert result.result == PASSES, result.reason
    assert result.acceptance > 0.2
    assert result.drafts_ahead


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "smolvlm"])
def test_trees_behind_an_image(model_type: str) -> None:
    """Positions of three dimensions are right after a roll-back and on each branch."""
    tiny = family(model_type)
    target, assistant = tiny.make(), tiny.make_assistant()
    kwargs = {**tiny.prompts(1), "max_new_tokens": 50, "do_sample": False}
    expected = target.generate(**kwargs)
    found = generate_with_ssd(target, assistant_model=assistant, ssd_config=INLINE, **kwargs)
    assert found.equal(expected)
    rounds = target.ssd_stats.rounds
    assert any(each.num_draft_tokens > each.depth for each in rounds), "no tree was verified"
    assert any(0 < each.num_accepted < each.depth for each in rounds), "nothing was rolled back"
    assert target.ssd_stats.num_hits > 0


def test_the_image_matters() -> None:
    """Or the tests above would show nothing."""
    tiny = family("qwen2_vl")
    target, inputs = tiny.make(), tiny.prompts(1)
    first = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    inputs["pixel_values"] = -inputs["pixel_values"]
    assert not first.equal(target.generate(**inputs, max_new_tokens=20, do_sample=False))


def test_an_image_right_at_the_end_of_the_prompt() -> None:
    """Draft tokens are text, whatever is before them."""
    tiny = family("qwen2_5_vl")
    target, assistant = tiny.make(), tiny.make_assistant()
    inputs = tiny.prompts(1)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :9]  # four words, the start, and the image
    assert inputs["input_ids"][0, -1] == IMAGE
    kwargs = {**inputs, "max_new_tokens": 20, "do_sample": False}
    found = generate_with_ssd(target, assistant_model=assistant, ssd_config=INLINE, **kwargs)
    assert found.equal(target.generate(**kwargs))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "llava"])
def test_several_rows_of_text(model_type: str) -> None:
    """Four, which is also the number of dimensions that Qwen2-VL's positions have."""
    tiny = family(model_type)
    target, assistant = tiny.make(), tiny.make_assistant()
    batch = padded_batch([prompt(length, vocab_size=60) for length in (12, 5, 9, 7)])
    kwargs = {**batch, "max_new_tokens": 16, "do_sample": False}
    found = generate_with_ssd(target, assistant_model=assistant, ssd_config=INLINE, **kwargs)
    assert found.equal(target.generate(**kwargs))
    assert target.ssd_stats.degraded is None
    assert target.ssd_stats.acceptance > 0.2


def test_through_enable_ssd() -> None:
    tiny = family("llava")
    target = tiny.make()
    kwargs = {**tiny.prompts(1), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**kwargs)
    enable_ssd(target, assistant_model=tiny.make_assistant(), ssd_config={"backend": "stream"})
    assert target.generate(**kwargs).equal(plain)
    assert target.ssd_stats.degraded is None
    assert target.ssd_stats.acceptance > 0.1


class TestPlaceholders:
    def test_the_assistant_does_not_read_them(self) -> None:
        asked = request(INLINE, prompt_ids=(0, 0, 5, 9, 9, 6, 7), num_padding=2, placeholders=frozenset({9}))
        assert asked.read_ids == [5, 6, 7]
        assert asked.unread_ids == [0, 0, 9, 9]

    @pytest.mark.parametrize("seed", [1, 2])
    def test_noise_goes_by_the_targets_positions(self, seed: int) -> None:
        """A copy of the target that leaves out tokens of no weight drafts as well as one that reads everything."""
        target, twin = make_target(), make_target()
        target.config.image_token_id = twin.config.image_token_id = IMAGE
        ids = torch.cat([torch.full((1, 3), IMAGE), prompt(12, vocab_size=IMAGE)], dim=1)
        kwargs = {"inputs": ids, "max_new_tokens": 40, "do_sample": True, "temperature": 2.0}
        config = SSDConfig(backend="inline", num_assistant_tokens=4, seed=seed)
        expected = generate_with_ssd(target, ssd_config=SSDConfig(mode="ar", seed=seed), **kwargs)
        found = generate_with_ssd(target, assistant_model=twin, ssd_config=config, **kwargs)
        assert found.equal(expected)
        assert target.ssd_stats.acceptance > 0.5


class TestRefusals:
    def test_images_in_several_rows(self) -> None:
        tiny = family("llava")
        target, inputs = tiny.make(), tiny.prompts(1)
        two = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
        kwargs: dict[str, Any] = {**two, "max_new_tokens": 8, "do_sample": False}
        with pytest.raises(UnsupportedError, match="`pixel_values` must be of one row, but the call has 2"):
            generate_with_ssd(target, assistant_model=tiny.make_assistant(), ssd_config=INLINE, **kwargs)
        plain = target.generate(**kwargs)
        enable_ssd(target, assistant_model=tiny.make_assistant(), ssd_config=INLINE)
        assert target.generate(**kwargs).equal(plain)

    def test_a_family_with_a_generate_of_its_own(self) -> None:
        values = {"generate": lambda self: None, "__module__": "transformers.models.own.modeling_own"}
        own: type[PreTrainedModel] = type("OwnForCausalLM", (LlamaForCausalLM,), values)
        with pytest.raises(UnsupportedError, match="OwnForCausalLM has a `generate\\(\\)` of its own"):
            check_model("target", own(make_noisy().config))
