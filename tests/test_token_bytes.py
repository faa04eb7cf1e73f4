from __future__ import annotations

from typing import ClassVar

import pytest
from tiny_tokenizers import byte_fallback, byte_level, unigram, wordpiece, words

from hf_ssd.token_bytes import special_tokens, token_bytes

TEXT = "The international café 😀, 2024\n\tand für"


def text_of(tokenizer, text: str) -> bytes:
    data = token_bytes(tokenizer)
    return b"".join(data[index] for index in tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("size", [320, 420])
def test_byte_level_tokens_are_the_bytes_of_the_text(size):
    assert text_of(byte_level(size), TEXT) == TEXT.encode()


def test_a_space_is_a_space_whatever_it_is_written_as():
    assert text_of(byte_fallback(), TEXT) == b" " + TEXT.encode()
    assert text_of(unigram(), "The cat sat") == b" The cat sat"


def test_words_come_after_a_space_and_their_parts_do_not():
    assert text_of(wordpiece(), "the catsat") == b" the catsat"
    assert text_of(words(["cat", "sat"]), "cat sat") == b" cat sat"


def test_bytes_that_are_written_as_such():
    data = token_bytes(byte_fallback())
    tokenizer = byte_fallback()
    assert data[tokenizer.convert_tokens_to_ids("<0xE2>")] == b"\xe2"
    assert data[tokenizer.convert_tokens_to_ids("<0x0A>")] == b"\n"


def test_special_tokens_are_no_text():
    tokenizer = byte_level(320)
    assert special_tokens(tokenizer) == {"<turn>": 0, "<pad>": 1, "<eos>": 2}
    assert not {0, 1, 2} & token_bytes(tokenizer).keys()


def test_tokens_added_later_are_the_text_that_they_are():
    tokenizer = byte_level(320, eos="<end>")
    tokenizer.add_tokens(["für mich"])
    assert token_bytes(tokenizer)[tokenizer.convert_tokens_to_ids("für mich")] == "für mich".encode()


def test_vocabularies_of_bytes():
    class OfBytes:
        """As tokenizers on tiktoken have it."""

        added_tokens_decoder: ClassVar = {}
        all_special_ids: ClassVar = []
        all_special_tokens: ClassVar = []

        def get_vocab(self):
            return {b" the": 0, b"\xf0\x9f": 1}

    assert token_bytes(OfBytes()) == {0: b" the", 1: b"\xf0\x9f"}
