"""The token rule: speculative sampling (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import torch

from ..types import Verdict
from .residual import as_distributions, draw_verdict, probability_of


def verify_token(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_tokens: torch.Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    r"""Accepts draft token \\(x_i\\) with probability \\(\min(1, p_i(x_i) / q_i(x_i))\\).

    On the first rejection the bonus token is drawn from \\(\mathrm{norm}(\max(p_i - q_i, 0))\\), after full
    acceptance from \\(p_{K+1}\\). Emitted tokens are then distributed as the target's.

    Args:
        target_probs: The target's distributions after all logits processors, of shape
            `(batch_size, num_draft_tokens + 1, vocab_size)`.
        draft_probs: What each draft token was drawn from, of shape `(batch_size, num_draft_tokens, vocab_size)`.
            `None` means a point mass on the token: it was not drawn.
        draft_tokens: Token ids of shape `(batch_size, num_draft_tokens)`.
        generator: Source of the draws, the device's default generator if `None`.
    """
    q = as_distributions(draft_probs, draft_tokens, target_probs)
    length_probs = token_length_probs(target_probs, q, draft_tokens)
    return draw_verdict(length_probs, torch.ones_like(length_probs), target_probs, q, generator)


def token_length_probs(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_tokens: torch.Tensor
) -> torch.Tensor:
    """The chance of each number of accepted tokens, of shape `(batch_size, num_draft_tokens + 1)`."""
    target_of_draft = probability_of(target_probs, draft_tokens)
    draft_of_draft = probability_of(draft_probs, draft_tokens)
    # A draft probability may have underflowed to 0.
    divisor = torch.maximum(draft_of_draft, target_of_draft).clamp(min=torch.finfo(target_probs.dtype).tiny)
    accepted = torch.where(draft_of_draft > 0, target_of_draft / divisor, (target_of_draft > 0).to(divisor.dtype))
    # From the difference, so that no digits are lost where p is nearly q.
    rejected = (draft_of_draft - target_of_draft).clamp(min=0) / divisor
    rejected = torch.where(accepted > 0, rejected, torch.ones_like(rejected))
    reached = torch.nn.functional.pad(accepted.cumprod(dim=1), (1, 0), value=1.0)
    return torch.cat([reached[:, :-1] * rejected, reached[:, -1:]], dim=1)
