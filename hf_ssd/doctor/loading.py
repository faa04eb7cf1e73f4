"""Loads what is measured, as transformers made it: SSD is off."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..generation import disable_ssd
from ..pairs import Pair, load_pair


def load_target(name: str, dtype: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, dtype), trust_remote_code=False
    )
    return model


def load_both(target: str, assistant: str, dtype: str) -> Pair:
    pair = load_pair(target, assistant, dtype=getattr(torch, dtype))
    disable_ssd(pair.target)
    return pair
