"""What two loaded models can do for each other, found out as a call finds it out: by trying."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..batch_decoding import decodes_together
from ..compat import CACHE_KEY
from ..config import SSDConfig
from ..drafting import make_assistant
from ..drafting.draft_vocab import resolve_size
from ..drafting.eagle3 import Eagle3Assistant
from ..runtime.pool import drafts_in_thread
from ..target_trees import Masks, masks_of
from .findings import Findings, Status


def examine_target_abilities(target: PreTrainedModel, findings: Findings) -> None:
    """Adds whether the target verifies trees, and rows together."""
    if masks_of(target) is Masks.OWN:
        findings.add("abilities", "token trees", "the target takes none: it verifies chains", Status.NOTE)
    else:
        findings.add("abilities", "token trees", "verified by the target")
    if decodes_together(target, {CACHE_KEY: DynamicCache(config=target.config)}):
        findings.add("abilities", "batches", "rows share the target's forwards")
    else:
        findings.add("abilities", "batches", "the rows of a batch are decoded one after the other", Status.NOTE)


def examine_assistant_abilities(assistant: PreTrainedModel, findings: Findings) -> None:
    """Adds whether the assistant drafts ahead, packs rows, is run in 8 bits, and drafts from a part of its tokens."""
    with torch.inference_mode():
        own = make_assistant(assistant, None)
        packs_rows = own.takes_trees and own.packs_rows
        is_quantized = make_assistant(assistant, "auto").is_quantized
    if own.takes_trees:
        findings.add("abilities", "drafting ahead", "the assistant takes masks for branches")
    else:
        text = 'the assistant takes no masks for branches: it drafts after each outcome, as mode="sd" does'
        findings.add("abilities", "drafting ahead", text, Status.NOTE)
    text = "share the assistant's forwards" if packs_rows else "are drafted one after the other"
    findings.add("abilities", "drafts of a batch", text, Status.FINE if packs_rows else Status.NOTE)
    eight_bits = "a draft step is faster in them" if is_quantized else "not used: they would not make steps faster here"
    findings.add("abilities", "8 bits", eight_bits)
    size = None if own.head is None else resolve_size("auto", own.vocab_size)
    if isinstance(own, Eagle3Assistant):
        size = len(own.drafted_tokens)
    of_all = f"continuations come from {size} of the {own.vocab_size} tokens" if size else "all tokens"
    findings.add("abilities", "draft vocabulary", of_all)
    if drafts_in_thread(assistant, SSDConfig()):
        text = "a thread of this process, which overlaps less than one of its own"
        findings.add("abilities", "assistant's place", text, Status.NOTE)
