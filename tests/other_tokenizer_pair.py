"""A target and an assistant that knows the same with another vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import tiny_llama
from transformers import LlamaForCausalLM

from hf_ssd.translation import translation_between


def make_pair(
    tokenizer: Any,
    assistant_tokenizer: Any,
    *,
    noise: float = 0.0,
    own_share: float = 0.5,
    padding: int = 0,
    **settings: object,
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Two tiny models. The assistant has the target's embeddings of the tokens that are shared, in its own order.

    Args:
        tokenizer: The target's.
        assistant_tokenizer: The assistant's.
        noise: How far the assistant's other weights are from the target's.
        own_share: What the target's logits of tokens that are not shared are multiplied with: with less, they are
            rarer in its texts.
        padding: Token ids that both know beyond their tokenizers.
        **settings: Other values for the assistant's `LlamaConfig`.
    """
    size, assistant_size = (len(each) + padding for each in (tokenizer, assistant_tokenizer))
    target = tiny_llama(vocab_size=size)
    assistant = tiny_llama(seed=3, vocab_size=assistant_size, **settings)
    noisy = tiny_llama(vocab_size=size, noise=noise, **settings)
    translation = translation_between(tokenizer, assistant_tokenizer, size, assistant_size)
    assert translation is not None
    with torch.no_grad():
        target.lm_head.weight[translation.shared < 0] *= own_share
    state, own = noisy.state_dict(), assistant.state_dict()
    known = translation.drafted >= 0
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = own[name].clone()
        rows[known] = state[name][translation.drafted[known]]
        # What it has no token for in common is not what it would say.
        if name == "lm_head.weight":
            rows[~known] = 0.0
        state[name] = rows
    assistant.load_state_dict(state)
    return target, assistant
