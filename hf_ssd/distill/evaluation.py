"""The closing evaluation: the saved assistant, as a user would load it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bench.settings import sampling_arguments
from ..config import SSDConfig
from ..generation import disable_ssd, enable_ssd
from ..metrics import SSDStats
from .results import Rounds

TEMPERATURES = (0.7, 1.0)
NUM_PROMPTS = 8
NUM_NEW_TOKENS = 64


def measure_rounds(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    pad_token_id: int,
    seed: int = 0,
) -> dict[float, Rounds]:
    """Lets SSD go on from some prompts, and counts.

    Effects: SSD is off on the target afterwards.

    Args:
        target: The model whose output is wanted.
        assistant: The model that drafts.
        prompts: Token ids.
        temperatures: 0 decodes greedily.
        pad_token_id: Of the target.
        seed: Of the draws.
    """
    enable_ssd(target, assistant_model=assistant, ssd_config=SSDConfig(seed=seed))
    try:
        return {
            temperature: _summarise(
                [_stats(target, prompt, temperature, pad_token_id) for prompt in prompts], len(prompts)
            )
            for temperature in temperatures
        }
    finally:
        disable_ssd(target)


def _stats(target: PreTrainedModel, prompt: Sequence[int], temperature: float, pad_token_id: int) -> SSDStats:
    input_ids = torch.tensor([list(prompt)], device=target.device)
    kwargs: dict[str, Any] = {"max_new_tokens": NUM_NEW_TOKENS, "pad_token_id": pad_token_id}
    target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **sampling_arguments(temperature), **kwargs)
    stats: SSDStats = target.ssd_stats
    return stats


def _summarise(calls: Sequence[SSDStats], num_prompts: int) -> Rounds:
    # All rounds as those of one call, so that each counts once.
    whole = SSDStats(mode="ssd", rounds=tuple(one for call in calls for one in call.rounds))
    degraded = next((call.degraded for call in calls if call.degraded is not None), None)
    return Rounds(num_prompts, whole.num_rounds, whole.tokens_per_round, whole.acceptance, whole.hit_rate, degraded)
