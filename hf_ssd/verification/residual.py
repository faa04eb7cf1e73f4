"""What rules that draw have in common: a number of accepted tokens, then a bonus token from a residual."""

from __future__ import annotations

import torch

from ..sampling import draw
from ..types import Verdict


def as_distributions(draft_probs: torch.Tensor | None, draft_tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What each draft token was drawn from, `(batch_size, num_draft_tokens, vocab_size)`.

    `None` stands for point masses on the tokens: they were not drawn.
    """
    if draft_probs is not None:
        return draft_probs
    point_masses = torch.zeros_like(like[:, : draft_tokens.shape[1]])
    return point_masses.scatter_(2, draft_tokens[..., None], 1.0)


def probability_of(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability of each token under its own distribution."""
    return probs[:, : tokens.shape[1]].gather(2, tokens[..., None]).squeeze(2)


def draw_verdict(
    length_probs: torch.Tensor,
    weights: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    generator: torch.Generator | None,
) -> Verdict:
    r"""Draws how many tokens are accepted, and the bonus token after them.

    After \\(k\\) accepted tokens of \\(K\\) that comes from \\(\mathrm{norm}(\max(w_k p_{k+1} - q_{k+1}, 0))\\), after
    all of them from \\(p_{K+1}\\).

    Args:
        length_probs: The chance of each number of accepted tokens, of shape `(batch_size, num_draft_tokens + 1)`.
        weights: \\(w_k\\), of shape `(batch_size, num_draft_tokens)`.
        target_probs: Of shape `(batch_size, num_draft_tokens + 1, vocab_size)`.
        draft_probs: Of shape `(batch_size, num_draft_tokens, vocab_size)`.
        generator: Source of the draws, the device's default generator if `None`.
    """
    num_draft_tokens = draft_probs.shape[1]
    num_accepted = draw(length_probs, generator)
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    probs = target_probs[rows, num_accepted]
    is_rejection = num_accepted < num_draft_tokens
    if bool(is_rejection.any()):
        rejected = num_accepted.clamp(max=num_draft_tokens - 1)
        residual = (weights[rows, rejected, None] * probs - draft_probs[rows, rejected]).clamp(min=0)
        # Where it is empty but for rounding, so is the chance to come here.
        is_residual = is_rejection & (residual.sum(dim=1) > 0)
        probs = torch.where(is_residual[:, None], residual, probs)
    return Verdict(num_accepted, draw(probs, generator))
