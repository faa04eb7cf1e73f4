"""The block rule: draft tokens are accepted together (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

import torch

from ..types import Verdict
from .residual import as_distributions, draw_verdict, probability_of


def verify_block(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_tokens: torch.Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    r"""Decides about all draft tokens at once, which keeps at least as many as the token rule does, on average.

    With \\(r_i = \prod_{j \le i} p_j(x_j) / q_j(x_j)\\), \\(m_i = \max(r_0, ..., r_i)\\) and \\(w_i = r_i / m_i\\), all
    \\(K\\) tokens are accepted with probability \\(\min(1, r_K / m_{K-1})\\). Otherwise the last ones are given up one
    by one: \\(i\\) tokens are kept with probability \\(u / \max(u, d)\\), where \\(u\\) and \\(d\\) are the sums of the
    positive and negative parts of \\(w_i p_{i+1} - q_{i+1}\\). The bonus token is drawn from the positive part.

    The exactly lossless form of hierarchical verification (arXiv 2601.05724) is the same rule on each path.

    Args:
        target_probs: The target's distributions after all logits processors, of shape
            `(batch_size, num_draft_tokens + 1, vocab_size)`.
        draft_probs: What each draft token was drawn from, of shape `(batch_size, num_draft_tokens, vocab_size)`.
            `None` means a point mass on the token: it was not drawn.
        draft_tokens: Token ids of shape `(batch_size, num_draft_tokens)`.
        generator: Source of the draws, the device's default generator if `None`.
    """
    q = as_distributions(draft_probs, draft_tokens, target_probs)
    length_probs, weights = block_length_probs(target_probs, q, draft_tokens)
    return draw_verdict(length_probs, weights, target_probs, q, generator)


def block_length_probs(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chance of each number of accepted tokens, of shape `(batch_size, num_draft_tokens + 1)`, and the weights w,
    of shape `(batch_size, num_draft_tokens)`.
    """
    batch_size, num_draft_tokens = draft_tokens.shape
    if not num_draft_tokens:
        return target_probs.new_ones((batch_size, 1)), target_probs.new_ones((batch_size, 0))
    ratios = probability_of(target_probs, draft_tokens).log() - probability_of(draft_probs, draft_tokens).log()
    # A draft probability may have underflowed to 0; the cap is far beyond what an exponential can tell from 0 or 1.
    ratios = ratios.nan_to_num(nan=float("-inf"), posinf=1e4, neginf=float("-inf")).clamp(max=1e4)
    log_r = torch.nn.functional.pad(ratios.cumsum(dim=1), (1, 0))
    log_m = log_r.cummax(dim=1).values
    weights = (log_r - log_m).exp()[:, :-1]
    differences = weights[..., None] * target_probs[:, :-1] - draft_probs
    up, down = differences.clamp(min=0).sum(dim=2), differences.neg().clamp(min=0).sum(dim=2)
    most = torch.maximum(up, down)
    kept = torch.where(most > 0, up / most.clamp(min=torch.finfo(most.dtype).tiny), torch.ones_like(most))
    kept[:, 0] = 1.0  # all chances are spent there
    accept_all = (log_r[:, -1] - log_m[:, -2]).exp().clamp(max=1.0)
    given_up = (1.0 - kept).flip(1).cumprod(dim=1).flip(1)  # from i on
    reached = torch.nn.functional.pad(given_up[:, 1:], (0, 1), value=1.0)
    return torch.cat([(1.0 - accept_all)[:, None] * reached * kept, accept_all[:, None]], dim=1), weights
