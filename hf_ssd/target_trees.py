"""Token trees in the target's forward: which models take them, and the mask and positions that they need."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils import logging

from . import tree_attention
from .compat import CACHE_KEY
from .decoders import (
    EncoderStates,
    argument,
    at_positions,
    decoder_config,
    names_positions,
    takes_positions,
    trial_states,
)
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
    attention = tree_attention.own_attention(decoder_config(model))
    known = _MASKS.get(model)
    if known is None or known[:2] != (attention, model.training):
        known = _MASKS[model] = (attention, model.training, _find_masks(model, attention))
    return known[2]


def counts_slots(model: PreTrainedModel) -> bool:
    """Whether windows go by slots of the cache and not by positions, as in GPT-Neo's local layers.

    Then a token has to be in the slot that it has when decoding one by one: no branches, no holes. What is tried on a
    few tokens cannot find that out, windows being longer.
    """
    return "local" in getattr(decoder_config(model), "attention_layers", ())


def tree_inputs(
    model: PreTrainedModel, inputs: dict[str, Any], speculation: Speculation, masks: Masks
) -> dict[str, Any]:
    """The inputs of a forward on the root and the draft tokens of a tree, from those of a chain of the same length.

    Args:
        model: The target.
        inputs: Of a chain, as the model prepares them: `attention_mask` of shape `(1, num_slots)` or `None`, and
            `position_ids` whose last dimension is the root and the draft tokens, or none where they are the slots. An
            encoder-decoder model's have `decoder_` in front.
        speculation: The tree, or a chain.
        masks: What the model takes; not its own.

    Returns:
        The same with an additive mask of shape `(1, 1, 1 + len(speculation), num_slots)`, or for the new slots only, in
        which each token sees what was before the tree, its ancestors and itself; and with each token at the position
        that its depth gives it.
    """
    num_tokens = 1 + len(speculation)
    mask_name, positions_name = argument(model, "attention_mask"), argument(model, "position_ids")
    padding, positions = inputs.get(mask_name), inputs.get(positions_name)
    num_before = inputs[CACHE_KEY].get_seq_length()
    sees = torch.zeros((num_tokens, num_tokens), dtype=torch.bool, device="cpu")
    sees[0, 0] = True
    for index, parent in enumerate(speculation.parents):
        sees[index + 1] = sees[parent + 1]
        sees[index + 1, index + 1] = True
    device = inputs[argument(model, "input_ids")].device
    mask = torch.zeros((num_tokens, num_tokens), dtype=model.dtype, device=device)
    mask.masked_fill_(~sees.to(device), float("-inf"))
    if masks is Masks.FULL or (padding is not None and not bool(padding.all())):
        mask = pad(mask, (num_before, 0))
        if padding is not None:
            mask[:, : padding.shape[1]].masked_fill_(padding[0] == 0, float("-inf"))
    offsets = torch.tensor([0, *speculation.depths], device=device)
    positions = offsets[None] + (num_before if positions is None else positions[..., :1])
    return {**inputs, mask_name: mask[None, None], positions_name: positions}


@contextmanager
def attention_for(model: PreTrainedModel, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Within it the model's attention is one that takes the mask in `inputs`.

    Yields what of `inputs` the model has a name for; positions it gets in another way if it has none.
    """
    mask, positions_name = inputs.get(argument(model, "attention_mask")), argument(model, "position_ids")
    with ExitStack() as stack:
        if mask is not None and mask.ndim == 4 and mask.shape[-1] == mask.shape[-2]:
            stack.enter_context(tree_attention.use(decoder_config(model)))
        if positions_name in inputs and not names_positions(model):
            positions = inputs[positions_name]
            inputs = {name: value for name, value in inputs.items() if name != positions_name}
            stack.enter_context(at_positions(model, positions[0]))
        yield inputs


def _find_masks(model: PreTrainedModel, attention: str) -> Masks:
    if counts_slots(model):
        return Masks.OWN
    # `generate()` gives positions to those only that name them.
    has_positions = takes_positions(model) if model.config.is_encoder_decoder else names_positions(model)
    if attention not in ("eager", "sdpa") or not has_positions:
        return Masks.OWN
    # On a GPU the library's own kernels are at home with full masks.
    if attention == "sdpa" and model.device.type == "cpu" and _gives_what_branches_give(model, Masks.TAIL):
        return Masks.TAIL
    return Masks.FULL if _gives_what_branches_give(model, Masks.FULL) else Masks.OWN


def _gives_what_branches_give(model: PreTrainedModel, masks: Masks) -> bool:
    device = input_device(model)
    vocab_size = decoder_config(model).vocab_size
    states = trial_states(model)
    prefix = [(7 * i + 1) % vocab_size for i in range(8)]
    tree = Speculation(tokens=tuple(token % vocab_size for token in (4, 5, 6)), parents=(-1, -1, 1))
    tree_attention.register()

    def new_cache() -> Cache:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        return cache if states is None else EncoderDecoderCache(cache, DynamicCache())

    def run(tokens: Sequence[int], cache: Cache, **kwargs: Any) -> torch.Tensor:
        given = {argument(model, "input_ids"): torch.tensor([tokens], device=device), CACHE_KEY: cache, **kwargs}
        if states is not None:
            given["encoder_outputs"] = EncoderStates(last_hidden_state=states)
        return model(**given, use_cache=True, return_dict=True).logits[0]

    try:
        with torch.inference_mode():
            cache = new_cache()
            run(prefix[:-1], cache)
            if not keeps_everything(cache):
                return False
            first, second, third = tree.tokens
            alone = torch.cat(
                [run([*prefix, *branch], new_cache())[-len(branch) :] for branch in ((first,), (second, third))]
            )
            tokens = [prefix[-1], *tree.tokens]
            given = {CACHE_KEY: cache, argument(model, "input_ids"): torch.tensor([tokens], device=device)}
            with attention_for(model, tree_inputs(model, given, tree, masks)) as inputs:
                kwargs = {name: inputs[name] for name in inputs.keys() - given.keys()}
                together = run(tokens, cache, **kwargs)[1:]
    except Exception as error:  # whatever a model's own code may raise: it gets chains then
        logger.info(f"The target does not take {masks.value} masks for trees ({error!r}).")
        return False
    expected = alone.float()
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.05) * expected.norm(dim=1)
    return bool(((together.float() - expected).norm(dim=1) <= tolerance).all())
