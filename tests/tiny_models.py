"""Tiny float32 Llama models, two layers, that generate within milliseconds on a CPU.

T is the target. D is T with noise in its weights: as T's assistant it is right about two times in three. Z has nothing
to do with T: it is hardly ever right. T as its own assistant is always right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 64
TARGET_SEED = 0
UNRELATED_SEED = 1
NOISE = 0.04


def tiny_llama(seed: int = TARGET_SEED, *, noise: float = 0.0, **settings: object) -> LlamaForCausalLM:
    """A model that depends on its arguments only; the global random state is left alone.

    Args:
        seed: Which model.
        noise: How far it is from the model of that seed, relative to the size of its weights.
        **settings: Other values for `LlamaConfig`.
    """
    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        # Large weights: with the usual 0.02 every model repeats one token for ever.
        "initializer_range": 0.35,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = LlamaConfig(**{**values, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and noise:
                    parameter.add_(torch.randn_like(parameter) * noise * config.initializer_range)
    model.generation_config = GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id)
    return model


def make_target(**settings: object) -> LlamaForCausalLM:
    return tiny_llama(TARGET_SEED, **settings)


def make_noisy(*, noise: float = NOISE, **settings: object) -> LlamaForCausalLM:
    return tiny_llama(TARGET_SEED, noise=noise, **settings)


def make_unrelated(**settings: object) -> LlamaForCausalLM:
    return tiny_llama(UNRELATED_SEED, **settings)


def prompt(length: int = 6, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.LongTensor:
    """Token ids of shape `(1, length)`, none of them the padding token 0."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, vocab_size, (1, length), generator=generator)


def padded_batch(prompts: Sequence[torch.Tensor], *, pad_token_id: int = 0) -> dict[str, torch.LongTensor]:
    """Left-padded `input_ids` and `attention_mask` of several prompts of shape `(1, length)`."""
    longest = max(ids.shape[1] for ids in prompts)
    input_ids = torch.full((len(prompts), longest), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - ids.shape[1] :] = ids
        attention_mask[row, longest - ids.shape[1] :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE, *, prefix: str = "w") -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, `w2`, `w3`, ..., with `<pad>` at 0, `<eos>` at 1 and a chat template."""
    words = {"<pad>": 0, "<eos>": 1, **{f"{prefix}{index}": index for index in range(2, vocab_size)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = (
        "{% for message in messages %}w2 {{ message['content'] }} w3 {% endfor %}"
        "{% if add_generation_prompt %}w4{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", chat_template=template
    )
