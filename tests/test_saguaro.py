from __future__ import annotations

import pytest
import torch
from tiny_models import make_noisy, make_target, prompt
from transformers import LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from hf_ssd import SaguaroLogitsProcessor, SSDConfig
from hf_ssd.drafting import engine
from hf_ssd.generation import generate_with_ssd
from hf_ssd.sampling import with_temperature

SCORES = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]]).log()


@pytest.mark.parametrize(
    ("fan_out", "scaled"),
    [
        (0, [[0.2, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.2]]),
        (1, [[0.2, 0.1, 0.15, 0.2], [0.1, 0.2, 0.15, 0.2]]),
        ((0, 2), [[0.2, 0.1, 0.3, 0.2], [0.1, 0.1, 0.15, 0.2]]),
        (3, [[0.2, 0.05, 0.15, 0.1], [0.05, 0.1, 0.15, 0.2]]),
        (99, [[0.2, 0.05, 0.15, 0.1], [0.05, 0.1, 0.15, 0.2]]),
    ],
)
def test_scales_the_likeliest_and_one_more(fan_out, scaled) -> None:
    expected = torch.tensor(scaled)
    probs = SaguaroLogitsProcessor(0.5, fan_out)(None, SCORES.clone()).softmax(dim=1)
    torch.testing.assert_close(probs, expected / expected.sum(dim=1, keepdim=True))


def test_one_is_the_identity_and_what_is_impossible_stays_so() -> None:
    assert torch.equal(SaguaroLogitsProcessor(1.0, 2)(None, SCORES), SCORES)
    scores = torch.tensor([[0.0, float("-inf"), 1.0]])
    assert torch.isinf(SaguaroLogitsProcessor(0.3, 2)(None, scores))[0].tolist() == [False, True, False]


def test_works_like_any_processor_of_transformers() -> None:
    target = make_target()
    torch.manual_seed(0)
    ids = target.generate(
        prompt(6),
        do_sample=True,
        top_k=2,
        logits_processor=LogitsProcessorList([SaguaroLogitsProcessor(1e-30, 0)]),
        max_new_tokens=8,
    )
    with torch.no_grad():
        likeliest = target(ids).logits[0, 5:-1].argmax(dim=1)
    assert not (likeliest == ids[0, 6:]).any()


@pytest.mark.parametrize(("coefficient", "fan_out"), [(0.0, 1), (1.5, 1), (float("nan"), 1), (0.5, -1), (0.5, [])])
def test_bad_values_are_refused(coefficient: float, fan_out) -> None:
    with pytest.raises(ValueError, match="must"):
        SaguaroLogitsProcessor(coefficient, fan_out)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_bonus_tokens_are_prepared_for_more_often(rule: str) -> None:
    """What it is for."""
    target, assistant = make_target(), make_noisy(noise=0.1)

    def figures(coefficient: float) -> tuple[float, float]:
        config = SSDConfig(
            backend="inline",
            num_assistant_tokens=3,
            cache_budget=12,
            verification=rule,
            saguaro_coefficient=coefficient,
            seed=1,
        )
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": 120, "num_return_sequences": 3}
        generate_with_ssd(target, inputs=prompt(6), assistant_model=assistant, ssd_config=config, **options)
        return target.ssd_stats.acceptance, target.ssd_stats.hit_rate

    (plain_acceptance, plain_hits), (acceptance, hits) = figures(1.0), figures(0.1)
    assert acceptance < plain_acceptance
    assert hits > plain_hits


def test_each_position_has_its_own_fan_out(monkeypatch) -> None:
    seen: set[tuple[int, int]] = set()
    run = engine.DraftEngine._add_drafts

    def note(self, nodes, hidden=None):
        seen.update((node.num_drafted, self._fan_out[min(node.num_drafted, 3)]) for node in nodes)
        return run(self, nodes, hidden)

    monkeypatch.setattr(engine.DraftEngine, "_add_drafts", note)
    config = SSDConfig(
        backend="inline", num_assistant_tokens=3, fan_out=(4, 2, 1), saguaro_coefficient=0.5, verification="token"
    )
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    generate_with_ssd(make_target(), inputs=prompt(6), assistant_model=make_noisy(), ssd_config=config, **options)
    assert {(0, 4), (1, 2), (2, 1)} <= seen


def test_the_assistants_own_temperature() -> None:
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)]
    first, second = with_temperature(warpers, 2.0)
    assert (first.temperature, type(second)) == (2.0, TopKLogitsWarper)
    first, second = with_temperature(warpers[1:], 2.0)  # a call at temperature 1 has none
    assert (first.temperature, type(second)) == (2.0, TopKLogitsWarper)
    assert [processor.temperature for processor in with_temperature([], 0.5)] == [0.5]
    assert warpers[0].temperature == 0.7
