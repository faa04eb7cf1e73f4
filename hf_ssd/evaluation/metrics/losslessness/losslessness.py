"""`losslessness`: are the texts those of plain decoding, token for token? A module for Hugging Face `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import datasets
import evaluate

from hf_ssd.evaluation.differences import find_first_differences

_DESCRIPTION = """\
Share of texts that are token for token those of plain (autoregressive) decoding, and where the others first differ. In
low precision a difference is to be expected where the two likeliest tokens are nearly tied: with the config "gaps" the
gap between the two highest logits is reported at each first difference.
"""
_INPUTS_DESCRIPTION = """
Args:
    predictions: token ids of each text, prompt excluded.
    references: token ids of plain decoding, in the same order.
    reference_gaps: (config "gaps") for each reference the gap between the two highest logits at each of its tokens; a
        list may be empty where they are not known.

Returns:
    identical_share: share of the texts that are the same.
    num_identical, num_texts: the counts behind it.
    token_share: share of the references' tokens that come before a difference.
    first_differences: for each other text its `index`, the `position` of the first token that differs, and the
        `gap` there.
"""
_CITATION = """\
@article{saguaro2026, title={Speculative Speculative Decoding}, journal={arXiv:2603.03251}, year={2026}}
"""


class Losslessness(evaluate.Metric):
    """Token identity with plain decoding."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        features = {"predictions": tokens, "references": tokens}
        if self.config_name == "gaps":
            features["reference_gaps"] = datasets.Sequence(datasets.Value("float64"))
        elif self.config_name != "default":
            raise ValueError(f'`config_name` must be "default" or "gaps", but got {self.config_name!r}.')
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS_DESCRIPTION,
            features=datasets.Features(features),
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[int]],
        references: Sequence[Sequence[int]],
        reference_gaps: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, Any]:
        found = find_first_differences(predictions, references, reference_gaps)
        differing = {difference.index: difference.position for difference in found}
        num_tokens = sum(map(len, references))
        num_same = sum(min(differing.get(i, len(tokens)), len(tokens)) for i, tokens in enumerate(references))
        return {
            "identical_share": 1 - len(found) / len(references),
            "num_identical": len(references) - len(found),
            "num_texts": len(references),
            "token_share": num_same / num_tokens if num_tokens else 1.0,
            "first_differences": [asdict(difference) for difference in found],
        }
