"""`distribution_match`: do two samplers draw from the same distribution? A module for Hugging Face `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_ssd.evaluation.statistics import NUM_PERMUTATIONS, chi_square, chi_square_p_value, total_variation_test

_DESCRIPTION = """\
Compares what two samplers drew for the same prompts: the total variation between their samples, and how surprising that
is if both draw from the same distribution, by Pearson's chi-square and by exchanging the samplers' labels within each
prompt. The total variation of finite samples is above 0 even then; the p-values take that into account.
"""
_INPUTS_DESCRIPTION = """
Args:
    predictions: token ids of each sample of one sampler.
    references: token ids of each sample of the other. Both draw equally often for a prompt.
    prompts: number of the prompt that the two samples in this row were drawn for.
    num_tokens: so many first tokens of a sample are the outcome that is compared. Default: 1.
    num_permutations: how often labels are exchanged. Default: 9999.
    seed: seed of the exchanges. Default: 0.

Returns:
    total_variation: mean over the prompts, between 0 and 1.
    total_variation_if_equal: what it comes to on average for two equal samplers of these draws.
    chi_square: the statistic, summed over the prompts; outcomes expected fewer than 5 times are pooled.
    degrees_of_freedom: those of the sum.
    chi_square_p_value: chance of a sum this large by the chi-square law.
    permutation_p_value: chance of a total variation this large, by permutation.
    num_prompts: number of prompts.
"""
_CITATION = """\
@article{leviathan2022fast, title={Fast Inference from Transformers via Speculative Decoding},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi}, journal={arXiv:2211.17192}, year={2022}}
"""


class DistributionMatch(evaluate.Metric):
    """Total variation and p-values between two samplers' outputs."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": tokens, "references": tokens, "prompts": datasets.Value("int64")}
            ),
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[int]],
        references: Sequence[Sequence[int]],
        prompts: Sequence[int],
        num_tokens: int = 1,
        num_permutations: int = NUM_PERMUTATIONS,
        seed: int = 0,
    ) -> dict[str, Any]:
        if num_tokens < 1:
            raise ValueError(f"`num_tokens` must be at least 1, but got {num_tokens}.")
        groups: dict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {}
        for prediction, reference, prompt in zip(predictions, references, prompts, strict=True):
            left, right = groups.setdefault(prompt, ([], []))
            left.append(tuple(prediction[:num_tokens]))
            right.append(tuple(reference[:num_tokens]))
        parts = [chi_square(left, right) for left, right in groups.values()]
        statistic, freedom = sum(part[0] for part in parts), sum(part[1] for part in parts)
        test = total_variation_test(
            [left for left, _ in groups.values()], [right for _, right in groups.values()], num_permutations, seed
        )
        return {
            "total_variation": test.value,
            "total_variation_if_equal": test.mean_if_equal,
            "chi_square": statistic,
            "degrees_of_freedom": freedom,
            "chi_square_p_value": chi_square_p_value(statistic, freedom),
            "permutation_p_value": test.p_value,
            "num_prompts": len(groups),
        }
