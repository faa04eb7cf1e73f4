"""Cases for the rules that draw, and the naive rivals: what each rule does, decision by decision, in plain Python."""

from __future__ import annotations

import itertools
import random

import torch

Outcomes = dict[tuple[int, int], float]  # (number of accepted tokens, bonus token): probability
Distribution = tuple[float, ...]
Case = tuple[list[Distribution], list[Distribution]]  # p of K + 1 positions, q of K


def token_outcomes(p: list[Distribution], q: list[Distribution], draft: tuple[int, ...]) -> Outcomes:
    outcomes: Outcomes = {}
    reached = 1.0
    for k, token in enumerate(draft):
        accepted = min(1.0, p[k][token] / q[k][token])
        if accepted < 1:
            _add(outcomes, k, reached * (1 - accepted), positive(1.0, p[k], q[k]))
        reached *= accepted
    _add(outcomes, len(draft), reached, p[len(draft)])
    return outcomes


def block_outcomes(
    p: list[Distribution], q: list[Distribution], draft: tuple[int, ...], *, is_capped: bool = True
) -> Outcomes:
    """The published walk (arXiv 2403.10444), with the cap that one listing leaves out."""
    outcomes: Outcomes = {}
    ratios = [1.0]
    for k, token in enumerate(draft):
        ratios.append(ratios[-1] * p[k][token] / q[k][token])
    most = [max(ratios[: k + 1]) for k in range(len(ratios))]
    num_draft = len(draft)
    last = ratios[num_draft] / most[num_draft - 1] if is_capped else ratios[num_draft]
    accept_all = min(1.0, last) if num_draft else 1.0
    _add(outcomes, num_draft, accept_all, p[num_draft])
    left = 1.0 - accept_all
    for k in reversed(range(num_draft)):
        weight = ratios[k] / most[k]
        up, down = sum(positive(weight, p[k], q[k])), sum(negative(weight, p[k], q[k]))
        kept = 1.0 if k == 0 or up == down == 0 else up / max(up, down)
        _add(outcomes, k, left * kept, positive(weight, p[k], q[k]) if up else p[k])
        left *= 1.0 - kept
    return outcomes


RIVALS = {"token": token_outcomes, "block": block_outcomes}


def positive(weight: float, p: Distribution, q: Distribution) -> Distribution:
    return tuple(max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True))


def negative(weight: float, p: Distribution, q: Distribution) -> Distribution:
    return tuple(max(b - weight * a, 0.0) for a, b in zip(p, q, strict=True))


def _add(outcomes: Outcomes, k: int, chance: float, weights: Distribution) -> None:
    if chance <= 0:
        return
    for bonus, weight in enumerate(weights):
        if weight:
            outcomes[k, bonus] = outcomes.get((k, bonus), 0.0) + chance * weight / sum(weights)


class Tree:
    """Distributions after every prefix up to a length: a model whose next token depends on all before it.

    Args:
        vocab_size: Number of tokens.
        length: Longest prefix that has a distribution.
        make: A distribution for a prefix.
    """

    def __init__(self, vocab_size: int, length: int, make) -> None:
        self.rows = {
            prefix: make(prefix)
            for num in range(length + 1)
            for prefix in itertools.product(range(vocab_size), repeat=num)
        }

    def along(self, draft: tuple[int, ...], num: int) -> list[Distribution]:
        return [self.rows[draft[:k]] for k in range(num)]

    def probability(self, tokens: tuple[int, ...]) -> float:
        total = 1.0
        for k, token in enumerate(tokens):
            total *= self.rows[tokens[:k]][token]
        return total


def _random(vocab_size: int, rng: random.Random, sharpness: float = 2.0) -> Distribution:
    weights = [rng.random() ** sharpness for _ in range(vocab_size)]
    return tuple(weight / sum(weights) for weight in weights)


def _with_zeros(vocab_size: int, rng: random.Random) -> Distribution:
    weights = list(_random(vocab_size, rng))
    weights[rng.randrange(vocab_size)] = 0.0
    return tuple(weight / sum(weights) for weight in weights)


def _one_hot(vocab_size: int, rng: random.Random) -> Distribution:
    token = rng.randrange(vocab_size)
    return tuple(float(i == token) for i in range(vocab_size))


def _half(vocab_size: int, rng: random.Random, of: int) -> Distribution:
    """On the tokens of one half only."""
    weights = [rng.random() if i % 2 == of else 0.0 for i in range(vocab_size)]
    return tuple(weight / sum(weights) for weight in weights)


def _dyadic(vocab_size: int, rng: random.Random) -> Distribution:
    """Multiples of an eighth: ratios of exactly one, and empty residuals, are common."""
    cuts = sorted(rng.randrange(9) for _ in range(vocab_size - 1))
    return tuple((high - low) / 8 for low, high in zip([0, *cuts], [*cuts, 8], strict=True))


MAKERS = {
    "random": (_random, _random),
    "sharp": (lambda n, rng: _random(n, rng, 8.0), lambda n, rng: _random(n, rng, 8.0)),
    "zeros in p": (_with_zeros, _random),
    "zeros in q": (_random, _with_zeros),
    "zeros in both": (_with_zeros, _with_zeros),
    "disjoint": (lambda n, rng: _half(n, rng, 0), lambda n, rng: _half(n, rng, 1)),
    "one-hot p": (_one_hot, _random),
    "one-hot q": (_random, _one_hot),
    "both one-hot": (_one_hot, _one_hot),
    "eighths": (_dyadic, _dyadic),
}


def trees(name: str, vocab_size: int, length: int, seed: int) -> tuple[Tree, Tree]:
    """Target and assistant of a kind of case."""
    rng = random.Random(f"{name} {vocab_size} {length} {seed}")
    if name == "p equals q":
        tree = Tree(vocab_size, length, lambda _: _random(vocab_size, rng))
        return tree, tree
    make_p, make_q = MAKERS[name]
    return (
        Tree(vocab_size, length, lambda _: make_p(vocab_size, rng)),
        Tree(vocab_size, length, lambda _: make_q(vocab_size, rng)),
    )


NAMES = (*MAKERS, "p equals q")


def as_batch(rows: list[list[Distribution]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.double)
