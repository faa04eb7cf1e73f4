"""`=AR`: the output of SSD is that of transformers' own `generate()`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ssd.config import SSDConfig
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats

INLINE = SSDConfig(backend="inline", num_assistant_tokens=4)


def assert_equals_plain(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    input_ids: torch.Tensor,
    ssd_config: SSDConfig = INLINE,
    **kwargs: Any,
) -> SSDStats:
    """Generates both ways, compares, and returns the figures of the call.

    Arguments with a memory must be given as a function without arguments that makes them: each way gets its own.
    """

    def arguments() -> dict[str, Any]:
        made = {
            key: value() if key in ("stopping_criteria", "logits_processor") else value for key, value in kwargs.items()
        }
        return {"do_sample": False, **made}

    plain = target.generate(input_ids, **arguments())
    ids = generate_with_ssd(target, inputs=input_ids, assistant_model=assistant, ssd_config=ssd_config, **arguments())
    assert ids.tolist() == plain.tolist()
    stats: SSDStats = target.ssd_stats
    assert stats.degraded is None
    assert stats.rounds or ids.shape[1] <= input_ids.shape[1] + 1, "nothing was drafted"
    return stats
