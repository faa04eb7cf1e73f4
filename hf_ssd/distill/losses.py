"""The loss of distillation: forward Kullback-Leibler divergence, over all tokens or over a sample of them."""

from __future__ import annotations

import torch


def forward_kl(
    teacher_logits: torch.Tensor, student_logits: torch.Tensor, log_weights: torch.Tensor | None = None
) -> torch.Tensor:
    r"""Mean over positions of \\(\sum_v w_v p(v) \log \frac{p(v)}{q(v)}\\), where \\(w p\\) and \\(w q\\) sum to 1.

    With all tokens and no weights it is the divergence of the two distributions. With a sample of tokens, each weighted
    by how many it stands for, it estimates that. Its gradient with respect to a student's logit is \\(w (q - p)\\).

    Args:
        teacher_logits: Float32, of shape `(num_positions, num_tokens)`.
        student_logits: Of the same shape, for the same tokens.
        log_weights: Of shape `(num_tokens,)`; `None` stands for weights of 1.

    Returns:
        Scalar tensor, in nats; 0 where there are no positions.
    """
    if log_weights is not None:
        teacher_logits, student_logits = teacher_logits + log_weights, student_logits + log_weights
    # The weights cancel within the logarithm.
    teacher_log_probs = teacher_logits.log_softmax(dim=-1)
    student_log_probs = student_logits.log_softmax(dim=-1)
    total = torch.nn.functional.kl_div(student_log_probs, teacher_log_probs, reduction="sum", log_target=True)
    return total / max(1, len(teacher_logits))


class TokenSample:
    """Draws the tokens that a batch's distributions are compared on.

    Tokens that carry probability are always among them: frequent ones, and those of the batch, in its texts or among
    the target's likeliest. Of the others some are drawn at random, and stand for all.

    Args:
        vocab_size: Number of tokens.
        frequent: Token ids that are always taken.
        num_random: How many of the others are drawn.
        seed: Of the draws.
    """

    def __init__(self, vocab_size: int, frequent: torch.Tensor, num_random: int, seed: int = 0) -> None:
        self._is_frequent = torch.zeros(vocab_size, dtype=torch.bool)
        self._is_frequent[frequent] = True
        self._num_random = num_random
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, *of_batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens for one batch.

        Args:
            *of_batch: Token ids of any shape that have to be among them.

        Returns:
            Token ids of shape `(num_tokens,)`, each once, and the logarithms of their weights, on the batch's device.
        """
        taken = self._is_frequent.clone()
        for tokens in of_batch:
            taken[tokens.cpu().flatten()] = True
        others = (~taken).nonzero().squeeze(1)
        drawn = others[torch.randperm(len(others), generator=self._generator)[: self._num_random]]
        tokens = torch.cat([taken.nonzero().squeeze(1), drawn])
        log_weights = torch.zeros(len(tokens))
        if len(drawn):
            log_weights[-len(drawn) :] = float(torch.tensor(len(others) / len(drawn)).log())
        device = of_batch[0].device if of_batch else "cpu"
        return tokens.to(device), log_weights.to(device)
