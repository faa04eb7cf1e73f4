"""A sampler that is wrong on purpose, by a known amount: what a check of samplers has to catch."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class BiasedLogitsProcessor(LogitsProcessor):
    """Moves probability to the likeliest token, as a rule does that accepts draft tokens too easily.

    A sampler that is exact for the distribution after this one is off the target's by `size` in total variation at
    every token, or by all that the other tokens have where that is less.

    Args:
        size: Probability that is moved.
        temperature: That of the call: processors of one's own see the scores before it is applied.
    """

    def __init__(self, size: float, temperature: float) -> None:
        self.size = size
        self.temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores of shape `(num_rows, vocab_size)`, changed so that the temperature makes them the biased ones."""
        log_probs = (scores.double() / self.temperature).log_softmax(dim=-1)
        best, place = log_probs.max(dim=-1, keepdim=True)
        others = 1 - best.exp()
        moved = others.clamp(max=self.size)
        log_probs = log_probs + torch.where(others > 0, (1 - moved / others.clamp(min=1e-300)).log(), 0.0)
        log_probs.scatter_(-1, place, (best.exp() + moved).log())
        return (log_probs * self.temperature).to(scores.dtype)  # type: ignore[return-value]
