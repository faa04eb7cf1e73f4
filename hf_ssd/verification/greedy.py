"""Greedy verification: keep draft tokens while they are the target's own choice."""

from __future__ import annotations

import torch

from ..types import Verdict


def verify_greedy(target_scores: torch.Tensor, draft_tokens: torch.Tensor) -> Verdict:
    """Accepts draft tokens while each is the arg-max of the target's scores; the bonus token is the next arg-max.

    Args:
        target_scores: Scores after all logits processors, of shape `(batch_size, num_draft_tokens + 1, vocab_size)`.
        draft_tokens: Token ids of shape `(batch_size, num_draft_tokens)`.

    Returns:
        The verdict: exactly the tokens that decoding one at a time would have given.
    """
    choices = target_scores.argmax(dim=-1)
    matches = choices[:, :-1] == draft_tokens
    num_accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return Verdict(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))
