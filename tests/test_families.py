"""Models whose caches, masks, positions, contexts or vocabularies are special: each time `=AR`, or a clear error."""

from __future__ import annotations

from logging import Handler, LogRecord

import pytest
import tiny_zoo
import torch
from plain import INLINE, assert_equals_plain
from tiny_models import VOCAB_SIZE, make_noisy, make_target, prompt, tiny_tokenizer
from transformers.utils import logging

from hf_ssd import SSDConfig
from hf_ssd.checks import UnsupportedError
from hf_ssd.drafting import AssistantModel
from hf_ssd.generation import generate_with_ssd
from hf_ssd.translation import translation_between

NOISE = 0.04


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", tiny_zoo.FAMILIES)
def test_each_family_as_target_and_assistant(family: str, attention: str) -> None:
    """HF48280: with windows of 8, a prompt of 12 and bursts, masks are narrower than the cache."""
    if family.startswith(("bloom", "gemma2")) and attention == "sdpa":
        pytest.skip("transformers has no such model")
    target = tiny_zoo.make(family, attn_implementation=attention)
    assistant = tiny_zoo.make(family, noise=NOISE, attn_implementation=attention)
    for mode in ("ssd", "sd"):
        config = SSDConfig(backend="inline", num_assistant_tokens=4, mode=mode, cache_budget=16)
        stats = assert_equals_plain(target, assistant, prompt(12), config, max_new_tokens=60)
        assert stats.acceptance > 0.2
        if mode == "ssd" and not family.startswith("bloom"):
            assert stats.num_hits > 3, "branches were not drafted"


@pytest.mark.parametrize("family", tiny_zoo.FAMILIES)
def test_each_family_drafts_for_itself_without_a_rejection(family: str) -> None:
    """A wrong mask, position or window on the assistant's side costs acceptance and nothing else."""
    target = tiny_zoo.make(family)
    stats = assert_equals_plain(target, tiny_zoo.make(family), prompt(12), max_new_tokens=60)
    assert stats.acceptance > 0.95


def test_an_assistant_without_tree_masks_drafts_just_in_time() -> None:
    bloom = tiny_zoo.make("bloom, ALiBi")
    assert not AssistantModel(bloom).takes_trees
    stats = assert_equals_plain(bloom, bloom, prompt(6), max_new_tokens=30)
    assert stats.num_hits == 0
    assert stats.tokens_per_round > 3


def test_an_assistant_of_capped_or_scaled_logits_is_run_whole() -> None:
    assert AssistantModel(tiny_zoo.make("gemma2, mixed layers and capped logits")).head is None
    assert AssistantModel(tiny_zoo.make("granite, scaled logits")).head is None
    assert AssistantModel(make_target()).head is not None


def test_an_assistant_with_a_shorter_context(target, noisy) -> None:
    """VL57941: no crash, and acceptance up to where it ends."""
    short = make_noisy(max_position_embeddings=32)
    stats = assert_equals_plain(target, short, prompt(6), max_new_tokens=64 - 6)
    reached = [r.num_accepted for r in stats.rounds]
    assert sum(reached) > 5
    assert reached[-1] == 0
    assert stats.rounds[-1].num_draft_tokens == 0
    full = assert_equals_plain(target, noisy, prompt(6), max_new_tokens=22)
    early = [r.num_accepted for r in full.rounds][:3]
    assert reached[:3] == early


def test_where_the_assistants_context_ends_is_said_once(target, prompt_ids) -> None:
    """VL57941: not in silence."""
    logger = logging.get_logger("hf_ssd.drafting.engine")
    said: list[str] = []
    handler = Listening(said)
    logger.addHandler(handler)
    try:
        for _ in range(2):
            # A length of its own: what was said before is not said again.
            assert_equals_plain(target, make_noisy(max_position_embeddings=33), prompt_ids, max_new_tokens=50)
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1
    assert "reads at most 33 tokens" in said[0]


class Listening(Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: LogRecord) -> None:
        self.said.append(record.getMessage())


def test_a_prompt_longer_than_the_assistants_context(target) -> None:
    assert_equals_plain(target, make_noisy(max_position_embeddings=8), prompt(12), max_new_tokens=10)


@pytest.mark.parametrize("num_missing", [4, -4])
@pytest.mark.parametrize("draft_vocab_size", [None, 16])
def test_vocabularies_padded_differently(num_missing: int, draft_vocab_size: int | None) -> None:
    """HF45307. The same weights, with four rows more or less."""
    big = make_target(vocab_size=64)
    small = make_target(vocab_size=60)
    for name, weights in small.state_dict().items():
        source = big.state_dict()[name]
        weights.copy_(source[:60] if source.shape != weights.shape else source)
    target, assistant = (big, small) if num_missing > 0 else (small, big)
    ids = prompt(6, vocab_size=60)
    config = SSDConfig(backend="inline", num_assistant_tokens=4, draft_vocab_size=draft_vocab_size)
    stats = assert_equals_plain(target, assistant, ids, config, max_new_tokens=60)
    assert stats.acceptance > 0.2
    generate_with_ssd(
        target, inputs=ids, assistant_model=assistant, ssd_config=config, max_new_tokens=60, do_sample=True, top_k=0
    )
    assert target.ssd_stats.degraded is None
    assert target.ssd_stats.acceptance > 0.2


@pytest.mark.parametrize("draft_vocab_size", [None, 16])
def test_tokens_that_were_added_to_the_targets_tokenizer(draft_vocab_size: int | None) -> None:
    """Fine-tuned with four tokens of its own, which the assistant lacks; they are in the prompt and in the text."""
    assistant = make_target()
    target = make_target(vocab_size=VOCAB_SIZE + 4)
    for name, weights in target.state_dict().items():
        source = assistant.state_dict()[name]
        (weights[:VOCAB_SIZE] if source.shape != weights.shape else weights).copy_(source)
    tokenizer, assistant_tokenizer = tiny_tokenizer(), tiny_tokenizer()
    tokenizer.add_tokens([f"<tool {index}>" for index in range(4)])
    added = list(range(VOCAB_SIZE, VOCAB_SIZE + 4))
    ids = torch.cat([prompt(5), torch.tensor([added[:2]]), prompt(4, seed=1)], dim=1)
    config = SSDConfig(backend="inline", num_assistant_tokens=4, draft_vocab_size=draft_vocab_size)
    stats = assert_equals_plain(target, assistant, ids, config, max_new_tokens=50)
    assert stats.acceptance > 0.2
    text = target.generate(ids, max_new_tokens=50, do_sample=False)[0, ids.shape[1] :].tolist()
    assert set(text) & set(added), "none of them was generated"
    # With both tokenizers at hand it is seen that the two are one.
    assert translation_between(tokenizer, assistant_tokenizer, VOCAB_SIZE + 4, VOCAB_SIZE) is None


def test_a_static_cache_is_equal_or_refused(target, noisy, prompt_ids) -> None:
    """HF30312."""
    try:
        assert_equals_plain(target, noisy, prompt_ids, max_new_tokens=40, cache_implementation="static")
    except (UnsupportedError, ValueError) as error:
        assert "cache_implementation" in str(error)  # noqa: PT017 either is fine


@pytest.mark.parametrize("family", ["mistral, window of 8", "gemma3, mixed layers"])
def test_windows_with_a_padded_batch(family: str) -> None:
    from tiny_models import padded_batch

    target, assistant = tiny_zoo.make(family), tiny_zoo.make(family, noise=NOISE)
    batch = padded_batch([prompt(12), prompt(5, seed=1)])
    settings = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(**batch, **settings)
    ids = generate_with_ssd(target, assistant_model=assistant, ssd_config=INLINE, **batch, **settings)
    assert ids.tolist() == plain.tolist()
