"""The drafting engine of an assistant with another tokenizer, against the assistant alone on the text that it read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from drafting_requests import request
from other_tokenizer_pair import make_pair
from tiny_tokenizers import byte_fallback, byte_level, unigram

from hf_ssd import SSDConfig
from hf_ssd.drafting import AssistantModel, DraftEngine, GraphedAssistant
from hf_ssd.drafting.tree_cache import SlabCache
from hf_ssd.translation import Translation, translation_between
from hf_ssd.types import Outcome

BIG, SMALL = byte_level(420), byte_level(320)
PAIRS = {
    "larger target": (BIG, SMALL),
    "larger assistant": (SMALL, BIG),
    "assistant of another kind": (BIG, byte_fallback()),
    "assistant without bytes": (BIG, unigram()),
}


def check_cache(engine: DraftEngine, translation: Translation) -> None:
    """Everything in the cache is what the assistant would compute anew, and each node's hidden state too."""
    root, cache, tokens = engine._root, engine._trunk.cache, engine._trunk.reading.tokens
    run = [node for node in root.descendants() if node.is_run]
    num_trunk = engine._trunk.num_cached
    assert num_trunk == len(tokens)
    assert sorted(node.slot for node in run) == list(range(num_trunk, cache.get_seq_length()))
    for node in (root, *run):
        path = [translation.token(each.token) for each in node.path()]
        assert None not in path, "a token that is not shared was run"
        fresh = SlabCache()
        with torch.inference_mode():
            hidden = AssistantModel.forward(engine.assistant, [*tokens, *path], fresh, num_hidden=1)[0]
        torch.testing.assert_close(node.hidden, hidden, atol=1e-3 * hidden.abs().max().item(), rtol=0)
        slots = [*range(num_trunk), *(each.slot for each in node.path())]
        for layer, expected in zip(cache.layers, fresh.layers, strict=True):
            torch.testing.assert_close(layer.keys[..., slots, :], expected.keys, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("way", [{}, {"draft_tree_size": None}, {"backup": "none"}, {"backup": "ngram"}], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_the_cache_stays_right_whatever_comes(name: str, way: dict) -> None:
    run_with_random_outcomes(name, way, AssistantModel)


def test_in_steps_of_fixed_shapes_too() -> None:
    """As they are on CUDA, but for the graphs."""
    run_with_random_outcomes("assistant of another kind", {}, lambda model: GraphedAssistant(model, capture=False))


def run_with_random_outcomes(name: str, way: dict, make_assistant: Callable[..., AssistantModel]) -> None:
    target_tokenizer, assistant_tokenizer = PAIRS[name]
    _, assistant = make_pair(*PAIRS[name])
    sizes = len(target_tokenizer), len(assistant_tokenizer)
    translation = translation_between(*PAIRS[name], *sizes)
    assert translation is not None
    config = SSDConfig(**{"num_assistant_tokens": 3, "cache_budget": 4, **way})
    prompt = target_tokenizer("The cat sat. The cat")["input_ids"]
    wanted = request(config, prompt_ids=tuple(prompt), vocab_size=sizes[0], max_new_tokens=200, translation=translation)
    model = make_assistant(assistant)
    if isinstance(model, GraphedAssistant):
        model.prepare(wanted)
    engine = DraftEngine(model, overlaps=False)
    engine.start(wanted)
    rng = random.Random(0)
    row, num_hits, num_checked = [*prompt], 0, 0
    for _ in range(14):
        while engine.deepen():
            pass
        sent = engine._sent
        node = rng.randrange(len(sent) + 1)
        last = sent[node - 1] if node else engine._root
        prepared = [child.token for child in last.children if not child.is_sent and child.is_run]
        # What was prepared, or anything: single bytes, parts of characters, special tokens.
        bonus = rng.choice(prepared) if prepared and rng.random() < 0.7 else rng.randrange(sizes[0])
        row += [*(each.token for each in last.path()), bonus]
        num_hits += engine.resolve(Outcome(node, bonus), 1.0).miss is None
        assert engine._tokens == row
        while engine._root.hidden is None and engine.deepen():
            pass
        if engine._trunk.reading.is_waiting:
            assert not engine._sent or engine._origin.value == "ngram"
        else:
            check_cache(engine, translation)
            num_checked += 1
    assert num_hits > 0
    assert num_checked > 5
