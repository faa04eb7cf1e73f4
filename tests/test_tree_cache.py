"""The assistant's cache against transformers' own, and against models that recompute everything."""

from __future__ import annotations

import random

import pytest
import tiny_zoo
import torch
from tiny_models import VOCAB_SIZE, make_target
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_ssd.compat import CACHE_KEY
from hf_ssd.drafting import tree_cache
from hf_ssd.drafting.tree_cache import SlabCache
from hf_ssd.kv_cache import keep_branch

SHAPE = (1, 2, 4)  # batch size, heads, head size


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs that grow several times within a test."""
    monkeypatch.setattr(tree_cache, "MIN_SPARE_TOKENS", 2)


def entries(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, size = SHAPE
    # As a model's: views whose heads and tokens are swapped. Values may be of another size than keys.
    keys = torch.randn(batch, num_tokens, heads, size).transpose(1, 2)
    return keys, torch.randn(batch, num_tokens, heads, size + 2).transpose(1, 2)


def append(caches: list[DynamicCache], num_tokens: int, num_layers: int = 2) -> None:
    for layer in range(num_layers):
        keys, values = entries(num_tokens)
        for cache in caches:
            cache.update(keys, values, layer)


def assert_equal(cache: DynamicCache, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    assert cache.get_seq_length() == expected[0][0].shape[-2]
    for layer, (keys, values) in zip(cache.layers, expected, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("kind", [SlabCache, DynamicCache])
@pytest.mark.parametrize("seed", range(5))
def test_random_appends_crops_and_branches_against_concatenation(kind: type[DynamicCache], seed: int) -> None:
    generator = random.Random(seed)
    cache, rival = kind(), DynamicCache()
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(30):
        length = cache.get_seq_length()
        action = generator.choice(["append", "append", "crop", "branch"]) if length else "append"
        if action == "append":
            rival = DynamicCache()
            append([cache, rival], generator.randint(1, 7))
            new = [(layer.keys, layer.values) for layer in rival.layers]
            expected = [
                tuple(torch.cat(pair, dim=-2) for pair in zip(old, added, strict=True))
                for old, added in zip(expected, new, strict=True)
            ] if expected else new  # fmt: skip
        elif action == "crop":
            num_removed = generator.randint(0, length - 1)
            cache.crop(-num_removed)
            expected = [tuple(each[..., : length - num_removed, :] for each in layer) for layer in expected]
        else:
            num_prefix = generator.randint(0, length - 1)
            slots = sorted(generator.sample(range(num_prefix, length), generator.randint(0, length - num_prefix)))
            if not num_prefix + len(slots):
                continue
            keep_branch(cache, num_prefix, slots)
            kept = [*range(num_prefix), *slots]
            expected = [tuple(each[..., kept, :] for each in layer) for layer in expected]
        assert_equal(cache, expected)


def test_appending_copies_nothing_until_a_slab_is_full() -> None:
    cache = SlabCache()
    append([cache], 100)
    where = cache.layers[0].keys.data_ptr()
    for _ in range(tree_cache.MIN_SPARE_TOKENS // 4):
        append([cache], 4)
        keep_branch(cache, cache.get_seq_length() - 4, [cache.get_seq_length() - 1])
    assert cache.layers[0].keys.data_ptr() == where
    append([cache], tree_cache.MIN_SPARE_TOKENS)
    assert cache.layers[0].keys.data_ptr() != where


def test_growth_is_geometric() -> None:
    cache = SlabCache()
    places = set()
    for _ in range(200):
        append([cache], 50, num_layers=1)
        places.add(cache.layers[0].keys.data_ptr())
    assert len(places) < 12


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("family", [None, "gpt2", "gemma3, mixed layers", "opt"])
def test_models_decode_with_it_as_without_a_cache(family: str | None) -> None:
    model: PreTrainedModel = make_target() if family is None else tiny_zoo.make(family)
    tokens = torch.randint(1, VOCAB_SIZE, (1, 30), generator=torch.Generator().manual_seed(0))
    alone = model(tokens, use_cache=False).logits
    cache, first = SlabCache(), 0
    for last in (7, 8, 9, 13, 30):
        logits = model(tokens[:, first:last], use_cache=True, **{CACHE_KEY: cache}).logits
        torch.testing.assert_close(logits, alone[:, first:last], atol=1e-4, rtol=1e-5)
        first = last
