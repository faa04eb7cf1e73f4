"""Tests of whether two samplers draw from the same distribution. Pure functions of numbers.

Samples are compared within a prompt only: prompts differ, samplers may not. Permutation tests exchange the samplers'
labels within each prompt, which is exact whatever the distribution and the statistic.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]

NUM_PERMUTATIONS = 9999
LEAST_EXPECTED = 5.0  # outcomes expected less often are pooled: the chi-square law is only good for larger ones


@dataclass(frozen=True)
class PermutationTest:
    """A value, and what it comes to when the labels of two equal samplers are exchanged.

    Args:
        value: As it was observed.
        p_value: How often exchanging labels gives a value at least this far out.
        mean_if_equal: Mean over the exchanges.
        sd_if_equal: Standard deviation over the exchanges.
    """

    value: float
    p_value: float
    mean_if_equal: float
    sd_if_equal: float


def count_outcomes(left: Sequence[Hashable], right: Sequence[Hashable]) -> tuple[Array, Array]:
    """How often each outcome occurs in either sample, in the same order, each of shape `(num_outcomes,)`."""
    codes = _encode([*left, *right])
    size = int(codes.max(initial=-1)) + 1
    return (
        np.bincount(codes[: len(left)], minlength=size).astype(np.float64),
        np.bincount(codes[len(left) :], minlength=size).astype(np.float64),
    )


def total_variation(left: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    """Half the summed distance of the two samples' shares: 0 where all are equal, 1 where no outcome is in both."""
    a, b = count_outcomes(left, right)
    return float(np.abs(a / a.sum() - b / b.sum()).sum() / 2)


def chi_square(left: Sequence[Hashable], right: Sequence[Hashable]) -> tuple[float, int]:
    """Pearson's statistic of homogeneity and its degrees of freedom. Outcomes expected rarely are pooled.

    0 degrees of freedom where a single outcome is left: such samples say nothing.
    """
    table = np.stack(count_outcomes(left, right))
    totals = table.sum(axis=0)
    is_rare = totals * min(len(left), len(right)) / totals.sum() < LEAST_EXPECTED
    table = np.concatenate([table[:, ~is_rare], table[:, is_rare].sum(axis=1, keepdims=True)], axis=1)
    table = table[:, table.sum(axis=0) > 0]
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    return float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1


def chi_square_p_value(statistic: float, freedom: int) -> float:
    """Chance of a statistic of at least this size; 1 without degrees of freedom."""
    if freedom == 0:
        return 1.0
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.double)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def total_variation_test(
    left: Sequence[Sequence[Hashable]],
    right: Sequence[Sequence[Hashable]],
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
) -> PermutationTest:
    """Mean total variation over prompts, and what exchanging the samplers' labels within each gives.

    Args:
        left: For each prompt the outcomes that one sampler drew.
        right: Those of the other.
        num_permutations: How often to exchange labels.
        seed: Seed of the exchanges.
    """
    observed, permuted = 0.0, np.zeros(num_permutations)
    for a, b, labels in _permutations(left, right, num_permutations, seed):
        codes = _encode([*a, *b])
        outcomes = np.eye(int(codes.max()) + 1, dtype=np.float32)[codes]
        totals = outcomes.sum(axis=0)
        counts = (labels @ outcomes).astype(np.float64)  # whole numbers, which float32 holds exactly
        permuted += np.abs(counts / len(a) - (totals - counts) / len(b)).sum(axis=1) / 2 / len(left)
        observed += total_variation(a, b) / len(left)
    return _test(observed, permuted, _p_value(observed, permuted))


def mean_difference_test(
    left: Sequence[Sequence[float]],
    right: Sequence[Sequence[float]],
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
) -> PermutationTest:
    """Difference of the two samplers' means (left - right, over prompts), with a two-sided p-value.

    Args:
        left: For each prompt a figure of each sample of one sampler.
        right: Those of the other.
        num_permutations: How often to exchange labels.
        seed: Seed of the exchanges.
    """
    observed, permuted = 0.0, np.zeros(num_permutations)
    for a, b, labels in _permutations(left, right, num_permutations, seed):
        values = np.asarray([*a, *b], dtype=np.float64)
        sums = labels.astype(np.float64) @ values
        permuted += (sums / len(a) - (values.sum() - sums) / len(b)) / len(left)
        observed += (np.mean(values[: len(a)]) - np.mean(values[len(a) :])) / len(left)
    return _test(observed, permuted, _p_value(abs(observed), np.abs(permuted)))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """P-values corrected for their number (Holm 1979): the chance of any false alarm stays below the threshold."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return tuple(adjusted)


def _permutations(
    left: Sequence[Sequence[Hashable]], right: Sequence[Sequence[Hashable]], num_permutations: int, seed: int
) -> Iterator[tuple[Sequence[Hashable], Sequence[Hashable], npt.NDArray[np.float32]]]:
    """For each prompt both samples, and for each permutation a 1 where an entry of both goes to the left sampler."""
    if not left or len(left) != len(right) or not all(map(len, [*left, *right])):
        raise ValueError(
            f"Both samplers must have samples for the same prompts, but got {len(left)} and {len(right)} prompts, of "
            f"which some may be empty."
        )
    generator = np.random.default_rng(seed)
    for a, b in zip(left, right, strict=True):
        labels = np.zeros((num_permutations, len(a) + len(b)), dtype=np.float32)
        labels[:, : len(a)] = 1
        yield a, b, generator.permuted(labels, axis=1)


def _test(observed: float, permuted: Array, p_value: float) -> PermutationTest:
    return PermutationTest(float(observed), p_value, float(permuted.mean()), float(permuted.std()))


def _p_value(observed: float, permuted: Array) -> float:
    # The observed labels are one of the permutations. The tolerance is for sums in another order.
    return float((1 + (permuted >= observed - 1e-6).sum()) / (1 + len(permuted)))


def _encode(values: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    codes: dict[Hashable, int] = {}
    return np.array([codes.setdefault(value, len(codes)) for value in values], dtype=np.int64)
