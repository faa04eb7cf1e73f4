"""A batch whose rows are sampled at temperatures of their own, some of them greedily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessor, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import tree_attention

# Sampled rows choose among so many tokens: drawing from all costs a tenth of a step on a CPU, and a small model's tail
# is noise.
NUM_CANDIDATES = 64

ATTENTION = "hf_ssd_grouped"


class RowSampler(LogitsProcessor):
    """Makes greedy decoding draw samples, in rows that have a temperature.

    The arg-max of logits with Gumbel noise is a sample from their softmax.

    Args:
        temperatures: One per row; 0 leaves a row's scores as they are.
        generator: Of the draws.
    """

    def __init__(self, temperatures: Sequence[float], generator: torch.Generator) -> None:
        self._rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
        self._temperatures = torch.tensor([temperatures[row] for row in self._rows])[:, None]
        self._generator = generator

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Scores whose arg-max is each row's next token."""
        if not self._rows:
            return scores
        best = scores[self._rows].float().topk(min(NUM_CANDIDATES, scores.shape[1]), dim=1)
        noise = torch.empty(best.values.shape).exponential_(generator=self._generator).log_().neg_()
        drawn = (best.values.cpu() / self._temperatures + noise).argmax(dim=1, keepdim=True).to(scores.device)
        tokens = best.indices.gather(1, drawn)
        chosen = scores.clone()
        chosen[self._rows, tokens[:, 0]] = float("inf")
        return chosen


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it a step of many rows does not copy the cache.

    Where several heads share keys, sdpa with a mask repeats the keys of all rows for every head; on a CPU that is a
    third of a step. Here the heads of a group are rows of one product instead.
    """
    if model.config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    with tree_attention.use(model.config, ATTENTION):
        yield


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    batch_size, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_tokens != 1 or num_heads == num_kv_heads or tree_attention.unknown_arguments(kwargs):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    folded = query.view(batch_size, num_kv_heads, -1, head_dim)
    output = scaled_dot_product_attention(folded, key, value, attention_mask, scale=scaling)
    return output.reshape(batch_size, num_heads, 1, -1).transpose(1, 2).contiguous(), None
