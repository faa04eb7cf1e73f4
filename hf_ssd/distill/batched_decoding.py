"""What transformers' `generate()` leaves undone for batches on a CPU, where it costs more than the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import tree_attention

NAME = "hf_ssd_grouped"


@contextmanager
def fast_on_cpu(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model on a CPU decodes batches faster; any other is left as it is.

    The last states of several prompts are a view with gaps, for which torch multiplies by a copy of the output
    projection per prompt: 57 MB each for 49,152 tokens of 576 numbers. They are made contiguous. And keys that several
    heads share are read in place where one token per row attends to them, instead of being repeated for each head.
    """
    with ExitStack() as stack:
        if model.device.type == "cpu":
            projection = model.get_output_embeddings()
            stack.callback(projection.register_forward_pre_hook(_without_gaps).remove)
            config = model.config.get_text_config(decoder=True)
            if config._attn_implementation == "sdpa":
                register()
                stack.enter_context(tree_attention.use(config, NAME))
        yield


def register() -> None:
    """Makes the attention known to transformers as `NAME`."""
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call: the heads of a group are rows of one product."""
    batch_size, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    is_for_heads = attention_mask is not None and attention_mask.shape[1] > 1
    if num_tokens > 1 or num_heads == num_kv_heads or is_for_heads or tree_attention.unknown_arguments(kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    folded = query.reshape(batch_size, num_kv_heads, -1, head_dim)
    output = scaled_dot_product_attention(folded, key, value, attention_mask, scale=scaling)
    return output.reshape(batch_size, 1, num_heads, -1), None


def _without_gaps(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0].contiguous(), *args[1:])
