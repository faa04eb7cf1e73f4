"""Sampling with a temperature for each row, some of them greedy, and a batch that does not wait for its last row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

# Sampled rows choose among so many tokens: drawing from all costs a tenth of a step on a CPU, and a small model's tail
# is noise.
NUM_CANDIDATES = 64


class RowSampler(LogitsProcessor):
    """Makes greedy decoding draw samples, in rows that have a temperature.

    The arg-max of logits with Gumbel noise is a sample from their softmax.

    Args:
        temperatures: One per row; 0 leaves a row's scores as they are.
        generator: Of the draws.
    """

    def __init__(self, temperatures: Sequence[float], generator: torch.Generator) -> None:
        self._rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
        self._temperatures = torch.tensor([temperatures[row] for row in self._rows])[:, None]
        self._generator = generator

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Scores whose arg-max is each row's next token."""
        if not self._rows:
            return scores
        best = scores[self._rows].float().topk(min(NUM_CANDIDATES, scores.shape[1]), dim=1)
        noise = torch.empty(best.values.shape).exponential_(generator=self._generator).log_().neg_()
        drawn = (best.values.cpu() / self._temperatures + noise).argmax(dim=1, keepdim=True).to(scores.device)
        tokens = best.indices.gather(1, drawn)
        chosen = scores.clone()
        chosen[self._rows, tokens[:, 0]] = float("inf")
        return chosen


class MostRowsEnded(StoppingCriteria):
    """Ends a batch when few rows are left, which would make the others wait.

    Args:
        ends: Token ids that end a row.
        num_prompt_tokens: Length of the padded prompts.
        share: Of the rows that have to have ended.
    """

    def __init__(self, ends: Sequence[int], num_prompt_tokens: int, share: float) -> None:
        self._ends = torch.tensor(ends)
        self._start = num_prompt_tokens
        self._share = share

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each row is over."""
        has_ended = torch.isin(input_ids[:, self._start :], self._ends.to(input_ids.device)).any(dim=1)
        return torch.full_like(has_ended, bool(has_ended.float().mean() >= self._share))
