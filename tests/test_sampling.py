from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd.sampling import apply_processors, draw, looks_only_at_scores


class Sees(LogitsProcessor):
    """Writes down which prefixes it is shown."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.prefixes += input_ids.tolist()
        return scores + input_ids.sum(dim=1, keepdim=True)


class SubclassOfTopK(TopKLogitsWarper):
    pass


def logits(num_rows: int, vocab_size: int = 8) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "processors",
    [
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)],
        [TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)],
        [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.7)],
        [],
    ],
)
def test_rows_of_different_prefixes_equal_one_row_at_a_time(processors) -> None:
    prefixes = [torch.tensor(ids) for ids in ([1, 2, 1], [3], [1, 2, 1], [5, 6], [4, 4, 4, 4])]
    expected = []
    for prefix, row in zip(prefixes, logits(5), strict=True):
        scores = row[None].clone()
        for processor in processors:
            scores = processor(prefix[None], scores)
        expected.append(scores[0])
    torch.testing.assert_close(apply_processors(processors, prefixes, logits(5)), torch.stack(expected))


def test_a_processor_sees_each_rows_own_prefix() -> None:
    seen = Sees()
    scores = apply_processors(
        [seen], [torch.tensor([1, 2]), torch.tensor([7]), torch.tensor([3, 4])], torch.zeros(3, 4)
    )
    assert sorted(seen.prefixes) == [[1, 2], [3, 4], [7]]
    assert scores[:, 0].tolist() == [3, 7, 7]  # and its scores are not mixed up


def test_no_rows_need_no_processor() -> None:
    seen = Sees()
    assert apply_processors([seen], [], torch.zeros(0, 4)).shape == (0, 4)
    assert seen.prefixes == []


def test_only_exact_types_are_known_to_look_only_at_scores() -> None:
    assert looks_only_at_scores([TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), MinPLogitsWarper(0.1)])
    assert looks_only_at_scores([])
    assert not looks_only_at_scores([SubclassOfTopK(3)])
    assert not looks_only_at_scores([TemperatureLogitsWarper(0.7), RepetitionPenaltyLogitsProcessor(1.3)])


def test_draws_follow_the_weights_and_never_take_a_zero() -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 1.0])
    drawn = draw(weights.expand(100_000, -1), torch.Generator().manual_seed(0)).bincount(minlength=4) / 100_000
    assert drawn[0] == 0
    assert (drawn - weights / 4).abs().max() < 0.01


def test_draws_are_the_generators() -> None:
    weights = torch.ones(50, 6)
    first, again, other = (draw(weights, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2))
    assert first == again != other
