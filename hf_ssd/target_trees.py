"""Token trees in the target's forward: which models take them, and the mask and positions that they need."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging

from . import tree_attention
from .compat import CACHE_KEY
from .kv_cache import keeps_everything
from .types import Speculation
from .wrappers import input_device

logger = logging.get_logger(__name__)


class Masks(Enum):
    """What attention masks a target takes for a speculation."""

    OWN = "own"  # none but what the model makes itself: chains only
    FULL = "full"  # additive, over all slots
    TAIL = "tail"  # additive, over the new slots: attention reads the context once, without a mask (tree_attention.py)


_MASKS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, bool, Masks]] = weakref.WeakKeyDictionary()


def masks_of(model: PreTrainedModel) -> Masks:
    """The masks under which `model` verifies each branch of a tree as it verifies it alone.

    Tried on a few tokens, once per model.
    """
    attention = tree_attention.own_attention(model.config.get_text_config(decoder=True))
    known = _MASKS.get(model)
    if known is None or known[:2] != (attention, model.training):
        known = _MASKS[model] = (attention, model.training, _find_masks(model, attention))
    return known[2]


def counts_slots(model: PreTrainedModel) -> bool:
    """Whether windows go by slots of the cache and not by positions, as in GPT-Neo's local layers.

    Then a token has to be in the slot that it has when decoding one by one: no branches, no holes. What is tried on a
    few tokens cannot find that out, windows being longer.
    """
    return "local" in getattr(model.config.get_text_config(decoder=True), "attention_layers", ())


def tree_inputs(inputs: dict[str, Any], speculation: Speculation, masks: Masks, dtype: torch.dtype) -> dict[str, Any]:
    """The inputs of a forward on the root and the draft tokens of a tree, from those of a chain of the same length.

    Args:
        inputs: Of a chain, as the model prepares them: `attention_mask` of shape `(1, num_slots)` or `None`, and
            `position_ids` whose last dimension is the root and the draft tokens.
        speculation: The tree, or a chain.
        masks: What the model takes; not its own.
        dtype: Dtype of the mask, the model's.

    Returns:
        The same with an additive mask of shape `(1, 1, 1 + len(speculation), num_slots)`, or for the new slots only, in
        which each token sees what was before the tree, its ancestors and itself; and with each token at the position
        that its depth gives it.
    """
    num_tokens = 1 + len(speculation)
    padding, positions = inputs.get("attention_mask"), inputs["position_ids"]
    sees = torch.zeros((num_tokens, num_tokens), dtype=torch.bool, device="cpu")
    sees[0, 0] = True
    for index, parent in enumerate(speculation.parents):
        sees[index + 1] = sees[parent + 1]
        sees[index + 1, index + 1] = True
    device = positions.device
    mask = torch.zeros((num_tokens, num_tokens), dtype=dtype, device=device)
    mask.masked_fill_(~sees.to(device), float("-inf"))
    if masks is Masks.FULL or (padding is not None and not bool(padding.all())):
        mask = pad(mask, (inputs[CACHE_KEY].get_seq_length(), 0))
        if padding is not None:
            mask[:, : padding.shape[1]].masked_fill_(padding[0] == 0, float("-inf"))
    offsets = torch.tensor([0, *speculation.depths], device=device)
    return {**inputs, "attention_mask": mask[None, None], "position_ids": positions[..., :1] + offsets}


def attention_for(model: PreTrainedModel, inputs: dict[str, Any]) -> AbstractContextManager[None]:
    """Within it the model's attention is one that takes the mask in `inputs`."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 4 or mask.shape[-1] != mask.shape[-2]:
        return nullcontext()
    return tree_attention.use(model.config.get_text_config(decoder=True))


def _find_masks(model: PreTrainedModel, attention: str) -> Masks:
    if counts_slots(model):
        return Masks.OWN
    # `generate()` gives positions to those only that name them.
    if attention not in ("eager", "sdpa") or "position_ids" not in inspect.signature(model.forward).parameters:
        return Masks.OWN
    # On a GPU the library's own kernels are at home with full masks.
    if attention == "sdpa" and model.device.type == "cpu" and _gives_what_branches_give(model, Masks.TAIL):
        return Masks.TAIL
    return Masks.FULL if _gives_what_branches_give(model, Masks.FULL) else Masks.OWN


def _gives_what_branches_give(model: PreTrainedModel, masks: Masks) -> bool:
    device = input_device(model)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prefix = [(7 * i + 1) % vocab_size for i in range(8)]
    tree = Speculation(tokens=tuple(token % vocab_size for token in (4, 5, 6)), parents=(-1, -1, 1))
    tree_attention.register()

    def run(tokens: Sequence[int], cache: Cache, **kwargs: Any) -> torch.Tensor:
        input_ids = torch.tensor([tokens], device=device)
        return model(input_ids=input_ids, **{CACHE_KEY: cache}, use_cache=True, return_dict=True, **kwargs).logits[0]

    try:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            run(prefix[:-1], cache)
            if not keeps_everything(cache):
                return False
            first, second, third = tree.tokens
            alone = torch.cat(
                [
                    run([*prefix, *branch], DynamicCache(config=model.config))[-len(branch) :]
                    for branch in ((first,), (second, third))
                ]
            )
            positions = torch.arange(7, 11, device=device)[None]
            inputs = tree_inputs({CACHE_KEY: cache, "position_ids": positions}, tree, masks, model.dtype)
            kwargs = {name: inputs[name] for name in ("attention_mask", "position_ids")}
            with attention_for(model, inputs):
                together = run([prefix[-1], *tree.tokens], cache, **kwargs)[1:]
    except Exception as error:  # whatever a model's own code may raise: it gets chains then
        logger.info(f"The target does not take {masks.value} masks for trees ({error!r}).")
        return False
    expected = alone.float()
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.05) * expected.norm(dim=1)
    return bool(((together.float() - expected).norm(dim=1) <= tolerance).all())
