"""N-gram lookup against a search through the whole row."""

from __future__ import annotations

import random

import pytest

from hf_ssd.drafting.ngram import MAX_LENGTH, MIN_LENGTH, NGramIndex, match_strength


def search(row: list[int], continuation: list[int], max_tokens: int) -> tuple[list[int], int]:
    """What followed the latest earlier place in `row` where its last two tokens were those of the whole."""
    whole = [*row, *continuation]
    ending = whole[-MIN_LENGTH:]
    for place in range(len(row) - 1, MIN_LENGTH - 1, -1):
        if len(whole) >= MIN_LENGTH and row[place - MIN_LENGTH : place] == ending:
            length = MIN_LENGTH
            while length < min(place, MAX_LENGTH, len(whole)) and row[place - length - 1] == whole[-length - 1]:
                length += 1
            return row[place : place + max_tokens], length
    return [], 0


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_a_search(seed: int) -> None:
    generator = random.Random(seed)
    row = [generator.randrange(4) for _ in range(generator.randint(0, 6))]
    index, found = NGramIndex(row), 0
    for _ in range(200):
        new = [generator.randrange(4) for _ in range(generator.randint(1, 4))]
        if generator.random() < 0.2 and len(row) > 30:
            new = row[5:30]  # a long repeat
        index.extend(new)
        row += new
        continuation = [generator.randrange(4) for _ in range(generator.randint(0, 3))]
        assert index.lookup(continuation, 5) == search(row, continuation, 5)
        found += index.lookup(continuation, 5)[1] > 4
    assert found > 1


def test_the_end_of_the_row_is_no_match_for_itself() -> None:
    assert NGramIndex([1, 2, 3]).lookup([], 8) == ([], 0)


@pytest.mark.parametrize("row", [[], [1], [1, 2]])
def test_short_rows(row: list[int]) -> None:
    assert NGramIndex(row).lookup([], 8) == ([], 0)
    assert NGramIndex(row).lookup([1], 8) == ([], 0)


def test_a_longer_match_is_stronger() -> None:
    strengths = [match_strength(length) for length in range(MIN_LENGTH, MAX_LENGTH + 1)]
    assert strengths == sorted(set(strengths))
    assert 0 < strengths[0] < strengths[-1] < 1
