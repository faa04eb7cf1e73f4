from __future__ import annotations

import pytest
import torch

from hf_ssd import SSDConfig
from hf_ssd.bench.fan_outs import ChainDrafter, Position, RecordedRound, record_rounds
from hf_ssd.bench.replay import compare_fan_outs, replay
from hf_ssd.drafting import make_assistant

GREEDY = {"do_sample": False, "eos_token_id": -1}
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": -1}


def record(target, assistant, prompt_ids, kwargs, num_draft_tokens: int = 3, max_new_tokens: int = 24) -> ChainDrafter:
    with torch.inference_mode():
        drafter = ChainDrafter(make_assistant(assistant, None), num_draft_tokens)
    inputs = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids)}
    record_rounds(target, drafter, inputs, kwargs, max_new_tokens)
    return drafter


def test_recorded_rounds_tell_the_text_that_plain_generation_gives(target, noisy, prompt_ids) -> None:
    drafter = record(target, noisy, prompt_ids, GREEDY)
    expected = target.generate(prompt_ids, max_new_tokens=24, **GREEDY)[0, prompt_ids.shape[1] :].tolist()
    emitted = [expected[0]]
    for round_ in drafter.rounds:
        assert len(round_.positions) <= 4
        emitted += expected[len(emitted) :][: round_.num_accepted]
        assert round_.bonus_token == expected[len(emitted)]
        emitted.append(round_.bonus_token)
    assert len(drafter.rounds) > 3
    assert {round_.num_accepted for round_ in drafter.rounds} > {0}


def test_candidates_are_the_assistants_ranking_without_the_draft_token(target, noisy, prompt_ids) -> None:
    drafter = record(target, noisy, prompt_ids, GREEDY)
    first = drafter.rounds[0]
    row = torch.cat([prompt_ids, target.generate(prompt_ids, max_new_tokens=1, **GREEDY)[:, -1:]], dim=1)
    with torch.no_grad():
        probs = noisy(row).logits[0, -1].softmax(dim=-1)
    ranking = probs.argsort(descending=True).tolist()
    assert first.positions[0].draft_prob == pytest.approx(float(probs.max()), abs=1e-5)
    assert list(first.positions[0].candidates[:10]) == ranking[1:11]
    assert first.positions[0].probs[0] == pytest.approx(float(probs[ranking[1]]), abs=1e-5)
    assert first.positions[-1].draft_prob is None
    assert all(position.draft_prob is not None for position in first.positions[:-1])


def test_a_twin_always_accepts_all_and_the_bonus_token_is_its_first_candidate(target, twin, prompt_ids) -> None:
    drafter = record(target, twin, prompt_ids, GREEDY)
    assert all(round_.num_accepted == len(round_.positions) - 1 for round_ in drafter.rounds)
    assert all(round_.positions[-1].candidates[0] == round_.bonus_token for round_ in drafter.rounds)


def test_draft_tokens_are_drawn_when_sampling(target, twin, prompt_ids) -> None:
    drafter = record(target, twin, prompt_ids, SAMPLING)
    # A twin's own distribution is the target's, so that every draft token is accepted, whatever was drawn.
    assert all(round_.num_accepted == len(round_.positions) - 1 for round_ in drafter.rounds)
    assert any(round_.positions[0].draft_prob < round_.positions[0].probs[0] for round_ in drafter.rounds)


def chain(draft_probs: list[float], ranked: list[list[tuple[int, float]]], accepted: int, bonus: int) -> RecordedRound:
    positions = [
        Position(tuple(token for token, _ in each), tuple(prob for _, prob in each), prob)
        for prob, each in zip([*draft_probs, None], ranked, strict=True)
    ]
    return RecordedRound(tuple(positions), accepted, bonus)


SURE, UNSURE = [(10, 0.01), (11, 0.004)], [(20, 0.5), (21, 0.3), (22, 0.1)]


def test_each_fan_out_prepares_what_it_is_made_for() -> None:
    # K = 1. The assistant is sure of its draft token, and after it three tokens are about as likely.
    after_all = chain([0.99], [SURE, UNSURE], accepted=1, bonus=22)
    hits = replay([after_all], SSDConfig(), budgets=(2, 3))
    assert hits["per_instance", 3] == [True]  # all three go to the second position
    assert hits["uniform", 3] == [False]  # two there and one here, or the other way round
    assert hits["uniform", 2] == [False]  # one each
    rejected = chain([0.99], [SURE, UNSURE], accepted=0, bonus=10)
    hits = replay([rejected], SSDConfig(), budgets=(2, 3))
    assert hits["per_instance", 3] == [False]
    assert hits["uniform", 2] == [True]
    assert hits["uniform", 3] == [True]


def test_a_bonus_token_that_is_no_candidate_is_a_miss_for_all() -> None:
    round_ = chain([0.5], [SURE, UNSURE], accepted=1, bonus=63)
    assert not any(any(hit) for hit in replay([round_], SSDConfig(), budgets=(4, 32)).values())


def test_fan_outs_learn_from_the_rounds_before() -> None:
    # The draft token is always rejected, though the assistant is rather sure of it.
    rejected = chain([0.8], [[(10, 0.1), (11, 0.05)], [(20, 0.9), (21, 0.05)]], accepted=0, bonus=10)
    hits = replay([rejected] * 40, SSDConfig(), budgets=(1,))
    for name in ("per_instance", "geometric"):
        assert not hits[name, 1][0], name
        assert hits[name, 1][-1], name


def test_hit_rates_and_leads_are_of_the_same_rounds() -> None:
    rounds = [
        chain([0.99], [SURE, UNSURE], accepted=1, bonus=22),
        chain([0.99], [SURE, UNSURE], accepted=1, bonus=20),
    ]
    figures = compare_fan_outs(rounds, SSDConfig(), temperature=0.5, budgets=(3,))
    assert (figures.num_rounds, figures.num_draft_tokens, figures.temperature) == (2, 1, 0.5)
    assert figures.hit_rates["per_instance"][0].value == 1.0
    assert figures.hit_rates["uniform"][0].value == 0.5
    lead = figures.leads["uniform"][0]
    assert (lead.value, lead.low, lead.high) == (0.5, 0.0, 1.0)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="`rounds` must hold at least one round"):
        compare_fan_outs([], SSDConfig(), temperature=0.0)
