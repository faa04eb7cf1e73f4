from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_target, padded_batch, prompt
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_ssd.distill import batched_decoding
from hf_ssd.distill.batched_decoding import fast_on_cpu

BATCH = {**padded_batch([prompt(7), prompt(4, seed=1), prompt(9, seed=2)]), "max_new_tokens": 24, "do_sample": False}


def test_a_batch_gets_the_same_tokens_and_the_model_is_as_before() -> None:
    target = make_target()
    assert target.config.num_attention_heads > target.config.num_key_value_heads
    expected = target.generate(**BATCH)
    with fast_on_cpu(target):
        assert target.config._attn_implementation == batched_decoding.NAME
        found = target.generate(**BATCH)
    assert found.equal(expected)
    assert target.config._attn_implementation == "sdpa"
    assert not target.lm_head._forward_pre_hooks


def test_another_attention_is_left_alone() -> None:
    target = make_target()
    target.set_attn_implementation("eager")
    expected = target.generate(**BATCH)
    with fast_on_cpu(target):
        assert target.config._attn_implementation == "eager"
        assert target.generate(**BATCH).equal(expected)


def test_the_output_projection_gets_states_without_gaps() -> None:
    target = make_target()
    strides: list[bool] = []
    with fast_on_cpu(target):
        hook = target.lm_head.register_forward_pre_hook(lambda module, args: strides.append(args[0].is_contiguous()))
        target(**{name: BATCH[name] for name in ("input_ids", "attention_mask")}, logits_to_keep=1)
        hook.remove()
    assert strides == [True]


@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_attention_is_that_of_transformers(num_tokens: int, is_bool: bool, mask_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, num_tokens, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 6, 8, generator=generator)
    mask = torch.rand(2, mask_heads, num_tokens, 6, generator=generator) < 0.7
    mask[..., 0] = True
    if not is_bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = batched_decoding._attention_forward(module, query, key, value, mask, scaling=0.3)
    assert torch.allclose(found, expected, atol=1e-6)
