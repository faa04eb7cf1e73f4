"""Tiny models of other families, each with something that speculation may trip over."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.35,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA_LIKE = {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window of 8": ("mistral", {**_LLAMA_LIKE, "sliding_window": 8}),
    "gemma2, mixed layers and capped logits": (
        "gemma2",
        {
            **_LLAMA_LIKE,
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3, mixed layers": (
        "gemma3_text",
        {
            **_LLAMA_LIKE,
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": ("gpt2", {**_SMALL, "n_positions": 256}),
    "opt": (
        "opt",
        {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 256, "init_std": 0.35},
    ),
    "bloom, ALiBi": ("bloom", _SMALL),
    "granite, scaled logits": ("granite", {**_LLAMA_LIKE, "logits_scaling": 2.0}),
}


def make(family: str, *, noise: float = 0.0, **settings: Any) -> PreTrainedModel:
    """A float32 model of `family`, the same each time; with `noise` an assistant for it that is partly right."""
    model_type, values = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**values, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and noise:
                    parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model
