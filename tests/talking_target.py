"""A tiny target that has learnt to say something, so that an assistant can learn to say the same."""

from __future__ import annotations

import random

import torch
from tiny_models import tiny_llama
from tiny_pair import byte_tokenizer
from transformers import LlamaForCausalLM

SUBJECTS = ("the cat", "a dog", "my aunt", "the old house", "one bird")
VERBS = ("sees", "likes", "forgets", "wants", "carries")
OBJECTS = ("the red ball", "some water", "a small stone", "her hat", "the long road")


def conversation(draw: random.Random) -> str:
    """A question and its answer in the chat template of the tiny tokenizer."""
    subject = draw.choice(SUBJECTS)
    told = [f"{subject} {draw.choice(VERBS)} {draw.choice(OBJECTS)}." for _ in range(2)]
    return f"<user>tell me what {subject} does.<assistant>{' '.join(told)}"


def teach(model: LlamaForCausalLM, texts: list[str], *, steps: int, length: int = 96, batch_size: int = 16) -> None:
    """Trains a model on texts with an end, of at most `length` bytes."""
    tokenizer = byte_tokenizer()
    rows = torch.full((len(texts), length), tokenizer.pad_token_id)
    for row, text in zip(rows, texts, strict=True):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:length]
        row[: len(ids)] = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (batch_size,), generator=generator)]
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def make_talking_target(*, steps: int = 250, layers: int = 4) -> LlamaForCausalLM:
    """A model that answers in sentences of a few words; float32, and the same each time."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        initializer_range=0.05, tie_word_embeddings=True,
    )  # fmt: skip
    draw = random.Random(0)
    teach(model, [conversation(draw) for _ in range(512)], steps=steps)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
