"""From logits to distributions and draws. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import generation

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


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws one index per row.

    Args:
        probs: Non-negative weights of shape `(num_rows, num_choices)`; rows need not sum to one.
        generator: Source of the draws, the device's default generator if `None`.

    Returns:
        Indices of shape `(num_rows,)`, int64. An index of weight 0 is never drawn.
    """
    return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)
