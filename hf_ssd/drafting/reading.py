"""A row as the assistant reads it: token by token, or in its own tokens where its tokenizer is another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..translation import Translation, split_characters

# What belongs to the same word is encoded anew together, up to so many tokens.
MAX_WORD_UNITS = 8


class Reading:
    """The row of an assistant with the target's own tokenizer.

    Args:
        row: Token ids of the target, padding left out.

    Attributes:
        tokens: The assistant's token ids for the row.
        is_waiting: Whether the row ends with something that the assistant cannot read yet.
    """

    def __init__(self, row: Sequence[int]) -> None:
        self.tokens = [*row]
        self.is_waiting = False

    def token(self, token: int) -> int | None:
        """The assistant's token for a draft token; `None` if it has none."""
        return token

    def extend(self, tokens: Sequence[int], num_run: int) -> int:
        """Appends tokens of the target.

        Args:
            tokens: Token ids.
            num_run: How many of them, from the first on, the assistant has run as single tokens.

        Returns:
            How many of the tokens that were there before, and then of those run, are as they were.
        """
        num_kept = len(self.tokens) + num_run
        self.tokens += tokens
        return num_kept


class _Unit(NamedTuple):
    """Text that was read together, whether it may be part of a word, and how many of the assistant's tokens it made."""

    data: bytes
    is_text: bool
    length: int


class TranslatedReading(Reading):
    """The row of an assistant with another tokenizer.

    The prompt is encoded anew, as a whole. After it shared tokens are read one by one, as they are drafted. Any other
    is encoded anew together with the word so far. Where that ends within a character it is read in single bytes, and
    once more when the character is complete; an assistant without tokens for bytes waits until then.

    Args:
        row: Token ids of the target, padding left out.
        translation: Between the tokenizers.
    """

    def __init__(self, row: Sequence[int], translation: Translation) -> None:
        self._translation = translation
        tokens, rest = translation.encode_prompt(row)
        super().__init__(tokens)
        self._units: list[_Unit] = []
        self._is_open = False  # within a character that has been read as something else than shared tokens
        if rest:
            self._read(rest, is_text=True)

    def token(self, token: int) -> int | None:
        return self._translation.token(token)

    def extend(self, tokens: Sequence[int], num_run: int) -> int:
        num_kept = len(self.tokens) + num_run
        for place, token in enumerate(tokens):
            shared = self._translation.token(token)
            data, is_text = self._translation.text(token), token in self._translation.words
            if shared is not None and (place < num_run or not self._is_open):
                self.tokens.append(shared)
                self._units.append(_Unit(data, is_text, 1))
                self._is_open = self.is_waiting = False
            else:
                num_kept = min(num_kept, self._encode_anew(data, is_text))
        return num_kept

    def _encode_anew(self, data: bytes, is_text: bool) -> int:
        """Reads a token together with the word so far. Returns how many of the tokens before that word there are."""
        num_units = 1
        while is_text and self._units and _belongs(self._units[-1], data, num_units):
            unit = self._units.pop()
            data = unit.data + data
            del self.tokens[len(self.tokens) - unit.length :]
            num_units += 1
        num_before = len(self.tokens)
        self._read(data, is_text)
        return num_before

    def _read(self, data: bytes, is_text: bool) -> None:
        whole, rest = split_characters(data)
        ids = self._translation.encode(whole) if whole else []
        last = self._translation.encode_bytes(rest)
        self.is_waiting, self._is_open = last is None, bool(rest)
        ids += last or []
        self.tokens += ids
        self._units.append(_Unit(data, is_text, len(ids)))


def _belongs(unit: _Unit, data: bytes, num_units: int) -> bool:
    """Whether a unit is part of the word that `data` is the end of."""
    if not unit.is_text or not data or data[:1].isspace():
        return False
    is_within_character = data[0] & 0xC0 == 0x80
    return is_within_character or num_units < MAX_WORD_UNITS


def make_reading(row: Sequence[int], translation: Translation | None) -> Reading:
    """The reading of a row; without a translation both sides have one tokenizer."""
    return Reading(row) if translation is None else TranslatedReading(row, translation)
