"""From logits to distributions and draws. Pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor, generation

Processor = Callable[[torch.LongTensor, torch.FloatTensor], torch.FloatTensor]

# These look only at the scores, neither at the tokens before nor at which column stands for which token. So rows with
# different prefixes go through them in one call, and so does a subset of the vocabulary.
SCORE_ONLY_PROCESSORS: tuple[type, ...] = (
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.MinPLogitsWarper,
    generation.TypicalLogitsWarper,
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
)


def looks_only_at_scores(processors: Sequence[Processor]) -> bool:
    """Whether all of `processors` may be applied to rows of any prefix, and to a subset of the vocabulary."""
    # Exact types: a subclass may look at whatever it likes.
    return all(type(processor) in SCORE_ONLY_PROCESSORS for processor in processors)


def apply_processors(
    processors: Sequence[Processor], prefixes: Sequence[torch.Tensor], logits: torch.Tensor
) -> torch.Tensor:
    """Applies logits processors to rows with prefixes of different lengths.

    Args:
        processors: Logits processors, applied in order.
        prefixes: For each row the token ids before it, each of shape `(prefix_length,)`. Not read where all processors
            look only at scores.
        logits: Float tensor of shape `(num_rows, vocab_size)`. Processors may change it in place.

    Returns:
        Scores of shape `(num_rows, vocab_size)`.
    """
    if not processors or not logits.shape[0]:
        return logits
    if looks_only_at_scores(processors):
        no_prefix = torch.empty((logits.shape[0], 0), dtype=torch.long, device=logits.device)
        return _run(processors, no_prefix, logits)
    rows_by_length: dict[int, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        rows_by_length.setdefault(len(prefix), []).append(row)
    scores = torch.empty_like(logits)
    for rows in rows_by_length.values():
        scores[rows] = _run(processors, torch.stack([prefixes[row] for row in rows]), logits[rows])
    return scores


def _run(processors: Sequence[Processor], input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    for processor in processors:
        scores = processor(input_ids, scores)  # type: ignore[arg-type]
    return scores


def find_fault(logits: torch.Tensor, scores: torch.Tensor, num_tokens: int) -> tuple[int, ValueError] | None:
    """Looks for scores that no token can be sampled from.

    Args:
        logits: What the target gave for successive tokens, of shape `(num_positions, vocab_size)`.
        scores: The same after all logits processors.
        num_tokens: Tokens of the row before the first of these, padding not counted.

    Returns:
        The first position where there is nothing to choose, or a score is no number, and the error that says why.
    """
    best = scores.max(dim=-1).values
    if bool(best.isfinite().all()):
        return None
    position = int((~best.isfinite()).nonzero()[0])
    after = f"after {num_tokens + position} tokens"
    if not bool(logits[position].max().isfinite()):
        problem = (
            f"The target's logits {after} hold NaN or infinity, so no token can be sampled. Load the model in bfloat16 "
            "or float32 instead of float16, and check its weights."
        )
    elif best[position] == float("-inf"):
        problem = (
            f"The logits processors left no token to sample {after}: all scores are -inf. Leave one finite at least."
        )
    else:
        problem = (
            f"The logits processors made scores NaN or infinite {after}. A `temperature` near 0 does that: use "
            "`do_sample=False`."
        )
    return position, ValueError(problem)


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws one index per row.

    Args:
        probs: Non-negative weights of shape `(num_rows, num_choices)`; rows need not sum to one.
        generator: Source of the draws, the device's default generator if `None`.

    Returns:
        Indices of shape `(num_rows,)`, int64. An index of weight 0 is never drawn.
    """
    return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)


class SaguaroLogitsProcessor(LogitsProcessor):
    """Saguaro sampling: makes the likeliest tokens less likely to be drafted (arXiv 2603.03251).

    What is taken from them is left to the residual, which is what the bonus token is drawn from when a draft token is
    rejected. So the bonus token is more often one that was prepared for, and draft tokens are accepted less often. For
    the assistant: verification sees the distribution that was drawn from, so the output does not change.

    Args:
        coefficient: What the probability of the likeliest tokens is multiplied with, before all are made to sum to one
            again; above 0, at most 1, which changes nothing.
        fan_out: Bonus tokens prepared at the position, so that `fan_out + 1` tokens are meant: the drafted one is no
            candidate. A number, or one per row.
    """

    def __init__(self, coefficient: float, fan_out: int | Sequence[int]) -> None:
        if not 0.0 < coefficient <= 1.0:
            raise ValueError(f"`coefficient` must lie above 0 and be at most 1, but got {coefficient}.")
        self.coefficient = coefficient
        self.fan_out = fan_out
        counts = [fan_out] if isinstance(fan_out, int) else fan_out
        if not counts or min(counts) < 0:
            raise ValueError(f"`fan_out` must be at least 0, but got {fan_out}.")

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.coefficient == 1.0:
            return scores
        counts = [self.fan_out] * len(scores) if isinstance(self.fan_out, int) else self.fan_out
        if len(counts) != len(scores):
            raise ValueError(f"`fan_out` must hold a number for each of {len(scores)} rows, but has {len(counts)}.")
        most = min(max(counts) + 1, scores.shape[1])
        likeliest = scores.topk(most, dim=1).indices
        is_meant = torch.arange(most, device=scores.device) <= torch.tensor(counts, device=scores.device)[:, None]
        scaling = is_meant.to(scores.dtype) * math.log(self.coefficient)
        return scores.scatter_add(1, likeliest, scaling)  # type: ignore[return-value]


def with_temperature(processors: Sequence[Processor], temperature: float) -> list[Processor]:
    """`processors` with another temperature, which comes before what cuts tokens off, as in `generate()`."""
    warper = generation.TemperatureLogitsWarper(float(temperature))
    others = [processor for processor in processors if type(processor) is not generation.TemperatureLogitsWarper]
    first = next((i for i, other in enumerate(others) if type(other) in SCORE_ONLY_PROCESSORS), len(others))
    return [*others[:first], warper, *others[first:]]
