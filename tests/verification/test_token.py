"""The token rule against an enumeration of its own, on a vocabulary of 3."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_ssd.verification import verify_token

NUM_DRAWS = 200_000
# Five standard deviations of a probability of one half: 0.0056. A wrong rule is off by several hundredths.
TOLERANCE = 5 * 0.5 / NUM_DRAWS**0.5

Outcomes = dict[tuple[int, int], float]


def random_distributions(num_rows: int, seed: int) -> torch.Tensor:
    weights = torch.rand(num_rows, 3, generator=torch.Generator().manual_seed(seed)) ** 2
    return weights / weights.sum(dim=1, keepdim=True)


ONE_HOT = torch.eye(3)
# Name, p of shape (K + 1, 3), q of shape (K, 3).
CASES = {
    "random": (random_distributions(3, 1), random_distributions(2, 2)),
    "random, one draft token": (random_distributions(2, 3), random_distributions(1, 4)),
    "p without a token": (
        torch.tensor([[0.0, 0.4, 0.6], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]),
        random_distributions(2, 5),
    ),
    "q without a token": (random_distributions(3, 6), torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.5, 0.5]])),
    "p equals q": (random_distributions(3, 7), random_distributions(3, 7)[:2]),
    "disjoint": (torch.tensor([[0.0, 0.3, 0.7], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), ONE_HOT[[0, 2]]),
    "one-hot p": (ONE_HOT[[0, 1, 2]], random_distributions(2, 8)),
    "one-hot q": (random_distributions(3, 9), ONE_HOT[[1, 1]]),
    "both one-hot": (ONE_HOT[[0, 1, 2]], ONE_HOT[[0, 0]]),
}


def exact_outcomes(p: torch.Tensor, q: torch.Tensor, draft: tuple[int, ...]) -> Outcomes:
    """P(k accepted, bonus token) for a given draft, decision by decision, in plain Python."""
    outcomes: Outcomes = {}
    reached = 1.0
    for k, token in enumerate(draft):
        accepted = min(1.0, p[k, token].item() / q[k, token].item())
        residual = [max(a - b, 0.0) for a, b in zip(p[k].tolist(), q[k].tolist(), strict=True)]
        for bonus, weight in enumerate(residual):
            if weight and accepted < 1:
                outcomes[k, bonus] = reached * (1 - accepted) * weight / sum(residual)
        reached *= accepted
    for bonus in range(3):
        outcomes[len(draft), bonus] = reached * p[len(draft), bonus].item()
    return outcomes


def measured_outcomes(p: torch.Tensor, q: torch.Tensor | None, draft: tuple[int, ...]) -> Outcomes:
    drafts = torch.tensor(draft).expand(NUM_DRAWS, -1)
    verdict = verify_token(
        p.expand(NUM_DRAWS, -1, -1),
        None if q is None else q.expand(NUM_DRAWS, -1, -1),
        drafts,
        torch.Generator().manual_seed(0),
    )
    counts = (verdict.num_accepted * 3 + verdict.bonus_tokens).bincount().tolist()
    return {divmod(index, 3): count / NUM_DRAWS for index, count in enumerate(counts) if count}


def assert_close(measured: Outcomes, exact: Outcomes) -> None:
    assert {outcome for outcome in measured if exact.get(outcome, 0.0) == 0.0} == set(), "impossible outcomes"
    for outcome, probability in exact.items():
        assert abs(measured.get(outcome, 0.0) - probability) < TOLERANCE, outcome


def possible_drafts(q: torch.Tensor):
    for draft in itertools.product(range(3), repeat=len(q)):
        probability = 1.0
        for k, token in enumerate(draft):
            probability *= q[k, token].item()
        if probability:
            yield draft, probability


@pytest.mark.parametrize("case", CASES)
def test_the_enumeration_itself_is_lossless(case: str) -> None:
    """What is emitted, over all drafts and outcomes, is distributed as the target. It judges the judge."""
    p, q = CASES[case]
    emitted: dict[int, float] = dict.fromkeys(range(3), 0.0)
    for draft, probability in possible_drafts(q):
        for (k, bonus), chance in exact_outcomes(p, q, draft).items():
            emitted[draft[0] if k else bonus] += probability * chance
    assert list(emitted.values()) == pytest.approx(p[0].tolist(), abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_outcomes_have_their_exact_probabilities(case: str) -> None:
    p, q = CASES[case]
    for draft, _ in possible_drafts(q):
        assert_close(measured_outcomes(p, q, draft), exact_outcomes(p, q, draft))


@pytest.mark.parametrize("case", ["random", "p without a token", "one-hot p"])
def test_without_draft_probs_a_draft_token_is_a_point_mass(case: str) -> None:
    """Accepting such a token by arg-max match, or always, would be biased."""
    p, _ = CASES[case]
    for draft in itertools.product(range(3), repeat=2):
        assert_close(measured_outcomes(p, None, draft), exact_outcomes(p, ONE_HOT[list(draft)], draft))


def test_a_token_of_target_probability_0_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on a draw of exactly 0: `u <= ratio` would accept it."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **kwargs: torch.zeros(*shape, dtype=kwargs.get("dtype")))
    p = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    for q in (None, torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[1.0, 0.0, 0.0]]])):
        verdict = verify_token(p, q, torch.tensor([[0]]))
        assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (0, 1)


def test_a_draft_probability_that_underflowed_divides_nothing() -> None:
    p = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    verdict = verify_token(p, q, torch.tensor([[0]]))
    assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (1, 1)


def test_an_empty_draft_draws_from_the_target() -> None:
    p = random_distributions(1, 10)
    empty = torch.empty((NUM_DRAWS, 0), dtype=torch.long)
    verdict = verify_token(p.expand(NUM_DRAWS, -1, -1), None, empty, torch.Generator().manual_seed(0))
    assert verdict.num_accepted.eq(0).all()
    assert (verdict.bonus_tokens.bincount(minlength=3) / NUM_DRAWS - p[0]).abs().max() < TOLERANCE


def test_rows_are_decided_one_by_one() -> None:
    """A batch in which one row accepts nothing and the next everything."""
    p = ONE_HOT[[0, 1, 2]].expand(2, -1, -1)
    verdict = verify_token(p, None, torch.tensor([[1, 1], [0, 1]]))
    assert verdict.num_accepted.tolist() == [0, 2]
    assert verdict.bonus_tokens.tolist() == [0, 2]


def test_the_generator_decides_the_draws() -> None:
    p, q = CASES["random"]
    draft = torch.zeros((100, 2), dtype=torch.long)

    def tokens(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return verify_token(p.expand(100, -1, -1), q.expand(100, -1, -1), draft, generator).bonus_tokens.tolist()

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
