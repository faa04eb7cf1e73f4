"""Exact enumeration of the rules that draw: all drafts, all numbers of accepted tokens, all bonus tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from rules import NAMES, RIVALS, Outcomes, as_batch, block_outcomes, token_outcomes, trees

from hf_ssd.verification import block, residual, token
from hf_ssd.verification.block import verify_block
from hf_ssd.verification.token import verify_token

MODULES = {"token": token, "block": block}
VERIFY = {"token": verify_token, "block": verify_block}
SIZES = [(3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)]


def outcomes_of(
    rule: str, p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor, monkeypatch
) -> list[Outcomes]:
    """What a rule does for a batch of drafts, with its draws replaced by all choices and their weights."""
    results: list[Outcomes] = [{} for _ in drafts]
    vocab_size = p.shape[2]
    for k in range(drafts.shape[1] + 1):
        weights: list[torch.Tensor] = []

        def draw(probs: torch.Tensor, generator: object, k: int = k, weights: list = weights) -> torch.Tensor:
            weights.append(probs / probs.sum(dim=1, keepdim=True))
            return torch.full((len(probs),), k if len(weights) == 1 else 0)

        with monkeypatch.context() as patch:
            patch.setattr(residual, "draw", draw)
            VERIFY[rule](p, q, drafts)
        lengths, bonus = weights
        for row, outcomes in enumerate(results):
            if lengths[row, k] > 0:
                for token_id in range(vocab_size):
                    outcomes[k, token_id] = float(lengths[row, k] * bonus[row, token_id])
    return results


@pytest.mark.parametrize("rule", VERIFY)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_rule_step_by_step(name: str, rule: str, monkeypatch) -> None:
    for (vocab_size, length), seed in itertools.product(SIZES, range(3)):
        target, assistant = trees(name, vocab_size, length, seed)
        drafts = [
            tokens
            for tokens in itertools.product(range(vocab_size), repeat=length)
            if assistant.probability(tokens) > 0
        ]
        p = as_batch([target.along(draft, length + 1) for draft in drafts])
        q = as_batch([assistant.along(draft, length) for draft in drafts])
        found = outcomes_of(rule, p, q, torch.tensor(drafts), monkeypatch)
        for draft, outcomes in zip(drafts, found, strict=True):
            expected = RIVALS[rule](target.along(draft, length + 1), assistant.along(draft, length), draft)
            for outcome in {*outcomes, *expected}:
                assert outcomes.get(outcome, 0.0) == pytest.approx(expected.get(outcome, 0.0), abs=1e-13), outcome


def emitted(rule, target, assistant, vocab_size: int, length: int) -> tuple[dict[tuple[int, ...], float], float]:
    """The distribution of the first `length + 1` tokens, what a round leaves open drawn from the target; and the
    expected number of accepted tokens."""
    found = dict.fromkeys(itertools.product(range(vocab_size), repeat=length + 1), 0.0)
    num_accepted = 0.0
    for draft in itertools.product(range(vocab_size), repeat=length):
        probability = assistant.probability(draft)
        if not probability:
            continue
        for (k, bonus), chance in rule(target.along(draft, length + 1), assistant.along(draft, length), draft).items():
            num_accepted += probability * chance * k
            start = (*draft[:k], bonus)
            for rest in itertools.product(range(vocab_size), repeat=length - k):
                following = target.probability((*start, *rest)) / target.probability(start) if rest else 1.0
                found[(*start, *rest)] += probability * chance * following
    return found, num_accepted


def distance(found: dict[tuple[int, ...], float], target) -> float:
    return sum(abs(chance - target.probability(tokens)) for tokens, chance in found.items()) / 2


@pytest.mark.parametrize("name", NAMES)
def test_what_is_emitted_is_distributed_as_the_target(name: str) -> None:
    for (vocab_size, length), seed in itertools.product(SIZES, range(4)):
        target, assistant = trees(name, vocab_size, length, seed)
        by_token, num_by_token = emitted(token_outcomes, target, assistant, vocab_size, length)
        by_block, num_by_block = emitted(block_outcomes, target, assistant, vocab_size, length)
        assert distance(by_token, target) < 1e-12
        assert distance(by_block, target) < 1e-12
        assert num_by_block >= num_by_token - 1e-12


def test_without_the_cap_it_would_be_biased() -> None:
    """As one published listing has it."""

    def uncapped(p, q, draft):
        return block_outcomes(p, q, draft, is_capped=False)

    worst = max(
        distance(emitted(uncapped, *trees("random", 3, 3, seed), 3, 3)[0], trees("random", 3, 3, seed)[0])
        for seed in range(10)
    )
    assert worst > 0.01


@pytest.mark.parametrize("rule", VERIFY)
def test_without_draft_probs_a_draft_token_is_a_point_mass(rule: str, monkeypatch) -> None:
    """Accepting such a token by arg-max match, or always, would be biased."""
    target, _ = trees("random", 3, 2, 0)
    drafts = list(itertools.product(range(3), repeat=2))
    p = as_batch([target.along(draft, 3) for draft in drafts])
    for draft, outcomes in zip(drafts, outcomes_of(rule, p, None, torch.tensor(drafts), monkeypatch), strict=True):
        q = [tuple(float(i == token_id) for i in range(3)) for token_id in draft]
        expected = RIVALS[rule](target.along(draft, 3), q, draft)
        for outcome in {*outcomes, *expected}:
            assert outcomes.get(outcome, 0.0) == pytest.approx(expected.get(outcome, 0.0), abs=1e-13)


@pytest.mark.parametrize("rule", VERIFY)
class TestEdges:
    def test_a_token_of_target_probability_0_is_never_accepted(self, rule: str) -> None:
        p = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
        for q in (None, torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[1.0, 0.0, 0.0]]])):
            for seed in range(20):
                verdict = VERIFY[rule](p, q, torch.tensor([[0]]), torch.Generator().manual_seed(seed))
                assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (0, 1)

    def test_a_draft_probability_that_underflowed_divides_nothing(self, rule: str) -> None:
        p = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
        verdict = VERIFY[rule](p, torch.tensor([[[0.0, 1.0, 0.0]]]), torch.tensor([[0]]))
        assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (1, 1)

    def test_both_underflowed(self, rule: str) -> None:
        p = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
        verdict = VERIFY[rule](p, torch.tensor([[[0.0, 1.0, 0.0]]]), torch.tensor([[0]]))
        assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (0, 1)

    def test_an_empty_draft_draws_from_the_target(self, rule: str) -> None:
        p = torch.tensor([0.2, 0.3, 0.5])
        empty = torch.empty((100_000, 0), dtype=torch.long)
        verdict = VERIFY[rule](p.expand(100_000, 1, 3), None, empty, torch.Generator().manual_seed(0))
        assert verdict.num_accepted.eq(0).all()
        assert (verdict.bonus_tokens.bincount(minlength=3) / 100_000 - p).abs().max() < 0.008

    def test_rows_are_decided_one_by_one(self, rule: str) -> None:
        p = torch.eye(3).expand(2, -1, -1)
        verdict = VERIFY[rule](p, None, torch.tensor([[1, 1], [0, 1]]))
        assert verdict.num_accepted.tolist() == [0, 2]
        assert verdict.bonus_tokens.tolist() == [0, 2]

    def test_the_generator_decides_the_draws(self, rule: str) -> None:
        target, assistant = trees("random", 3, 2, 0)
        p, q = as_batch([target.along((0, 0), 3)]), as_batch([assistant.along((0, 0), 2)])
        draft = torch.zeros((100, 2), dtype=torch.long)

        def tokens(seed: int) -> list[int]:
            generator = torch.Generator().manual_seed(seed)
            return VERIFY[rule](p.expand(100, -1, -1), q.expand(100, -1, -1), draft, generator).bonus_tokens.tolist()

        assert tokens(1) == tokens(1)
        assert tokens(1) != tokens(2)

    def test_float32_of_a_real_size_sums_to_one(self, rule: str) -> None:
        generator = torch.Generator().manual_seed(0)
        p, q = (torch.randn(4, n, 50_000, generator=generator).mul(3).softmax(-1) for n in (8, 7))
        drafts = torch.stack([row.multinomial(1, generator=generator).squeeze(1) for row in q])
        lengths = MODULES[rule].__dict__[f"{rule}_length_probs"](p, q, drafts)
        lengths = lengths[0] if isinstance(lengths, tuple) else lengths
        assert torch.isfinite(lengths).all()
        assert (lengths >= 0).all()
        torch.testing.assert_close(lengths.sum(dim=1), torch.ones(4), atol=1e-5, rtol=0)
