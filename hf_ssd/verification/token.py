"""The token rule: speculative sampling (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import torch

from ..sampling import draw
from ..types import Verdict


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
    batch_size, num_draft_tokens = draft_tokens.shape
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:, :num_draft_tokens])
        draft_probs.scatter_(2, draft_tokens[..., None], 1.0)
    target_of_draft = target_probs[:, :num_draft_tokens].gather(2, draft_tokens[..., None]).squeeze(2)
    draft_of_draft = draft_probs.gather(2, draft_tokens[..., None]).squeeze(2)

    # Strictly below, so that a token of target probability 0 is never accepted, not even on a draw of exactly 0. As a
    # product, so that a draft probability that underflowed to 0 needs no division.
    draws = torch.rand(draft_tokens.shape, generator=generator, device=target_probs.device, dtype=target_probs.dtype)
    is_accepted = draws * draft_of_draft < target_of_draft
    num_accepted = is_accepted.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(batch_size, device=target_probs.device)
    probs = target_probs[rows, num_accepted]
    is_rejection = num_accepted < num_draft_tokens
    if bool(is_rejection.any()):
        rejected = num_accepted.clamp(max=num_draft_tokens - 1)
        residual = (probs - draft_probs[rows, rejected]).clamp(min=0)
        # Where p equals q the residual is empty but for rounding, and so is the chance of a rejection.
        is_residual = is_rejection & (residual.sum(dim=1) > 0)
        probs = torch.where(is_residual[:, None], residual, probs)
    return Verdict(num_accepted, draw(probs, generator))
