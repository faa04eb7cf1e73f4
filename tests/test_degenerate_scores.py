"""Scores at the edge: nearly no temperature, one token left, none left, no numbers."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_noisy, make_target, prompt
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_ssd import SSDConfig
from hf_ssd.generation import generate_with_ssd

RULES = ("coupled", "token", "block")


class Only(LogitsProcessor):
    """Leaves some tokens, from a place in the row on."""

    def __init__(self, *tokens: int, after: int = 0) -> None:
        self.tokens, self.after = tokens, after

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.after:
            return scores
        kept = torch.full_like(scores, float("-inf"))
        kept[:, list(self.tokens)] = scores[:, list(self.tokens)]
        return kept


class Spoils(LogitsProcessor):
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 9:
            scores[:, 3] = self.value  # in place, as some do
        return scores


def sample(rule: str, *processors: LogitsProcessor, target=None, mode: str = "ssd", **kwargs) -> list[int]:
    config = SSDConfig(backend="inline", num_assistant_tokens=3, verification=rule, mode=mode, seed=0)
    ids = generate_with_ssd(
        make_target() if target is None else target,
        inputs=prompt(6),
        assistant_model=make_noisy(),
        ssd_config=config,
        logits_processor=LogitsProcessorList(processors),
        **{"do_sample": True, "top_k": 0, "max_new_tokens": 16, **kwargs},
    )
    return ids[0, 6:].tolist()


@pytest.mark.parametrize("rule", RULES)
class TestRightOrRefused:
    @pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-30])
    def test_nearly_no_temperature_is_greedy(self, rule: str, temperature: float) -> None:
        expected = make_target().generate(prompt(6), do_sample=False, max_new_tokens=16)[0, 6:].tolist()
        assert sample(rule, temperature=temperature) == expected

    def test_a_temperature_that_overflows(self, rule: str) -> None:
        with pytest.raises(ValueError, match=r"NaN or infinite after 6 tokens.*A `temperature` near 0 does that"):
            sample(rule, temperature=1e-44)

    def test_a_single_token_left(self, rule: str) -> None:
        assert sample(rule, Only(9)) == [9] * 16
        assert set(sample(rule, Only(9, after=12))[6:]) == {9}

    def test_some_tokens_left(self, rule: str) -> None:
        """Fewer than the candidates that are ranked."""
        assert set(sample(rule, Only(3, 5), temperature=9.0, max_new_tokens=40)) == {3, 5}

    def test_no_token_left(self, rule: str) -> None:
        with pytest.raises(ValueError, match="The logits processors left no token to sample after 10 tokens"):
            sample(rule, Only(after=10))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_processors_that_make_no_numbers(self, rule: str, value: float) -> None:
        with pytest.raises(ValueError, match="The logits processors made scores NaN or infinite after 10 tokens"):
            sample(rule, Spoils(value))

    @pytest.mark.parametrize("mode", ["ssd", "sd"])
    def test_a_target_that_gives_no_numbers(self, rule: str, mode: str) -> None:
        target = make_target()
        with torch.no_grad():
            target.lm_head.weight[4] = float("nan")
        with pytest.raises(ValueError, match=r"The target's logits after 6 tokens.* hold NaN or infinity"):
            sample(rule, target=target, mode=mode)

    def test_an_assistant_that_gives_no_numbers_costs_speed_only(self, rule: str) -> None:
        target, assistant = make_target(), make_noisy()
        with torch.no_grad():
            assistant.lm_head.weight[4] = float("nan")
        config = SSDConfig(backend="inline", verification=rule, seed=0)
        options = {"inputs": prompt(6), "do_sample": True, "top_k": 0, "max_new_tokens": 16}
        ids = generate_with_ssd(target, assistant_model=assistant, ssd_config=config, **options)
        assert ids.shape == (1, 22)
        if rule == "coupled":
            plain = SSDConfig(mode="ar", seed=0)
            assert ids.tolist() == generate_with_ssd(target, ssd_config=plain, **options).tolist()


def test_without_the_noise_in_the_way_greedy_is_left_as_transformers_has_it() -> None:
    """It does not check for numbers, and neither do we."""
    target = make_target()
    with torch.no_grad():
        target.lm_head.weight[4] = float("nan")
    plain = target.generate(prompt(6), do_sample=False, max_new_tokens=8)
    config = SSDConfig(backend="inline")
    ids = generate_with_ssd(
        target, inputs=prompt(6), assistant_model=make_noisy(), ssd_config=config, do_sample=False, max_new_tokens=8
    )
    assert ids.tolist() == plain.tolist()


class StopsAfter(StoppingCriteria):
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.num_tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["ssd", "sd"])
class TestWhatIsNeverEmitted:
    """A text may end before the place where scores fail. Plain decoding would never come there."""

    def test_scores_after_a_stop(self, rule: str, mode: str) -> None:
        for length in range(8, 14):
            criteria = StoppingCriteriaList([StopsAfter(length)])
            assert len(sample(rule, Only(after=length), mode=mode, stopping_criteria=criteria)) == length - 6

    def test_a_processor_that_raises_after_a_stop(self, rule: str, mode: str) -> None:
        class Raises(LogitsProcessor):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] >= 11:
                    raise LookupError("the grammar has ended")
                return scores

        criteria = StoppingCriteriaList([StopsAfter(11)])
        assert len(sample(rule, Raises(), mode=mode, stopping_criteria=criteria)) == 5
        assert len(sample(rule, Raises(), mode=mode, stopping_criteria=criteria, do_sample=False)) == 5
        with pytest.raises(LookupError, match="the grammar has ended"):
            sample(rule, Raises(), mode=mode)
