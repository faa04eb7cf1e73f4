"""How surprising counts are, given the probabilities they should come from."""

from __future__ import annotations

import torch


def p_value(counts: torch.Tensor, probs: torch.Tensor, *, least_expected: float = 5.0) -> float:
    """Pearson's chi-square test.

    Args:
        counts: How often each outcome was seen.
        probs: The exact probability of each, in the same order. An outcome of probability 0 that was seen gives 0.
        least_expected: Outcomes expected less often than this are pooled, as the test is only good for larger ones.
    """
    counts, probs = counts.double().flatten(), probs.double().flatten()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    is_rare = expected < least_expected
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return torch.special.gammaincc(freedom, statistic / 2).item()
