"""An EAGLE-3 head in plain torch, token by token and head by head, and checkpoints of one that are written by hand."""

from __future__ import annotations

from typing import Any

import torch

VOCAB_SIZE, DRAFT_VOCAB_SIZE = 40, 16
HIDDEN, TARGET_HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INTERMEDIATE = 24, 20, 4, 2, 6, 32
EPS, THETA = 1e-5, 500.0
LAYER = {
    "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu",
}  # fmt: skip

Weights = dict[str, torch.Tensor]


def draft_tokens() -> torch.Tensor:
    """Which of the target's tokens are drafted."""
    return torch.arange(DRAFT_VOCAB_SIZE) * 2 + 3


def random_weights(prefix: str = "layers.0.", *, embedding: bool = True, seed: int = 0) -> Weights:
    """A state dict with the decoder layer's names under a prefix."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {
        "fc.weight": rand(HIDDEN, 3 * TARGET_HIDDEN),
        f"{prefix}self_attn.q_proj.weight": rand(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": rand(KEY_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": rand(KEY_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": rand(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": rand(INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": rand(INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": rand(HIDDEN, INTERMEDIATE),
        f"{prefix}input_layernorm.weight": 1 + rand(HIDDEN),
        f"{prefix}hidden_norm.weight": 1 + rand(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": 1 + rand(HIDDEN),
        "norm.weight": 1 + rand(HIDDEN),
        "lm_head.weight": rand(DRAFT_VOCAB_SIZE, HIDDEN),
        "d2t": draft_tokens() - torch.arange(DRAFT_VOCAB_SIZE),
        "t2d": torch.isin(torch.arange(VOCAB_SIZE), draft_tokens()),
    }
    table = rand(VOCAB_SIZE, HIDDEN)
    return {**weights, "embed_tokens.weight": table} if embedding else weights


def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states / (states.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def plain_head(
    weights: Weights, tokens: list[int], features: torch.Tensor, first_position: int = 0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and logits of a chain of tokens, of shape `(num_tokens, ...)`, from the features before each."""
    layer = {name.removeprefix("layers.0."): weight for name, weight in weights.items()}
    if options.get("norm_before_fc"):
        features = norm(features, weights["input_norm.weight"])
    if options.get("fc_norm"):
        parts = features.chunk(3, dim=-1)
        features = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
    fused = features @ weights["fc.weight"].T
    normed = norm(fused, layer["hidden_norm.weight"])
    embedded = norm(weights["embed_tokens.weight"][tokens], layer["input_layernorm.weight"])
    inputs = torch.cat([embedded, normed], dim=-1)
    query, key, value = (inputs @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    query, key, value = (each.view(len(tokens), -1, HEAD_DIM) for each in (query, key, value))
    query, key = (_rotate(each, first_position) for each in (query, key))
    mixed = torch.zeros_like(query)
    for token in range(len(tokens)):
        for head in range(HEADS):
            seen = slice(0, token + 1), head * KEY_HEADS // HEADS
            scores = key[seen] @ query[token, head] / HEAD_DIM**0.5
            mixed[token, head] = scores.softmax(dim=0) @ value[seen]
    states = (normed if options.get("norm_before_residual") else fused) + mixed.flatten(1) @ layer[
        "self_attn.o_proj.weight"
    ].T
    inner = norm(states, layer["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(inner @ layer["mlp.gate_proj.weight"].T)
    states = states + (gate * (inner @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    last = norm(states, weights["norm.weight"])
    return (last if options.get("norm_output") else states), last @ weights["lm_head.weight"].T


def _rotate(states: torch.Tensor, first_position: int) -> torch.Tensor:
    half = HEAD_DIM // 2
    angles = torch.outer(
        torch.arange(first_position, first_position + len(states)).float(), THETA ** -(torch.arange(half) / half)
    )[:, None]
    low, high = states[..., :half], states[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)
