"""The coupled rule: keep draft tokens while they are the target's own choice (arXiv 2408.07978)."""

from __future__ import annotations

import torch

from ..types import Verdict


def verify_coupled(choice_scores: torch.Tensor, draft_tokens: torch.Tensor) -> Verdict:
    r"""Accepts draft tokens while each is the arg-max of the target's scores; the bonus token is the next arg-max.

    With scores \\(\log p_t(v) + g_t(v)\\), where \\(g\\) is Gumbel noise that is fixed before anything is drafted
    ([`GumbelNoise`]), the arg-max is a draw from \\(p_t\\) that no draft can change. Without noise this is greedy
    decoding.

    Args:
        choice_scores: The target's scores after all logits processors, noise added, of shape
            `(batch_size, num_draft_tokens + 1, vocab_size)`.
        draft_tokens: Token ids of shape `(batch_size, num_draft_tokens)`.

    Returns:
        The verdict: exactly the tokens that decoding one at a time would have given.
    """
    choices = choice_scores.argmax(dim=-1)
    matches = choices[:, :-1] == draft_tokens
    num_accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return Verdict(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))
