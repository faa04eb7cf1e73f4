"""What the whole loop draws, against exact probabilities: the target is a table, so these are known."""

from __future__ import annotations

import pytest
import torch
from chi_square import p_value
from lookup_model import VOCAB_SIZE, LookupForCausalLM
from tiny_tokenizers import words
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd import SSDConfig, row
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.types import Verdict

PROMPT = torch.tensor([[3, 5, 1]])
# Two draft tokens and their bonus token are all of interest, as the first token comes from the prefill.
NUM_NEW_TOKENS = 4
# A true loop falls below this by chance once in a thousand seeds; the seeds are fixed.
LEAST_P_VALUE = 1e-3

RULES = ("token", "block", "coupled")
FAST = ("temperature and top_k", "repetition_penalty")  # of the settings, those in every run

SETTINGS = {
    "plain": ({}, []),
    "temperature and top_k": (
        {"temperature": 0.7, "top_k": 3},
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)],
    ),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"temperature": 1.3, "min_p": 0.2}, [TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.2)]),
    "repetition_penalty": ({"repetition_penalty": 1.5}, [RepetitionPenaltyLogitsProcessor(1.5)]),
}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SETTINGS]


def table(seed: int, noise: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    return logits + noise * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)


@pytest.fixture(scope="module")
def target() -> LookupForCausalLM:
    return LookupForCausalLM.of(table(0))


@pytest.fixture(scope="module")
def assistant() -> LookupForCausalLM:
    return LookupForCausalLM.of(table(0, noise=1.0))


def exact_probs(target: LookupForCausalLM, processors: list) -> torch.Tensor:
    """P(x1, x2, x3 | prompt) of shape `(8, 8, 8)`, prefix by prefix."""
    logits = target.lm_head.weight.T.detach()

    def following(prefix: list[int]) -> torch.Tensor:
        scores = logits[prefix[-1]][None].clone()
        for processor in processors:
            scores = processor(torch.tensor([prefix]), scores)
        return scores[0].double().softmax(dim=0)

    prompt = PROMPT[0].tolist()
    probs = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.double)
    for first, p_first in enumerate(following(prompt).tolist()):
        for second, p_second in enumerate(following([*prompt, first]).tolist()):
            probs[first, second] = p_first * p_second * following([*prompt, first, second])
    return probs


def draw_triples(
    target: LookupForCausalLM,
    assistant: LookupForCausalLM,
    num_rows: int,
    *,
    backend: str = "inline",
    draft_vocab_size: int | None = None,
    mode: str = "ssd",
    rule: str = "token",
    saguaro_coefficient: float = 1.0,
    **settings: object,
) -> tuple[torch.Tensor, SSDStats]:
    """Counts of shape `(8, 8, 8)` of the first three tokens, in `num_rows` rows."""
    config = SSDConfig(
        mode=mode,
        backend=backend,
        num_assistant_tokens=2,
        cache_budget=4,
        draft_vocab_size=draft_vocab_size,
        verification=rule,
        saguaro_coefficient=saguaro_coefficient,
    )
    torch.manual_seed(0)
    ids = generate_with_ssd(
        target,
        inputs=PROMPT,
        assistant_model=assistant,
        ssd_config=config,
        do_sample=True,
        max_new_tokens=NUM_NEW_TOKENS,
        num_return_sequences=num_rows,
        **{"top_k": 0, **settings},
    )
    first, second, third = ids[:, PROMPT.shape[1] : PROMPT.shape[1] + 3].T
    counts = (first * 64 + second * 8 + third).bincount(minlength=512).view(8, 8, 8)
    return counts, target.ssd_stats


def assert_distributed(counts: torch.Tensor, probs: torch.Tensor) -> None:
    assert p_value(counts, probs) > LEAST_P_VALUE, "triples"
    for position, others in enumerate([(1, 2), (0, 2), (0, 1)]):
        assert p_value(counts.sum(others), probs.sum(others)) > LEAST_P_VALUE, f"token {position + 1}"


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_no_bias_of_a_hundredth(rule: str) -> None:
    """A bias of 0.01 in any token's probability would be found with a chance of over 0.9.

    Here the table's rows are all the same: every token of a long text is then a draw from the same distribution, which
    makes many draws cheap. That the right row is used is for the other tests.
    """
    weights = torch.tensor([5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 2.0, 1.0])
    probs = weights / weights.sum()
    target = LookupForCausalLM.of(probs.log().expand(8, 8))
    assistant = LookupForCausalLM.of(torch.tensor([2.0, 6.0, 3.0, 5.0, 2.0, 3.0, 1.0, 3.0]).log().expand(8, 8))
    num_rows, num_tokens = 100, 400
    deviation = (probs * (1 - probs) / (num_rows * num_tokens)).sqrt()
    assert (0.01 / deviation).min() > 4.9

    torch.manual_seed(0)
    config = SSDConfig(backend="inline", num_assistant_tokens=3, cache_budget=6, verification=rule)
    ids = generate_with_ssd(
        target,
        inputs=PROMPT,
        assistant_model=assistant,
        ssd_config=config,
        do_sample=True,
        top_k=0,
        max_new_tokens=num_tokens,
        num_return_sequences=num_rows,
    )[:, PROMPT.shape[1] :]
    frequencies = ids.flatten().bincount(minlength=8) / ids.numel()
    assert ((frequencies - probs) / deviation).abs().max() < 3.5

    # Nor do tokens depend on those before them, which sums over positions would not show.
    triples = ids[:, : num_tokens // 3 * 3].reshape(-1, 3)
    counts = (triples[:, 0] * 64 + triples[:, 1] * 8 + triples[:, 2]).bincount(minlength=512).view(8, 8, 8)
    assert_distributed(counts, torch.einsum("i,j,k->ijk", probs, probs, probs))
    stats = target.ssd_stats
    assert min(stats.num_hits, stats.num_misses) > 1000
    assert 0.3 < stats.acceptance < 0.97  # both sides of the rule are at work


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_every_sampling_setting(target, assistant, name: str, rule: str) -> None:
    """HF47932: q taken before top-k and tokens drawn after it; HF28508: a residual put through a softmax."""
    settings, processors = SETTINGS[name]
    counts, stats = draw_triples(target, assistant, 700, rule=rule, **settings)
    assert_distributed(counts, exact_probs(target, processors))
    assert min(stats.num_hits, stats.num_misses) > 20


@pytest.mark.parametrize("name", ["auto", "coupled", "token", "block", "hierarchical"])
def test_a_rule_runs_under_its_own_name(target, assistant, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend 7807: all of them are exact, so only who was asked tells them apart."""
    asked: set[str] = set()

    def noting(rule: str, function):
        return lambda *args: asked.add(rule) or function(*args)

    for rule in ("coupled", "token", "block"):
        function = getattr(row, f"verify_{rule}")
        monkeypatch.setattr(row, f"verify_{rule}", noting(rule, function))
    follow = row.follow_tree
    monkeypatch.setattr(row, "follow_tree", noting("coupled", follow))
    draw_triples(target, assistant, 3, rule=name)
    assert asked == {{"auto": "coupled", "hierarchical": "block"}.get(name, name)}


@pytest.mark.parametrize("settings", [{"draft_vocab_size": 3}, {"mode": "sd"}, {"draft_vocab_size": 3, "mode": "sd"}])
def test_the_way_of_drafting_does_not_show(target, assistant, settings: dict) -> None:
    counts, stats = draw_triples(target, assistant, 1000, **settings)
    assert_distributed(counts, exact_probs(target, []))
    if settings.get("mode") != "sd":
        assert min(stats.num_hits, stats.num_misses) > 20


@pytest.mark.timeout(240)
@pytest.mark.parametrize("saguaro_coefficient", [1.0, 0.3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_through_the_real_process(target, assistant, name: str, rule: str, saguaro_coefficient: float) -> None:
    """The distributions travel between processes, and drafting stops whenever an outcome happens to arrive."""
    settings, processors = SETTINGS[name]
    probs = exact_probs(target, processors)
    options = {"rule": rule, "saguaro_coefficient": saguaro_coefficient, **settings}
    counts, stats = draw_triples(target, assistant, 200, backend="process", **options)
    assert stats.degraded is None
    for others in ((1, 2), (0, 2), (0, 1)):
        assert p_value(counts.sum(others), probs.sum(others)) > LEAST_P_VALUE
    # How many of them are hits is the clock's business; above there are many of either.
    assert stats.num_hits + stats.num_misses > 100


@pytest.mark.slow
def test_an_assistant_with_another_tokenizer(target) -> None:
    """HF46936. It lacks one of the target's tokens, has one of its own, and the others in another order.

    Inline, `test_enumeration.py` has the exact distribution.
    """
    order = [5, 0, 6, 2, 7, 1, 3]
    rows = torch.zeros(8, 8)
    rows[:7, :7] = table(0, noise=1.0)[order][:, order]
    tokenizers = {
        "tokenizer": words([f"w{index}" for index in range(8)]),
        "assistant_tokenizer": words([*(f"w{index}" for index in order), "own"]),
    }
    settings = {"temperature": 0.7, "top_k": 5}
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]
    assistant = LookupForCausalLM.of(rows)
    counts, stats = draw_triples(target, assistant, 150, backend="process", **settings, **tokenizers)
    assert stats.degraded is None
    probs = exact_probs(target, processors)
    for others in ((1, 2), (0, 2), (0, 1)):
        assert p_value(counts.sum(others), probs.sum(others)) > LEAST_P_VALUE
    assert stats.acceptance > 0.3


def accept_always(target_probs, draft_probs, draft_tokens, generator):
    return Verdict(torch.tensor([draft_tokens.shape[1]]), target_probs[:, -1].multinomial(1).squeeze(1))


def accept_argmax(target_probs, draft_probs, draft_tokens, generator):
    """Match the draft against the target's own choice, draw only the bonus token."""
    matches = (target_probs[:, :-1].argmax(-1) == draft_tokens).long().cumprod(1).sum(1)
    return Verdict(matches, target_probs[0, matches].multinomial(1).squeeze(1))


def no_residual(target_probs, draft_probs, draft_tokens, generator):
    """The right acceptance, but a bonus token from p instead of max(p - q, 0)."""
    verdict = decoding_rule(target_probs, draft_probs, draft_tokens, generator)
    return Verdict(verdict.num_accepted, target_probs[0, verdict.num_accepted].multinomial(1).squeeze(1))


decoding_rule = row.verify_token


@pytest.mark.parametrize(
    "rule", [accept_always, *(pytest.param(rule, marks=pytest.mark.slow) for rule in (accept_argmax, no_residual))]
)
def test_a_wrong_rule_is_found(target, assistant, monkeypatch: pytest.MonkeyPatch, rule) -> None:
    """These tests could otherwise pass because they see nothing."""
    monkeypatch.setattr(row, "verify_token", rule)
    counts, _ = draw_triples(target, assistant, 1000)
    with pytest.raises(AssertionError):
        assert_distributed(counts, exact_probs(target, []))


def test_q_from_before_top_k_is_found(target, assistant, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF47932 itself."""
    assistant_probs = assistant.lm_head.weight.T.detach().softmax(dim=1)
    last = [0]

    def rule(target_probs, draft_probs, draft_tokens, generator):
        if draft_probs is not None:
            draft_probs = assistant_probs[last + draft_tokens[0, :-1].tolist()][None]
        return decoding_rule(target_probs, draft_probs, draft_tokens, generator)

    decide = row.Row.decide

    def note_last(self, raw_logits, speculation):
        last[:] = [int(self.input_ids[0, -1])]
        return decide(self, raw_logits, speculation)

    monkeypatch.setattr(row.Row, "decide", note_last)
    monkeypatch.setattr(row, "verify_token", rule)
    counts, _ = draw_triples(target, assistant, 1000, top_k=3)
    with pytest.raises(AssertionError):
        assert_distributed(counts, exact_probs(target, [TopKLogitsWarper(3)]))
