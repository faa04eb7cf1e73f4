"""Greedy verification of trees, against decoding one token at a time."""

from __future__ import annotations

import random

import pytest

from hf_ssd.verification import follow_tree

VOCAB_SIZE = 5


def random_tree(generator: random.Random, num_nodes: int) -> tuple[list[int], list[int]]:
    tokens, parents, known = [], [], set()
    while len(tokens) < num_nodes:
        parent, token = generator.randint(-1, len(tokens) - 1), generator.randrange(VOCAB_SIZE)
        if (parent, token) not in known:
            known.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def test_what_it_emits_is_what_one_at_a_time_gives() -> None:
    generator = random.Random(0)
    lengths = []
    for _ in range(500):
        tokens, parents = random_tree(generator, generator.randint(0, 12))
        text = [generator.randrange(VOCAB_SIZE) for _ in range(len(tokens) + 1)]  # what the target would write
        asked = []

        def choose(node: int, path: tuple[int, ...], text=text, asked=asked) -> int:
            asked.append((node, path))
            assert node == (path[-1] if path else -1)
            return text[len(path)]

        path, bonus_token = follow_tree(choose, tokens, parents)
        emitted = [*(tokens[index] for index in path), bonus_token]
        assert emitted == text[: len(emitted)]
        assert [parents[index] for index in path] == [-1, *path[:-1]][: len(path)]
        # It went as far as the tree goes: no child of the last node holds the bonus token.
        last = path[-1] if path else -1
        assert not any(p == last and t == bonus_token for t, p in zip(tokens, parents, strict=True))
        assert [node for node, _ in asked] == [-1, *path]  # nothing off the path was asked about
        lengths.append(len(path))
    assert max(lengths) >= 3


def test_without_draft_tokens_there_is_the_bonus_token() -> None:
    assert follow_tree(lambda node, path: 7, [], []) == ((), 7)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        follow_tree(lambda node, path: 7, [1, 2], [-1])
