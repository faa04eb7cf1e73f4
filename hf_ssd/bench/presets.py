"""Hardware and pairs that were published, as conditions of a prediction. Everything in them is an assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import SSDConfig
from .advice import Devices
from .conditions import Conditions


@dataclass(frozen=True)
class Preset:
    """Published conditions.

    Args:
        title: What they are of.
        conditions: Times, acceptance and hits.
        devices: What they run on.
        assumptions: Where each figure comes from.
    """

    title: str
    conditions: Conditions
    devices: Devices
    assumptions: tuple[str, ...]


# github.com/tanishqkumar/ssd, tests/reference_test_outputs.md of February 2026.
_ENGINE = "as the authors' engine reports"

PRESETS: Mapping[str, Preset] = {
    "paper": Preset(
        title="Llama-3.1-70B on four H100 with Llama-3.2-1B on a fifth, greedy (arXiv 2603.03251)",
        conditions=Conditions(
            verify_base_ms=18.41,
            verify_token_ms=0.09,
            overhead_ms=0.0,
            token_ms=2.35,
            step_ms=3.1,
            branch_ms=0.01,
            budget=21,
            acceptance=(0.93,) * 6,
            exponent=SSDConfig.power_law_exponent,
            draft_length=6,
            depth_per_step=6 / 7,
        ).with_hit_rate(0.93),
        devices=Devices(target=4, assistant=1),
        assumptions=(
            f"a target forward takes 18.5 ms: 54 tokens/s without speculation, {_ENGINE}.",
            "one more token adds 0.09 ms to it: a two-hundredth, the roofline of an H100 at two thirds of its peak.",
            f"a step of 21 branches takes 3.1 ms: about 22 ms for the seven forwards of a round, {_ENGINE} with K = 6 "
            "and fan-out 3. One more token adds 0.01 ms: at batch size 16 these forwards take 44 ms there.",
            f"a token drafted alone takes 2.35 ms: what 172 tokens/s of SD leave for each of six, {_ENGINE}.",
            "0.93 of the draft tokens are accepted: 5.7 tokens per round, which is what 270 tokens/s of SSD are at 21 "
            "ms per round there.",
            "0.93 of the outcomes are prepared for: the paper has about 0.9 and more at temperature 0.",
        ),
    ),
}
