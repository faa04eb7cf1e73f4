"""Exact enumeration of the whole loop: every draw on either side replaced by all its choices and their weights.

What comes out is the exact distribution of the output, which is compared with the target's own to 1e-12. The target and
the assistant are tables, so that is known. Coupled sampling draws nothing: that its output is the target's own,
token by token, is in `test_coupled_sampling.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from lookup_model import LookupForCausalLM
from tiny_tokenizers import words

from hf_ssd import SSDConfig, row
from hf_ssd.drafting import proposer
from hf_ssd.generation import generate_with_ssd
from hf_ssd.runtime.inline import InlineSpeculator
from hf_ssd.types import Origin
from hf_ssd.verification import residual, verify_block, verify_token

VOCAB_SIZE = 3
PROMPT = torch.tensor([[2, 0, 1, 2, 1, 0, 2]])  # repeats itself whatever comes next, so that there is something to copy
EXACT = 1e-12

# Rows are by the last token. The assistant's have a zero each, which also keeps the number of paths small.
TARGET = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
ASSISTANT = torch.tensor([[0.6, 0.0, 0.4], [0.5, 0.5, 0.0], [0.0, 0.3, 0.7]])
# The target's has zeros where the assistant has none, and a row is the assistant's own.
OTHER_TARGET = torch.tensor([[0.0, 0.7, 0.3], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])


class Enumeration:
    """Visits all sequences of choices, depth first."""

    def __init__(self) -> None:
        self._pending: list[list[int]] = [[]]

    def paths(self, run: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        """The probability of each result of `run`, which draws through `draw`."""
        found: dict[tuple[int, ...], float] = defaultdict(float)
        while self._pending:
            self._script, self._taken, self._weight = self._pending.pop(), [], 1.0
            result = run()
            assert len(self._taken) >= len(self._script), "a run did not repeat itself"
            found[result] += self._weight
        return found

    def draw(self, probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.tensor([self._choose(row) for row in probs.double()])

    def _choose(self, weights: torch.Tensor) -> int:
        choices = weights.nonzero().flatten().tolist()
        if len(self._taken) < len(self._script):
            choice = self._script[len(self._taken)]
        else:
            choice, *others = choices
            self._pending += [[*self._taken, other] for other in others]
        assert choice in choices
        self._taken.append(choice)
        self._weight *= float(weights[choice] / weights.sum())
        return choice


def exactly(rule: Callable) -> Callable:
    """The rule in double precision, on distributions that sum to one in it."""

    def verify(target_probs, draft_probs, draft_tokens, generator):
        p = target_probs.double()
        q = None if draft_probs is None else draft_probs.double()
        return rule(p / p.sum(-1, keepdim=True), None if q is None else q / q.sum(-1, keepdim=True), draft_tokens)

    return verify


def exact_probs(table: torch.Tensor, num_tokens: int) -> dict[tuple[int, ...], float]:
    rows = table.log().softmax(dim=-1).double()
    rows = rows / rows.sum(-1, keepdim=True)
    found = {}
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=num_tokens):
        probability, last = 1.0, int(PROMPT[0, -1])
        for token in tokens:
            probability *= float(rows[last, token])
            last = token
        found[tokens] = probability
    return found


def distance(found: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]) -> float:
    return sum(abs(found.get(tokens, 0.0) - expected.get(tokens, 0.0)) for tokens in {*found, *expected}) / 2


class Loop:
    """The loop with its draws enumerated.

    Attributes:
        seen: How often outcomes hit, and missed for each reason, over all paths.
        backups: How often misses were answered from where.
    """

    def __init__(self, monkeypatch, rules: dict[str, Callable] | None = None) -> None:
        self.enumeration = Enumeration()
        for module in (residual, proposer):
            monkeypatch.setattr(module, "draw", self.enumeration.draw)
        for name, rule in {"verify_token": verify_token, "verify_block": verify_block, **(rules or {})}.items():
            monkeypatch.setattr(row, name, exactly(rule))
        self.seen: dict[str, int] = defaultdict(int)
        self.backups: dict[Origin, int] = defaultdict(int)

    def run(
        self,
        target: torch.Tensor,
        assistant: torch.Tensor,
        num_tokens: int,
        num_rows: int = 1,
        tokenizers: dict[str, object] | None = None,
        **settings: object,
    ) -> dict[tuple[int, ...], float]:
        models = [LookupForCausalLM.of(table.log().clamp(min=-1e30)) for table in (target, assistant)]
        config = SSDConfig(**{"backend": "inline", "draft_vocab_size": None, "seed": 0, **settings})

        def once() -> tuple[int, ...]:
            ids = generate_with_ssd(
                models[0],
                inputs=PROMPT,
                assistant_model=models[1],
                ssd_config=config,
                do_sample=True,
                top_k=0,
                max_new_tokens=num_tokens,
                num_return_sequences=num_rows,
                **(tokenizers or {}),
            )
            for round_ in models[0].ssd_stats.rounds:
                self.seen[round_.miss.value if round_.miss else round_.origin.value] += 1
                self.backups[round_.origin] += round_.miss is not None
            return tuple(ids[:, PROMPT.shape[1] :].flatten().tolist())

        return self.enumeration.paths(once)


SETTINGS = {
    "two outcomes, one token": {"num_assistant_tokens": 1, "cache_budget": 2},
    "one outcome, two tokens": {"num_assistant_tokens": 2, "cache_budget": 1},
    "drafting after each outcome": {"num_assistant_tokens": 2, "mode": "sd"},
    "Saguaro sampling": {"num_assistant_tokens": 1, "cache_budget": 1, "saguaro_coefficient": 0.3},
    "a temperature of its own": {"num_assistant_tokens": 1, "cache_budget": 1, "assistant_temperature": 0.5},
    "a greedy assistant": {"num_assistant_tokens": 1, "cache_budget": 1, "assistant_temperature": 0.01},
    "copying after a miss": {"num_assistant_tokens": 2, "cache_budget": 1, "backup": "ngram"},
    "nothing after a miss": {"num_assistant_tokens": 2, "cache_budget": 1, "backup": "none"},
    "a draft vocabulary": {"num_assistant_tokens": 2, "mode": "sd", "draft_vocab_size": 2},
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_output_is_distributed_as_the_targets(name: str, rule: str, monkeypatch) -> None:
    loop, backup = Loop(monkeypatch), SETTINGS[name].get("backup")
    found = loop.run(TARGET, ASSISTANT, 3, verification=rule, **SETTINGS[name])
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(found, exact_probs(TARGET, 3)) < EXACT
    assert loop.seen[(Origin.JUST_IN_TIME if "mode" in SETTINGS[name] else Origin.CACHE).value] > 10
    if "cache_budget" in SETTINGS[name]:
        assert loop.seen["token"] + loop.seen["length"] > 10  # misses
        assert loop.backups[{"ngram": Origin.NGRAM, "none": Origin.NONE}.get(backup, Origin.JUST_IN_TIME)] > 10


@pytest.mark.parametrize("rule", ["token", "block"])
def test_where_the_target_has_zeros(rule: str, monkeypatch) -> None:
    settings = {"num_assistant_tokens": 2, "cache_budget": 1, "verification": rule}
    found = Loop(monkeypatch).run(OTHER_TARGET, ASSISTANT, 3, **settings)
    assert distance(found, exact_probs(OTHER_TARGET, 3)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_when_drafting_stops_early(rule: str, monkeypatch) -> None:
    """After another number of steps each round, as if by the clock."""
    steps = itertools.cycle([2, 5, 3])

    def receive(self: InlineSpeculator):
        outcome, self._outcome = self._outcome, None
        for _ in range(next(steps)):
            self._engine.deepen()
        return self._engine.resolve(*outcome)

    def start(self: InlineSpeculator, request) -> None:
        nonlocal steps
        steps = itertools.cycle([2, 5, 3])
        self._start(request)

    monkeypatch.setattr(InlineSpeculator, "receive", receive)
    monkeypatch.setattr(InlineSpeculator, "start", start)
    loop = Loop(monkeypatch)
    settings = {"num_assistant_tokens": 2, "cache_budget": 2, "verification": rule}
    found = loop.run(OTHER_TARGET, ASSISTANT, 3, **settings)
    assert distance(found, exact_probs(OTHER_TARGET, 3)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_two_rows_are_independent(rule: str, monkeypatch) -> None:
    loop = Loop(monkeypatch)
    settings = {"num_assistant_tokens": 1, "cache_budget": 1, "verification": rule}
    target, assistant = torch.tensor([[0.0, 0.7, 0.3], [0.6, 0.4, 0.0], [1.0, 0.0, 0.0]]), torch.eye(3)[[1, 0, 0]]
    found = loop.run(target, assistant, 3, num_rows=2, **settings)
    assert loop.seen["cache"] > 10
    one = exact_probs(target, 3)
    expected = {(*first, *second): one[first] * one[second] for first in one for second in one}
    assert distance(found, expected) < EXACT


# The assistant's tokens are, in this order, one that the target lacks, the target's last and its first. What the target
# has between these is none of the assistant's.
TOKENIZERS = {"tokenizer": words(["a", "b", "c"]), "assistant_tokenizer": words(["?", "c", "a"])}
TRANSLATED_ASSISTANT = torch.tensor([[0.4, 0.2, 0.4], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "name", ["one outcome, two tokens", "Saguaro sampling", "copying after a miss", "a draft vocabulary"]
)
def test_an_assistant_with_another_tokenizer(name: str, rule: str, monkeypatch) -> None:
    """It drafts what both have, with probabilities that sum to one over that."""
    loop = Loop(monkeypatch)
    found = loop.run(TARGET, TRANSLATED_ASSISTANT, 3, tokenizers=TOKENIZERS, verification=rule, **SETTINGS[name])
    assert distance(found, exact_probs(TARGET, 3)) < EXACT
    assert loop.seen[(Origin.JUST_IN_TIME if "mode" in SETTINGS[name] else Origin.CACHE).value] > 5


def accept_by_argmax(p, q, draft_tokens, generator=None):
    """Keeps a draft token that is the target's likeliest, draws where none is."""
    likeliest = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)
    return verify_token(torch.cat([likeliest[:, :-1], p[:, -1:]], dim=1), None, draft_tokens, generator)


def every_token(p, q, draft_tokens, generator=None):
    """Accepts whatever was drafted."""
    return verify_token(p, p[:, :-1], draft_tokens, generator)


@pytest.mark.parametrize("wrong", [accept_by_argmax, every_token])
def test_a_wrong_rule_is_found(wrong: Callable, monkeypatch) -> None:
    loop = Loop(monkeypatch, {"verify_token": wrong})
    settings = {"num_assistant_tokens": 1, "cache_budget": 1, "verification": "token"}
    assert distance(loop.run(TARGET, ASSISTANT, 3, **settings), exact_probs(TARGET, 3)) > 0.01


def test_a_greedy_draft_with_a_soft_distribution_is_found(monkeypatch) -> None:
    """HF32867: the likeliest token was drafted, and verified as if it had been drawn."""
    loop = Loop(monkeypatch)
    monkeypatch.setattr(proposer, "draw", lambda probs, generator=None: probs.argmax(dim=1))
    settings = {"num_assistant_tokens": 1, "cache_budget": 1, "verification": "token"}
    assert distance(loop.run(TARGET, ASSISTANT, 3, **settings), exact_probs(TARGET, 3)) > 0.01


def test_dropping_drafts_by_their_own_probability_is_found(monkeypatch) -> None:
    """The stopping rule: whether a token is sent must not depend on the token."""
    from hf_ssd.drafting import engine

    choose = engine.likeliest_first
    monkeypatch.setattr(
        engine, "likeliest_first", lambda root, is_worth: choose(root, lambda node, count: node.confidence > 0.4)
    )
    loop = Loop(monkeypatch)
    settings = {"num_assistant_tokens": 1, "cache_budget": 1, "verification": "token"}
    assert distance(loop.run(TARGET, ASSISTANT, 3, **settings), exact_probs(TARGET, 3)) > 0.01
