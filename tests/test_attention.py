"""Attention of other kinds than eager and sdpa, on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_zoo
import torch
from plain import assert_equals_plain
from tiny_models import make_noisy, make_target, padded_batch, prompt
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from hf_ssd import SSDConfig
from hf_ssd.drafting import AssistantModel
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.runtime import pool

INLINE = SSDConfig(backend="inline", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
UNMASKED = "unmasked_test"  # as flash attention is: a name with "flash" in it would have to be installed


def unmasked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the last positions, that knows of no other mask than one of padding."""
    assert attention_mask is None or attention_mask.ndim == 2, "it takes no such mask"
    num_queries, num_keys = query.shape[2], key.shape[2]
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    rows, columns = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)[None]
    sees = columns <= rows
    if sliding_window is not None:
        sees &= columns > rows - sliding_window
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~sees, float("-inf"))
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask[:, None, None] == 0, torch.finfo(scores.dtype).min)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


AttentionInterface.register(UNMASKED, unmasked_attention)
AttentionMaskInterface.register(UNMASKED, flash_attention_mask)


def attending(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    model.set_attn_implementation(implementation)
    return model


def assert_drafted(stats: SSDStats) -> None:
    assert stats.acceptance > 0.4
    assert stats.num_hits > 2


@pytest.fixture
def _flex_without_a_compiler():
    with torch.compiler.set_stance("force_eager"):
        yield


class TestTarget:
    @pytest.mark.parametrize("implementation", ["eager", "sdpa", UNMASKED])
    def test_it_verifies_by_its_own_attention(self, noisy, implementation: str) -> None:
        target = attending(make_target(), implementation)
        stats = assert_equals_plain(target, noisy, prompt(12), INLINE, max_new_tokens=40)
        assert_drafted(stats)
        has_trees = any(each.num_draft_tokens > each.depth for each in stats.rounds)
        assert has_trees == (implementation != UNMASKED)

    @pytest.mark.usefixtures("_flex_without_a_compiler")
    def test_flex_attention(self, noisy) -> None:
        target = attending(make_target(), "flex_attention")
        stats = assert_equals_plain(target, noisy, prompt(12), INLINE, max_new_tokens=30)
        assert_drafted(stats)
        assert all(each.num_draft_tokens == each.depth for each in stats.rounds)

    def test_windows_without_masks(self) -> None:
        target = attending(tiny_zoo.make("mistral, window of 8"), UNMASKED)
        assistant = tiny_zoo.make("mistral, window of 8", noise=0.05)
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, max_new_tokens=40))

    def test_rows_without_masks(self, noisy) -> None:
        target = attending(make_target(), UNMASKED)
        batch = padded_batch([prompt(12), prompt(7)])
        expected = make_target().generate(**batch, max_new_tokens=30, do_sample=False)
        arguments = {"assistant_model": noisy, "ssd_config": INLINE, "max_new_tokens": 30, "do_sample": False}
        assert generate_with_ssd(target, **batch, **arguments).equal(expected)
        assert_drafted(target.ssd_stats)


class TestAssistant:
    """It takes one with masks by itself where it needs them: drafts for several outcomes share a forward."""

    @pytest.mark.parametrize("implementation", ["eager", "sdpa", UNMASKED])
    def test_in_the_callers_process(self, target, implementation: str) -> None:
        assistant = attending(make_noisy(), implementation)
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, max_new_tokens=40))
        assert assistant.config._attn_implementation == implementation

    def test_windows(self) -> None:
        """Where a window cuts into the prefix there are masks of full width, which the model's own cannot take."""
        target, assistant = (tiny_zoo.make("mistral, window of 8", sliding_window=24, noise=n) for n in (0.0, 0.05))
        expected = assert_equals_plain(target, assistant, prompt(20), INLINE, max_new_tokens=40)
        stats = assert_equals_plain(target, attending(assistant, UNMASKED), prompt(20), INLINE, max_new_tokens=40)
        assert AssistantModel(assistant).takes_trees
        assert stats.tokens_per_round == pytest.approx(expected.tokens_per_round, rel=0.2)
        assert_drafted(stats)

    @pytest.mark.usefixtures("_flex_without_a_compiler")
    def test_flex_attention(self, target) -> None:
        assistant = attending(make_noisy(), "flex_attention")
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, max_new_tokens=30))

    def test_in_a_process(self, target) -> None:
        """Where nobody has registered the caller's attention."""
        assistant = attending(make_noisy(noise=0.0), UNMASKED)
        config = SSDConfig(backend="process", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
        stats = assert_equals_plain(target, assistant, prompt(12), config, max_new_tokens=40)
        assert stats.acceptance == 1.0
        assert any(each.num_draft_tokens > each.depth for each in stats.rounds)
        pool.close_worker(assistant)
