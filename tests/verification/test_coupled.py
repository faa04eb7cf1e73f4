from __future__ import annotations

import itertools

import torch

from hf_ssd.verification import verify_coupled


def decode_one_at_a_time(choices: tuple[int, ...], draft: tuple[int, ...]) -> tuple[int, int]:
    """The naive rival: walk on while the draft says what the target would."""
    for position, token in enumerate(draft):
        if choices[position] != token:
            return position, choices[position]
    return len(draft), choices[-1]


def test_equals_one_at_a_time_for_every_draft_and_every_choice() -> None:
    cases = [
        (choices, draft)
        for choices in itertools.product(range(3), repeat=3)
        for draft in itertools.product(range(3), repeat=2)
    ]
    scores = torch.nn.functional.one_hot(torch.tensor([choices for choices, _ in cases]), 3).float()
    verdict = verify_coupled(scores, torch.tensor([draft for _, draft in cases]))
    found = list(zip(verdict.num_accepted.tolist(), verdict.bonus_tokens.tolist(), strict=True))
    assert found == [decode_one_at_a_time(*case) for case in cases]


def test_a_draft_token_after_a_wrong_one_does_not_count() -> None:
    # Counting matches instead of leading matches would give 1.
    scores = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
    verdict = verify_coupled(scores, torch.tensor([[0, 1]]))
    assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (0, 1)


def test_an_empty_draft_gives_the_next_token() -> None:
    # The prefill is the verification of an empty speculation.
    verdict = verify_coupled(torch.tensor([[[0.0, 2.0, 1.0]]]), torch.empty((1, 0), dtype=torch.long))
    assert (verdict.num_accepted.item(), verdict.bonus_tokens.item()) == (0, 1)
