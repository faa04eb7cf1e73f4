"""The test models are what the tests take them for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_models import padded_batch, prompt


@pytest.fixture
def text(target, prompt_ids):
    return target.generate(prompt_ids, max_new_tokens=200, do_sample=False)


def agreement(assistant, text, start: int) -> float:
    with torch.no_grad():
        guesses = assistant(text).logits[0, start - 1 : -1].argmax(-1)
    return (guesses == text[0, start:]).float().mean().item()


def test_target_text_is_varied(text, prompt_ids):
    new = text[0, prompt_ids.shape[1] :].tolist()
    assert len(new) == 200
    assert len(set(new)) > 30
    assert len(set(pairwise(new))) > 120  # it does not go round in a circle


def test_assistants_are_partly_never_and_always_right(noisy, unrelated, twin, text, prompt_ids):
    start = prompt_ids.shape[1]
    assert 0.5 < agreement(noisy, text, start) < 0.8
    assert agreement(unrelated, text, start) < 0.1
    assert agreement(twin, text, start) == 1.0


def test_padded_batch_is_padded_on_the_left():
    batch = padded_batch([prompt(2), prompt(4)])
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert batch["input_ids"][0].tolist() == [0, 0, *prompt(2)[0].tolist()]
