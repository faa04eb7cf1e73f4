"""N-gram lookup: what followed the last time the row ended like this. Free of charge, and good where text repeats."""

from __future__ import annotations

from collections.abc import Sequence

MIN_LENGTH = 2  # of a match; a single token says too little
MAX_LENGTH = 16


class NGramIndex:
    """Finds the latest place in a row where its last tokens occurred before.

    Args:
        tokens: The row so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # two tokens to the place after their latest occurrence
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the row."""
        for token in tokens:
            end = len(self._tokens)
            if end >= MIN_LENGTH:
                self._followed[tuple(self._tokens[end - MIN_LENGTH :])] = end
            self._tokens.append(token)

    def lookup(self, continuation: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """What followed where the row, with `continuation` after it, ended like this before.

        Returns:
            At most `max_tokens` tokens, and the length of the match, up to `MAX_LENGTH`; none and 0 without a match.
        """
        missing = MAX_LENGTH - len(continuation)
        ending = [*(self._tokens[-missing:] if missing > 0 else ()), *continuation[-MAX_LENGTH:]]
        place = self._followed.get(tuple(ending[-MIN_LENGTH:]))
        if place is None:
            return [], 0
        length = MIN_LENGTH
        while length < min(len(ending), place) and self._tokens[place - length - 1] == ending[-length - 1]:
            length += 1
        return self._tokens[place : place + max_tokens], length


def match_strength(length: int) -> float:
    """A number from 0 to 1 that grows with the length of a match, to be calibrated as a probability is."""
    return 1.0 - 0.5 ** (length / 2.0)
