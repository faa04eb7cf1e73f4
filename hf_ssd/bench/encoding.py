"""From prompts to what generate() is given."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from .arms import Inputs
from .prompts import Prompt

# Stands for the text in a rendered chat template. No template and no tokenizer gives it a meaning.
PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"

# More characters than a token holds on average in any text: cutting to it before tokenizing loses nothing.
CHARACTERS_PER_TOKEN = 16


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Inputs:
    """Token ids and mask of a prompt, in the tokenizer's chat template where it has one, of shape `(1, num_tokens)`.

    Raises:
        ValueError: If a text is too short for the number of tokens that its prompt asks for.
    """
    if prompt.num_tokens is not None:
        input_ids = torch.tensor([_ids_of_length(tokenizer, prompt, prompt.num_tokens)])
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt.text}]
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        tokens = tokenizer(prompt.text, return_tensors="pt")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


def _ids_of_length(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, num_tokens: int) -> list[int]:
    """The ids of template, text and question, with the text's cut so that they are `num_tokens` in all."""
    request = f"{PLACEHOLDER}\n\n{prompt.question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": request}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, after = rendered.split(PLACEHOLDER)
        head = tokenizer(before, add_special_tokens=False)["input_ids"]
    else:
        after = request.removeprefix(PLACEHOLDER)
        head = tokenizer("")["input_ids"]  # what every text of this tokenizer begins with, if anything
    tail = tokenizer(after, add_special_tokens=False)["input_ids"]
    num_text_tokens = num_tokens - len(head) - len(tail)
    if num_text_tokens < 1:
        raise ValueError(
            f"`prompt_tokens` must be above {len(head) + len(tail)}, which chat template and question take alone, but "
            f"got {num_tokens}."
        )
    text = tokenizer(prompt.text[: CHARACTERS_PER_TOKEN * num_tokens], add_special_tokens=False)["input_ids"]
    if len(text) < num_text_tokens:
        raise ValueError(
            f"`prompt_tokens` must be at most {len(head) + len(text) + len(tail)}, the tokens that there is text for, "
            f"but got {num_tokens}."
        )
    return [*head, *text[:num_text_tokens], *tail]
