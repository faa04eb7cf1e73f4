from __future__ import annotations

import itertools
import math

import pytest
import torch
from chi_square import p_value

from hf_ssd.noise import GumbelNoise, derive_seed

MASK = 0xFFFFFFFF


def naive(seed: int, position: int, token: int) -> float:
    """The same in Python's own whole numbers, which do not overflow, and in double precision."""

    def mix(x: int, key: int = 0) -> int:
        x %= 2**32
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32 ^ key
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    low, high = seed % 2**32, seed // 2**32
    first = mix(position * 0x9E3779B9 + mix(mix(low) + high * 0x27D4EB2F))
    second = mix(position * 0x9E3779B9 + mix(mix(high ^ 0x3C6EF372) + low * 0x165667B1))
    bits = mix(mix(token * 0x85EBCA6B) ^ first, second) % 2**31
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**31, 1 - 2**-24)))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
def test_equals_the_formula_one_by_one(seed: int) -> None:
    positions, tokens = [0, 1, 1000, 2**31], torch.tensor([0, 1, 7, 151_935, 2**31 - 1])
    expected = [[naive(seed, position, token) for token in tokens.tolist()] for position in positions]
    torch.testing.assert_close(GumbelNoise(seed)(positions, tokens), torch.tensor(expected), atol=2e-6, rtol=2e-6)


@pytest.mark.gpu
def test_is_the_same_on_an_accelerator() -> None:
    tokens = torch.arange(50_000)
    there = GumbelNoise(7)(range(50), tokens.to(torch.accelerator.current_accelerator())).cpu()
    torch.testing.assert_close(there, GumbelNoise(7)(range(50), tokens), atol=1e-5, rtol=1e-5)


def test_is_distributed_as_gumbel_noise() -> None:
    """By position, by token and by seed, in equally likely bins."""
    samples = {
        "tokens": GumbelNoise(3)([5], torch.arange(100_000)),
        "positions": GumbelNoise(3)(range(100_000), torch.tensor([5])),
        "seeds": torch.stack([GumbelNoise(seed)([2], torch.tensor([9])) for seed in range(20_000)]),
    }
    for name, noise in samples.items():
        uniform = torch.exp(-torch.exp(-noise.double())).flatten()
        counts = (uniform * 100).long().clamp(max=99).bincount(minlength=100)
        assert p_value(counts, torch.ones(100) / 100) > 1e-3, name


@pytest.mark.parametrize("what", ["tokens", "positions", "seeds"])
def test_neighbours_have_nothing_to_do_with_each_other(what: str) -> None:
    if what == "tokens":
        noise = GumbelNoise(1)([1], torch.arange(40_000))
    elif what == "positions":
        noise = GumbelNoise(1)(range(40_000), torch.tensor([1]))
    else:
        noise = torch.cat([GumbelNoise(seed)([1], torch.tensor([1])) for seed in range(20_000)])
    uniform = torch.exp(-torch.exp(-noise.double())).flatten()
    for lag in (1, 2, 3, 64):
        cells = (uniform[:-lag] * 8).long() * 8 + (uniform[lag:] * 8).long()
        # Pairs overlap, which chi-square does not know of: take every other stretch.
        kept = torch.arange(len(cells)) // lag % 2 == 0
        assert p_value(cells[kept].bincount(minlength=64), torch.ones(64) / 64) > 1e-3, lag


def test_the_largest_is_a_draw() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    positions = range(50_000)
    noisy = GumbelNoise(11).add_to(probs.log().expand(len(positions), -1), positions)
    assert p_value(noisy.argmax(dim=1).bincount(minlength=5), probs) > 1e-3


def test_successive_draws_are_independent() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.cat(
        [GumbelNoise(seed).add_to(probs.log().expand(100, -1), range(100)).argmax(dim=1) for seed in range(200)]
    )
    pairs = tokens[0::2] * 3 + tokens[1::2]
    assert p_value(pairs.bincount(minlength=9), torch.outer(probs, probs)) > 1e-3


def test_only_what_cannot_win_is_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 500, generator=generator) * 80
    noise = GumbelNoise(4)
    everything = scores + noise(range(200), torch.arange(500))
    noisy = noise.add_to(scores, range(200))
    kept = noisy > float("-inf")
    assert 0.004 < kept.float().mean() < 0.1
    assert torch.equal(noisy[kept], everything[kept])
    assert torch.equal(noisy.argmax(dim=1), everything.argmax(dim=1))
    # Nothing that is left out could win with the most noise there is, against the least.
    assert ((scores.max(dim=1, keepdim=True).values - scores)[~kept] > 25.1).all()


def test_where_most_can_win_all_have_their_noise() -> None:
    scores = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    noise = GumbelNoise(4)
    assert torch.equal(noise.add_to(scores, range(20)), scores + noise(range(20), torch.arange(500)))


def test_columns_may_stand_for_other_tokens() -> None:
    token_ids = torch.tensor([7, 100, 3, *range(20, 40)])
    all_tokens = GumbelNoise(0).add_to(torch.zeros(2, 128), [4, 9])
    for num_possible in (1, len(token_ids)):
        scores = torch.full((2, len(token_ids)), float("-inf"))
        scores[:, :num_possible] = 0
        noisy = GumbelNoise(0).add_to(scores, [4, 9], token_ids)
        assert torch.equal(noisy[:, :num_possible], all_tokens[:, token_ids[:num_possible]])
        assert (noisy[:, num_possible:] == float("-inf")).all()


def test_what_is_no_number_stays_none() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[0.0, nan, 1.0], [inf, 0.0, 0.0], [-inf, -inf, -inf], [-inf, 3.0, -inf]])
    for padding in (0, 100):  # where few can win, and where most can
        wide = torch.nn.functional.pad(scores, (0, padding), value=-inf)
        best = GumbelNoise(0).add_to(wide, range(4)).max(dim=1).values
        assert best.isfinite().tolist() == [False, False, False, True]


def test_seeds_of_rows() -> None:
    for seed in (0, 5, 2**63, 2**64 - 1):
        assert derive_seed(seed, 0) == seed
        rows = [derive_seed(seed, row) for row in range(1000)]
        assert len(set(rows)) == 1000
        assert all(0 <= each < 2**64 for each in rows)
    first, second = ([derive_seed(seed, row) for row in range(1, 100)] for seed in (1, 2))
    assert not set(first) & set(second)
    noises = [GumbelNoise(derive_seed(0, row))([3], torch.arange(1000))[0] for row in range(4)]
    for one, other in itertools.combinations(noises, 2):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.15
