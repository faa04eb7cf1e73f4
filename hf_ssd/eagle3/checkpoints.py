"""Heads on disk: vllm-project's `speculators` write one form, SafeAILab's EAGLE and those that follow it another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..vocabulary import UnsupportedError
from .config import Eagle3Config
from .head import Eagle3Head

# SafeAILab's names, and a prefix that some exporters add.
RENAMED = {r"^model\.": "", r"^(model\.)?midlayer\.": "layers.0."}

# Fields of the head in a flat configuration; all others are the layer's.
_OWN_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
_DRAFT_SIZES = ("draft_vocab_size", "truncated_vocab_size")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Weights that some checkpoints hold besides the head's: what a configuration tells, and copies of the target's.
_NOT_THE_HEADS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^verifier_")


def read_config(name_or_path: str, **source: Any) -> Eagle3Config | None:
    """The configuration of a head; `None` if the folder holds another kind of model.

    Args:
        name_or_path: Name on the hub, or folder.
        **source: Which files are meant, as in `from_pretrained`: `revision`, `subfolder`, `local_files_only` and so on.

    Raises:
        OSError: If there is no configuration.
        UnsupportedError: If it is a head of a kind that is not known here, or quantised.
    """
    values, _ = PreTrainedConfig.get_config_dict(name_or_path, **source)
    is_flat = any("Eagle3" in name for name in values.get("architectures") or ()) or any(
        name in values for name in _DRAFT_SIZES
    )
    is_speculators = values.get("speculators_model_type") == "eagle3"
    if not is_flat and not is_speculators:
        return None
    if any(each.get("quantization_config") for each in (values, values.get("transformer_layer_config") or {})):
        raise UnsupportedError(
            f"`name_or_path` must hold a head whose weights are not quantised, but {name_or_path!r} has a "
            "`quantization_config`. Choose its checkpoint in 16 or 32 bits."
        )
    config: Eagle3Config = Eagle3Config.from_dict(values) if is_speculators else _from_flat(values)
    return config


def load_head(
    name_or_path: str,
    target: PreTrainedModel | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    **source: Any,
) -> Eagle3Head:
    """Loads a head in either form.

    Args:
        name_or_path: Name on the hub, or folder.
        target: The model it drafts for, whose token embedding it shares if the checkpoint holds none.
        dtype: Type of the weights; `"auto"` is the checkpoint's.
        **source: Which files are meant, as in `from_pretrained`.

    Returns:
        [`Eagle3Head`]: In evaluation mode, on the CPU.

    Raises:
        OSError: If there is no such head.
        UnsupportedError: If it is none, is quantised, has weights that are not known here, lacks some or has them in
            another shape, or is another target's.
    """
    config = read_config(name_or_path, **source)
    if config is None:
        raise UnsupportedError(f"`name_or_path` must hold an EAGLE-3 head, but {name_or_path!r} holds another model.")
    with _quiet():  # what is missing is looked at below, and some of it may be
        head, info = Eagle3Head.from_pretrained(
            name_or_path,
            config=config,
            dtype=dtype,
            key_mapping=RENAMED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in fewer words
            **source,
        )
    head._weight_conversions = None  # or it would be saved under the names that it was read from
    _check_weights(info, name_or_path)
    missing = set(info["missing_keys"])
    _complete_vocabulary(head, missing, name_or_path)
    if "embed_tokens.weight" in missing:
        if target is None:
            raise UnsupportedError(
                f"`target` must be given for the head in {name_or_path!r}, which holds no token embedding of its own: "
                "it takes the target's."
            )
        head.share_embedding(target)
    if unread := missing - {"embed_tokens.weight", "d2t", "t2d"}:
        raise UnsupportedError(
            f"`name_or_path` must hold a whole head, but {name_or_path!r} lacks {', '.join(sorted(unread))}."
        )
    return head.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _from_flat(values: dict[str, Any]) -> Eagle3Config:
    """From a configuration that describes the layer as if it were a model."""
    own = {name: values[name] for name in _OWN_FIELDS if values.get(name) is not None}
    sizes = [values[name] for name in _DRAFT_SIZES if values.get(name)]
    dropped = {*_OWN_FIELDS, *_DRAFT_SIZES, _LAYER_IDS, "eagle_config", "architectures"}
    layer = {name: value for name, value in values.items() if name not in dropped}
    return Eagle3Config(
        transformer_layer_config=layer,
        draft_vocab_size=sizes[0] if sizes else values["vocab_size"],
        eagle_aux_hidden_state_layer_ids=_flat_layer_ids(values),
        dtype=values.get("dtype") or values.get("torch_dtype"),
        **own,
    )


def _flat_layer_ids(values: dict[str, Any]) -> list[int] | None:
    """Which states of the target a head of the flat form reads, counted as [`default_layer_ids`] does.

    Within `eagle_config` SpecForge and ModelOpt write indices of layers, and by default begin with 1, which is state 2.
    Others write states there, and by default begin with 2. SGLang tells them apart by the first number, and so do we.
    """
    nested: list[int] = (values.get("eagle_config") or {}).get(_LAYER_IDS) or []
    if nested and nested[0] == 1:
        return [index + 1 for index in nested]
    return nested or values.get(_LAYER_IDS) or None


def _check_weights(info: dict[str, Any], name_or_path: str) -> None:
    """Refuses a checkpoint with weights that were not loaded: the head would draft, but nothing sensible."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise UnsupportedError(
            f"`name_or_path` must hold weights as its configuration says, but {name_or_path!r} has {name} of shape "
            f"{tuple(found)}, where {tuple(wanted)} is expected. Heads of other forms cannot be read."
        )
    if unknown := sorted(name for name in info["unexpected_keys"] if not _NOT_THE_HEADS.search(name)):
        raise UnsupportedError(
            f"`name_or_path` must hold the weights of an EAGLE-3 head and no others, but {name_or_path!r} has "
            f"{', '.join(unknown)} too. Heads of other forms, quantised ones among them, cannot be read."
        )


def _complete_vocabulary(head: Eagle3Head, missing: set[str], name_or_path: str) -> None:
    """Derives `t2d` from `d2t` where only that is there. Neither is needed where all tokens are drafted."""
    if "d2t" not in missing:
        head.set_draft_tokens(head.draft_tokens)
    elif len(head.d2t) < len(head.t2d):
        raise UnsupportedError(
            f"`name_or_path` must say which {len(head.d2t)} of {len(head.t2d)} tokens are drafted, but "
            f"{name_or_path!r} lacks `d2t`."
        )
