"""EAGLE-3 heads for a tiny Llama: random ones, and one that was trained for a few seconds and is often right.

Their target is T with less attention. What T itself says next is as good as random for a head of one layer.
"""

from __future__ import annotations

from functools import cache

import torch
from tiny_models import VOCAB_SIZE, make_target
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_ssd.eagle3 import Eagle3Config, Eagle3Head, capture_features, feature_layers

DRAFT_VOCAB_SIZE = 56  # the other tokens can be read, but never drafted
NUM_STEPS, NUM_TEXTS, TEXT_LENGTH = 120, 64, 40
ATTENTION = 0.02


def make_calm_target(**settings: object) -> LlamaForCausalLM:
    """T, hardly distracted by what was long ago."""
    target = make_target(**settings)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(ATTENTION)
    return target


def make_head(target: PreTrainedModel, *, seed: int = 0, draft_vocab_size: int = DRAFT_VOCAB_SIZE) -> Eagle3Head:
    """A head with random weights. Its draft vocabulary leaves out ids all over the target's."""
    layer = target.config.to_dict() | {
        "num_hidden_layers": 1,
        "layer_types": None,
        "dtype": "float32",
        "initializer_range": 0.08,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(Eagle3Config(transformer_layer_config=layer, draft_vocab_size=draft_vocab_size))
        vocab_size = target.config.vocab_size
        head.set_draft_tokens(torch.randperm(vocab_size)[:draft_vocab_size].sort().values)
    head.share_embedding(target)
    return head.eval()


@cache
def _trained_weights() -> dict[str, torch.Tensor]:
    target, generator = make_calm_target(), torch.Generator().manual_seed(0)
    head = make_head(target).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        starts = torch.randint(1, VOCAB_SIZE, (NUM_TEXTS, 6), generator=generator)
        texts = target.generate(starts, do_sample=True, max_new_tokens=TEXT_LENGTH)
        with capture_features(target, feature_layers(target, head)) as features:
            likeliest = target(texts).logits.argmax(dim=-1)
            states = features()
    # Those that cannot be drafted are not learned.
    labels = torch.where(head.t2d[likeliest], head.t2d.cumsum(0)[likeliest] - 1, -100)
    optimizer = torch.optim.AdamW([each for each in head.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(NUM_STEPS):
        rows = torch.randint(NUM_TEXTS, (16,), generator=generator)
        first = head(texts[rows, 1:], head.fuse(states[rows, :-1]))
        # Once more on its own states, as it drafts.
        second = head(texts[rows, 2:], first.hidden_states[:, :-1])
        loss = cross_entropy(first.logits.flatten(0, 1), labels[rows, 1:].flatten())
        loss = loss + cross_entropy(second.logits.flatten(0, 1), labels[rows, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in head.state_dict().items()}


def make_trained_head(target: PreTrainedModel) -> Eagle3Head:
    """A head that has learned from the calm target, which `target` must be."""
    head = make_head(target)
    head.load_state_dict(_trained_weights())
    return head
