"""`acceptance`: how much of what was drafted was right? A module for Hugging Face `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

_DESCRIPTION = """\
What speculative decoding gained, from its rounds: tokens per round, acceptance (over all and by draft position, each
given that all before it were accepted), and the share of outcomes that the speculation cache was prepared for.
`hf_ssd.evaluation.round_columns(model.ssd_stats)` gives the inputs.
"""
_INPUTS_DESCRIPTION = """
Args:
    accepted: draft tokens that were accepted in each round.
    reached: positions at which draft tokens were tested: those accepted, and the one where none was right.
    emitted: tokens that the round gave.
    hit: 1 if the speculation cache was prepared for the outcome before, 0 if not, -1 if nothing was looked up.

Returns:
    num_rounds: number of rounds.
    tokens_per_round: mean number of tokens that a round gave.
    acceptance: accepted share of the positions that were reached; `None` if nothing was drafted.
    acceptance_by_position: for each draft position how often it was accepted when all before it were.
    hit_rate: share of hits; `None` if nothing was looked up.
"""
_CITATION = """\
@article{saguaro2026, title={Speculative Speculative Decoding}, journal={arXiv:2603.03251}, year={2026}}
"""


class Acceptance(evaluate.Metric):
    """Rates of speculative decoding, from its rounds."""

    def _info(self) -> evaluate.MetricInfo:
        columns = ("accepted", "reached", "emitted", "hit")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS_DESCRIPTION,
            features=datasets.Features({name: datasets.Value("int64") for name in columns}),
        )

    def _compute(
        self, accepted: Sequence[int], reached: Sequence[int], emitted: Sequence[int], hit: Sequence[int]
    ) -> dict[str, Any]:
        by_position = []
        for position in range(max(reached)):
            tested = [kept > position for kept, end in zip(accepted, reached, strict=True) if end > position]
            by_position.append(sum(tested) / len(tested))
        looked_up = [value for value in hit if value >= 0]
        return {
            "num_rounds": len(accepted),
            "tokens_per_round": sum(emitted) / len(emitted),
            "acceptance": sum(accepted) / sum(reached) if sum(reached) else None,
            "acceptance_by_position": by_position,
            "hit_rate": sum(looked_up) / len(looked_up) if looked_up else None,
        }
