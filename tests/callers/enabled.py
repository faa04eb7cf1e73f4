"""What callers get: a model on which somebody called `enable_ssd`, and proof that drafts were really verified."""

from __future__ import annotations

from plain import INLINE
from tiny_models import make_noisy, make_target
from transformers import PreTrainedModel

from hf_ssd import SSDConfig, enable_ssd

GREEDY = {"max_new_tokens": 24, "do_sample": False}


def enabled_target(assistant: PreTrainedModel | None = None, ssd_config: SSDConfig = INLINE) -> PreTrainedModel:
    """T with D as its assistant, or another."""
    return enable_ssd(make_target(), assistant_model=assistant or make_noisy(), ssd_config=ssd_config)


def assert_speculated(model: PreTrainedModel) -> None:
    """The latest call accepted draft tokens, and looked for what had been prepared before the outcome was known.

    Whether that was ready depends on the machine where the assistant works beside the target.
    """
    stats = model.ssd_stats
    assert stats.mode == "ssd"
    assert stats.degraded is None
    assert stats.acceptance is not None
    assert stats.acceptance > 0
    is_inline = stats.assistant_threads is None
    assert (stats.num_hits if is_inline else stats.num_hits + stats.num_misses) > 0
