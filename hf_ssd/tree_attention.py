"""Attention of a few tokens on branches to a long prefix that all of them see.

A mask that is narrower than the keys says it all: it belongs to the last keys, those before are seen by every token. So
no mask of the context's length is made. The heads of a group are rows of one product, which reads each key once where
transformers repeats keys and values for every head.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

NAME = "hf_ssd_tree"

# Query, key, value and scaling to output and log-sum-exp: attention to keys that every row sees.
PrefixKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]

FEW_SCORES = 16_384  # for each head of keys; up to here one fused call is faster than what pays for more

# Arguments that change scores; a model that gives one of them is left to transformers' attention.
_CHANGE_SCORES = ("softcap", "position_bias", "s_aux")


# Which configs have another attention for a while: its name, their own, and how many forwards need it.
_IN_USE: dict[int, tuple[str, str, int]] = {}
_CHANGED = threading.Condition()


@contextmanager
def use(config: PreTrainedConfig, name: str = NAME) -> Iterator[None]:
    """Within it models of this config attend by a registered attention, by default this one.

    Several threads may be within at once, as all of a model's forwards then run by it. With masks of full width this
    one changes nothing, so that threads without it may run them meanwhile.
    """
    key = id(config)
    with _CHANGED:
        _CHANGED.wait_for(lambda: key not in _IN_USE or _IN_USE[key][0] == name)
        _, own, num_users = _IN_USE.get(key, (name, config._attn_implementation, 0))
        _IN_USE[key] = (name, own, num_users + 1)
        config._attn_implementation = name
    try:
        yield
    finally:
        with _CHANGED:
            _, own, num_users = _IN_USE.pop(key)
            if num_users > 1:
                _IN_USE[key] = (name, own, num_users - 1)
            else:
                config._attn_implementation = own
                _CHANGED.notify_all()


def own_attention(config: PreTrainedConfig) -> str:
    """The attention of a config, whatever a thread within `use` has put in its place for the moment."""
    with _CHANGED:
        return str(_IN_USE[id(config)][1] if id(config) in _IN_USE else config._attn_implementation)


def register() -> None:
    """Makes the attention known to transformers as `NAME`. With any other mask it is sdpa."""
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tail_mask: torch.Tensor,
    scaling: float | None = None,
    kernel: PrefixKernel | None = None,
) -> torch.Tensor:
    """Attention to all keys before the tail, and to those of the tail that the mask shows.

    Args:
        query: Of shape `(1, num_heads, num_tokens, head_dim)`.
        key: Of shape `(1, num_kv_heads, num_keys, head_dim)`.
        value: Of shape `(1, num_kv_heads, num_keys, value_dim)`.
        tail_mask: Additive mask of shape `(num_tokens, num_tail)` for the last `num_tail` keys. Each token must see
            something.
        scaling: Of the scores; by default one over the root of `head_dim`.
        kernel: Attends the prefix by itself, to be merged with the tail by log-sum-exp. Without one both are attended
            together, by matrix products if there are many scores.

    Returns:
        Of shape `(1, num_heads, num_tokens, value_dim)`.
    """
    num_heads, num_tokens, head_dim = query.shape[1:]
    scaling = head_dim**-0.5 if scaling is None else scaling
    num_kv_heads, num_prefix = key.shape[1], key.shape[2] - tail_mask.shape[1]
    folded = query.reshape(num_kv_heads, -1, head_dim)
    if kernel is not None and num_prefix > 0:
        output = _attend_in_two(folded, key[0], value[0], tail_mask, scaling, kernel)
    elif folded.shape[1] * key.shape[2] > FEW_SCORES:
        output = _attend_in_one(folded, key[0], value[0], tail_mask, scaling)
    else:
        return masked_attention(query, key, value, pad(tail_mask, (num_prefix, 0)), scaling)
    return output.view(1, num_heads, num_tokens, -1)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Attention to all keys through a full mask of shape `(num_tokens, num_keys)`, in one fused call.

    The other arguments and the result are those of [`tree_attention`].
    """
    num_heads, num_tokens, head_dim = query.shape[1:]
    folded = query.reshape(1, key.shape[1], -1, head_dim)
    mask = mask.expand(num_heads // key.shape[1], -1, -1).flatten(0, 1)
    output = scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return output.view(1, num_heads, num_tokens, -1)


def _attend_in_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tail_mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    num_tokens, num_tail = tail_mask.shape
    query = query.float() * scaling

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # In float32, as fused kernels do it: a large score in bfloat16 is off by a factor in the softmax.
        scores = query @ key.float().mT
        if num_tail:
            scores.unflatten(-2, (-1, num_tokens))[..., -num_tail:].add_(tail_mask)
        return torch.softmax(scores, dim=-1, out=scores).to(value.dtype) @ value

    if query.device.type != "cpu":
        return attend(query, key, value)
    # Head by head the scores stay in the processor's cache, and keys that are views of a slab are not copied.
    return torch.stack([attend(*head) for head in zip(query, key, value, strict=True)])


def _attend_in_two(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tail_mask: torch.Tensor,
    scaling: float,
    kernel: PrefixKernel,
) -> torch.Tensor:
    num_tokens, num_tail = tail_mask.shape
    num_prefix = key.shape[1] - num_tail
    output, lse = (
        each[0] for each in kernel(query[None], key[None, :, :num_prefix], value[None, :, :num_prefix], scaling)
    )
    if num_tail == 0:
        return output
    # In float32: a large score that is rounded to bfloat16 is off by a factor in the softmax.
    scores = (query.float() @ key[:, num_prefix:].float().mT) * scaling
    scores.unflatten(-2, (-1, num_tokens)).add_(tail_mask)
    lse = lse[..., None]
    merged_lse = torch.logaddexp(lse, scores.logsumexp(dim=-1, keepdim=True))
    # Weights go by the merged sum. So a row that sees nothing of the tail has weights of 0 there, not undefined ones.
    tail_weights = (scores - merged_lse).exp().to(value.dtype)
    return (output * (lse - merged_lse).exp()).to(value.dtype) + tail_weights @ value[:, num_prefix:]


def prefix_kernel(query: torch.Tensor, value: torch.Tensor) -> PrefixKernel | None:
    """The kernel for queries and values like these; `None` where matrix products are best, as on the CPU."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    head_dim = query.shape[-1]
    if query.device.type != "cuda" or not is_half or head_dim % 8 or head_dim > 256 or value.shape[-1] != head_dim:
        return None
    return _flash_attn if is_flash_attn_2_available() else _torch_flash


def _flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn import flash_attn_func

    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    output, lse, _ = flash_attn_func(query, key, value, softmax_scale=scaling, return_attn_probs=True)
    return output.transpose(1, 2), lse


def _torch_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scaling)
    return output, lse


def unknown_arguments(kwargs: dict[str, Any]) -> list[str]:
    """Those arguments of a model's attention that this module does not know how to obey."""
    return [name for name in _CHANGE_SCORES if kwargs.get(name) is not None]


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call.

    Raises:
        NotImplementedError: If the model wants more than this can do.
    """
    if attention_mask is None or attention_mask.shape[-1] == key.shape[-2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    unknown = unknown_arguments(kwargs)
    if unknown or query.shape[0] != 1 or attention_mask.shape[:2] != (1, 1):
        raise NotImplementedError(f"Tree attention is for single rows and plain scores, but got {unknown}.")
    output = tree_attention(query, key, value, attention_mask[0, 0], scaling, prefix_kernel(query, value))
    return output.transpose(1, 2), None
