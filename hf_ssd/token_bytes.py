"""What a tokenizer's tokens stand for, as bytes of text: how tokens of two tokenizers are compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

# How kinds of tokenizers write a token that begins with a space, or one that does not.
BYTE_LEVEL, METASPACE, WORDPIECE = "Ġ", "▁", "##"

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """For each token id what it adds to a text, in UTF-8, perhaps only part of a character. Special tokens stay out.

    Tokens that have the same bytes mean the same to two tokenizers, whichever way these write a space or a byte.
    """
    added = tokenizer.added_tokens_decoder
    special = special_tokens(tokenizer).values()
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items() if index not in added}
    to_bytes = _reader(tokenizer, [token for index, token in vocabulary.items() if index not in special])
    found = {index: to_bytes(token) if isinstance(token, str) else bytes(token) for index, token in vocabulary.items()}
    found.update({index: each.content.encode() for index, each in added.items()})
    return {index: data for index, data in sorted(found.items()) if index not in special}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens and their ids."""
    marked = {index: each.content for index, each in tokenizer.added_tokens_decoder.items() if each.special}
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {token: index for index, token in sorted({**named, **marked}.items())}


def _reader(tokenizer: Any, tokens: list[str]) -> Callable[[str], bytes]:
    """Turns a token as the vocabulary writes it into bytes."""
    tokens = [token for token in tokens if isinstance(token, str)]  # some have bytes in their vocabularies
    marks = Counter(mark for token in tokens for mark in (BYTE_LEVEL, METASPACE, WORDPIECE) if token.startswith(mark))
    mark = marks.most_common(1)[0][0] if marks else ""
    if mark == BYTE_LEVEL:
        return _from_byte_level
    if mark == METASPACE:
        return _from_metaspace
    # Words that a text separates by spaces, which the tokens do not show.
    joins = len(tokens) > 1 and tokenizer.convert_tokens_to_string(tokens[:2]) == f"{tokens[0]} {tokens[1]}"
    return _from_wordpiece if mark == WORDPIECE or joins else str.encode


def _from_byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTES).encode("latin-1")  # whose characters are the bytes
    except UnicodeEncodeError:
        return token.encode()


def _from_metaspace(token: str) -> bytes:
    byte = _BYTE_FALLBACK.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode()


def _from_wordpiece(token: str) -> bytes:
    return token.removeprefix(WORDPIECE).encode() if token.startswith(WORDPIECE) else f" {token}".encode()


def _byte_level_table() -> dict[int, int]:
    """What byte-level tokenizers write bytes as: printable characters as themselves, others from 256 on.

    Returns:
        For each of these characters the byte, and for others below 256, which mean nothing, one that is none.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {256 + index: byte for index, byte in enumerate(others)}
    return {**written, **{byte: byte for byte in printable}, **dict.fromkeys(others, 0xFFFF)}


_BYTES = _byte_level_table()
