"""Token trees in the target's forward: which models take them, and the mask and positions that they need."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils import logging

from .compat import CACHE_KEY
from .types import Speculation

logger = logging.get_logger(__name__)

_TAKES_TREES: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, bool]] = weakref.WeakKeyDictionary()


def takes_trees(model: PreTrainedModel) -> bool:
    """Whether `model` verifies a token tree as it verifies each branch alone. Tried on a few tokens, once per model."""
    attention = str(model.config.get_text_config(decoder=True)._attn_implementation)
    known = _TAKES_TREES.get(model)
    if known is None or known[0] != attention:
        known = _TAKES_TREES[model] = (attention, attention in ("eager", "sdpa") and _gives_what_branches_give(model))
    return known[1]


def keeps_everything(cache: Cache | None) -> bool:
    """Whether the entries of any branch can be kept: windows, fixed sizes and states allow chains only."""
    return cache is None or all(type(layer) is DynamicLayer for layer in cache.layers)


def tree_inputs(inputs: dict[str, Any], speculation: Speculation, dtype: torch.dtype) -> dict[str, Any]:
    """The inputs of a forward on the root and the draft tokens of a tree, from those of a chain of the same length.

    Args:
        inputs: Of a chain, as the model prepares them: `attention_mask` of shape `(1, num_slots)` or `None`, and
            `position_ids` whose last dimension is the root and the draft tokens.
        speculation: The tree.
        dtype: Dtype of the mask, the model's.

    Returns:
        The same with an additive mask of shape `(1, 1, 1 + len(speculation), num_slots)`, in which each token sees what
        was before the tree, its ancestors and itself; and with each token at the position that its depth gives it.
    """
    num_tokens = 1 + len(speculation)
    padding, positions = inputs.get("attention_mask"), inputs["position_ids"]
    num_slots = inputs[CACHE_KEY].get_seq_length() + num_tokens
    sees = torch.zeros((num_tokens, num_tokens), dtype=torch.bool)
    sees[0, 0] = True
    for index, parent in enumerate(speculation.parents):
        sees[index + 1] = sees[parent + 1]
        sees[index + 1, index + 1] = True
    device = positions.device
    mask = torch.zeros((num_tokens, num_slots), dtype=dtype, device=device)
    mask[:, num_slots - num_tokens :].masked_fill_(~sees.to(device), float("-inf"))
    if padding is not None:
        mask[:, : padding.shape[1]].masked_fill_(padding[0] == 0, float("-inf"))
    offsets = torch.tensor([0, *speculation.depths], device=device)
    return {**inputs, "attention_mask": mask[None, None], "position_ids": positions[..., :1] + offsets}


def _gives_what_branches_give(model: PreTrainedModel) -> bool:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False  # `generate()` goes by that, and gives it none
    device = model.get_input_embeddings().weight.device
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prefix, branches = [token % vocab_size for token in (1, 2, 3)], [4 % vocab_size, 5 % vocab_size]
    tree = Speculation(tokens=tuple(branches), parents=(-1, -1))

    def run(tokens: list[int], cache: Cache, **kwargs: Any) -> torch.Tensor:
        input_ids = torch.tensor([tokens], device=device)
        return model(input_ids=input_ids, **{CACHE_KEY: cache}, use_cache=True, return_dict=True, **kwargs).logits[0]

    try:
        with torch.inference_mode():
            probe = DynamicCache(config=model.config)
            run(prefix, probe)
            if not keeps_everything(probe):
                return False
            alone = torch.stack([run([*prefix, token], DynamicCache(config=model.config))[-1] for token in branches])
            cache = DynamicCache(config=model.config)
            run(prefix[:-1], cache)
            positions = torch.tensor([[2, 3, 4]], device=device)
            inputs = tree_inputs({CACHE_KEY: cache, "position_ids": positions}, tree, model.dtype)
            together = run([prefix[-1], *branches], cache, **{k: v for k, v in inputs.items() if k != CACHE_KEY})[1:]
    except Exception as error:  # whatever a model's own code may raise: it gets chains then
        logger.info(f"The target does not take token trees ({error!r}).")
        return False
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.05) * alone.float().abs().max()
    return bool((together.float() - alone.float()).abs().max() <= tolerance)
