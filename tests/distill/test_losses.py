"""The loss against torch's own divergence, its gradient against the formula, and the sample against all tokens."""

from __future__ import annotations

import pytest
import torch

from hf_ssd.distill.losses import TokenSample, forward_kl

VOCAB_SIZE = 50


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (3 * torch.randn(6, VOCAB_SIZE, generator=generator) for _ in range(2))
    return teacher, student.requires_grad_()


def test_over_all_tokens_it_is_the_divergence_of_both_distributions(logits) -> None:
    teacher, student = logits
    p, q = teacher.double().softmax(1), student.double().softmax(1)
    expected = (p * (p / q).log()).sum(1).mean()
    loss = forward_kl(teacher, student)
    torch.testing.assert_close(loss.double(), expected)
    reference = torch.nn.functional.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    torch.testing.assert_close(loss, reference)


def test_its_gradient_is_the_difference_of_the_probabilities(logits) -> None:
    teacher, student = logits
    forward_kl(teacher, student).backward()
    torch.testing.assert_close(student.grad, (student.softmax(1) - teacher.softmax(1)) / len(teacher))


def test_it_is_zero_where_both_agree_on_the_sample(logits) -> None:
    teacher, _ = logits
    sample = TokenSample(VOCAB_SIZE, torch.tensor([3]), 5)
    tokens, log_weights = sample.draw(torch.tensor([1, 2]))
    # Constant offsets are no difference.
    assert forward_kl(teacher[:, tokens], teacher[:, tokens] + 7, log_weights).abs() < 1e-5


def test_a_sample_of_all_tokens_changes_nothing(logits) -> None:
    teacher, student = logits
    tokens, log_weights = TokenSample(VOCAB_SIZE, torch.tensor([4, 9]), VOCAB_SIZE).draw(torch.tensor([[1], [4]]))
    assert sorted(tokens.tolist()) == list(range(VOCAB_SIZE))
    loss = forward_kl(teacher[:, tokens], student[:, tokens], log_weights)
    torch.testing.assert_close(loss, forward_kl(teacher, student))


def test_on_average_a_sample_gives_the_loss_and_gradient_of_all_tokens(logits) -> None:
    teacher, student = logits
    top = teacher.topk(8, dim=1).indices
    sample = TokenSample(VOCAB_SIZE, student.topk(8, dim=1).indices.flatten(), 8)
    (full,) = torch.autograd.grad(forward_kl(teacher, student), student)
    losses, gradient = [], torch.zeros_like(full)
    for _ in range(400):
        tokens, log_weights = sample.draw(top)
        loss = forward_kl(teacher[:, tokens], student[:, tokens], log_weights)
        gradient += torch.autograd.grad(loss, student)[0] / 400
        losses.append(loss.item())
    assert sum(losses) / len(losses) == pytest.approx(forward_kl(teacher, student).item(), rel=0.01)
    assert (gradient - full).norm() < 0.03 * full.norm()


def test_a_sample_holds_what_it_must_and_stands_for_all() -> None:
    sample = TokenSample(VOCAB_SIZE, torch.tensor([7, 8]), 10)
    draws = [sample.draw(torch.tensor([[1, 1], [2, 8]]), torch.tensor([[30]])) for _ in range(5)]
    for tokens, log_weights in draws:
        assert len(set(tokens.tolist())) == len(tokens) == 5 + 10
        assert {1, 2, 7, 8, 30} <= set(tokens.tolist())
        assert log_weights.exp().sum().item() == pytest.approx(VOCAB_SIZE)
        assert log_weights[tokens == 7].item() == 0
    assert len({tuple(tokens.tolist()) for tokens, _ in draws}) == 5
