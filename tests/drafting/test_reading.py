from __future__ import annotations

import random

import pytest
from tiny_tokenizers import byte_fallback, byte_level, unigram

from hf_ssd.drafting.reading import MAX_WORD_UNITS, Reading, TranslatedReading
from hf_ssd.token_bytes import token_bytes
from hf_ssd.translation import translation_between

BIG, SMALL = byte_level(420), byte_level(320)


def reading_of(text: str, target=BIG, assistant=SMALL) -> TranslatedReading:
    translation = translation_between(target, assistant, len(target), len(assistant))
    assert translation is not None
    return TranslatedReading(target(text)["input_ids"], translation)


def ids(*tokens: str) -> list[int]:
    found = BIG.convert_tokens_to_ids(list(tokens))
    assert None not in found
    return found


def test_with_one_tokenizer_a_row_is_read_as_it_is():
    reading = Reading([5, 6])
    assert reading.extend([7, 8, 9], num_run=1) == 3
    assert (reading.tokens, reading.token(7), reading.is_waiting) == ([5, 6, 7, 8, 9], 7, False)


class TestShared:
    def test_they_are_read_one_by_one(self):
        reading = reading_of("The cat")
        before = [*reading.tokens]
        tokens = ids("a", "t", "Ġ")
        assert reading.extend(tokens, num_run=0) == len(before)
        assert reading.tokens == [*before, *map(reading.token, tokens)]

    def test_what_was_run_is_counted_as_it_is(self):
        reading = reading_of("The cat")
        num_before = len(reading.tokens)
        assert reading.extend(ids("a", "t", "Ġ"), num_run=2) == num_before + 2


class TestOthers:
    def test_they_are_encoded_anew(self):
        reading = reading_of("The cat")
        token = next(i for i in BIG("The organisation")["input_ids"] if reading.token(i) is None)
        text = BIG.decode([token])
        reading.extend([token], num_run=0)
        assert SMALL.decode(reading.tokens) == "The cat" + text

    def test_with_the_word_so_far(self):
        reading = reading_of("The cat")
        translation = reading._translation
        num_before = len(reading.tokens)
        # " v", "er", "if" are shared, "ication" is not; as one word the assistant writes it otherwise.
        tokens = ids("Ġ", "v", "er")
        reading.extend(tokens, num_run=0)
        other = next(i for i, data in enumerate(translation.texts) if reading.token(i) is None and data.isalpha())
        assert reading.extend([other], num_run=0) == num_before
        word = b" ver" + translation.text(other)
        assert reading.tokens[num_before:] == SMALL(word.decode())["input_ids"]

    def test_no_more_of_the_word_than_a_few_tokens(self):
        reading = reading_of("The cat")
        reading.extend(ids("x") * 20, num_run=0)
        num_before = len(reading.tokens)
        other = next(
            i for i, data in enumerate(reading._translation.texts) if reading.token(i) is None and data.isalpha()
        )
        assert reading.extend([other], num_run=0) == num_before - MAX_WORD_UNITS + 1

    def test_special_tokens_are_where_words_end(self):
        reading = reading_of("The cat", assistant=byte_fallback())
        (turn,) = ids("<turn>")
        reading.extend([turn], num_run=0)
        num_before = len(reading.tokens)
        other = next(
            i for i, data in enumerate(reading._translation.texts) if reading.token(i) is None and data.isalpha()
        )
        assert reading.extend([other], num_run=0) == num_before

    def test_padding_adds_nothing(self):
        reading = reading_of("The cat", assistant=byte_fallback())
        before = [*reading.tokens]
        assert reading.extend([BIG.pad_token_id, 5000], num_run=0) <= len(before)
        assert reading.tokens == before or reading.tokens == [*before, byte_fallback().pad_token_id]


class TestWithinCharacters:
    """An emoji is one token of the target's, or up to four; and four of the assistant's, or one that means unknown."""

    @pytest.fixture
    def single_bytes(self) -> list[int]:
        return [next(i for i, data in token_bytes(BIG).items() if data == bytes([byte])) for byte in "😀".encode()]

    def test_shared_bytes_are_read_as_they_come(self, single_bytes):
        reading = reading_of("The cat")
        before = [*reading.tokens]
        reading.extend(single_bytes[:2], num_run=0)
        assert reading.tokens == [*before, *map(reading.token, single_bytes[:2])]
        assert not reading.is_waiting

    def test_others_are_read_by_byte_until_the_character_is_complete(self, single_bytes):
        reading = reading_of("The cat", assistant=byte_fallback())
        before = [*reading.tokens]
        (start,) = [i for i, data in token_bytes(BIG).items() if data == b"\xf0\x9f"]
        assert reading.token(start) is None
        reading.extend([start], num_run=0)
        to_ids = byte_fallback().convert_tokens_to_ids
        assert reading.tokens == [*before, *to_ids(["<0xF0>", "<0x9F>"])]
        assert not reading.is_waiting
        reading.extend(single_bytes[2:], num_run=0)
        assert reading.tokens == [*before, *to_ids(["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])]

    def test_without_tokens_for_bytes_the_assistant_waits(self, single_bytes):
        reading = reading_of("The cat", assistant=unigram())
        before = [*reading.tokens]
        for token in single_bytes[:3]:
            reading.extend([token], num_run=0)
            assert reading.is_waiting
            assert reading.tokens == before
        reading.extend([single_bytes[3]], num_run=0)
        assert not reading.is_waiting
        assert reading.tokens != before

    def test_what_never_becomes_a_character_is_not_waited_for(self, single_bytes):
        reading = reading_of("The cat", assistant=unigram())
        reading.extend([*single_bytes[:2], *ids("Ġ", "t")], num_run=0)
        assert not reading.is_waiting
        reading.extend([single_bytes[3], *ids("Ġ", "t")], num_run=0)
        assert not reading.is_waiting

    def test_a_prompt_may_end_there(self, single_bytes):
        translation = translation_between(BIG, byte_fallback(), len(BIG), len(byte_fallback()))
        assert translation is not None
        reading = TranslatedReading([*BIG("The cat")["input_ids"], *single_bytes[:3]], translation)
        reading.extend([single_bytes[3]], num_run=0)
        assert reading.tokens == translation.encode_prompt([*BIG("The cat😀")["input_ids"]])[0]


@pytest.mark.parametrize(
    ("target", "assistant"),
    [(BIG, SMALL), (SMALL, BIG), (BIG, byte_fallback()), (byte_fallback(), BIG), (byte_fallback(), SMALL)],
)
def test_whatever_comes_the_assistant_reads_the_same_bytes(target, assistant):
    rng = random.Random(0)
    translation = translation_between(target, assistant, len(target), len(assistant))
    assert translation is not None
    data, texts = token_bytes(assistant), token_bytes(target)
    choices = [index for index in texts if texts[index]]
    for _ in range(30):
        reading = TranslatedReading(target("The cat")["input_ids"], translation)
        prompt = [*reading.tokens]
        row = b""
        for _ in range(25):
            tokens = rng.choices(choices, k=rng.randint(1, 4))
            num_run = 0
            while num_run < len(tokens) - 1 and translation.token(tokens[num_run]) is not None:
                num_run += 1
            before = [*reading.tokens]
            run = [translation.token(token) for token in tokens[:num_run]]
            num_kept = reading.extend(tokens, num_run)
            assert reading.tokens[:num_kept] == [*before, *run][:num_kept]
            row += b"".join(texts[token] for token in tokens)
            read = b"".join(data[index] for index in reading.tokens[len(prompt) :])
            assert reading.tokens[: len(prompt)] == prompt
            assert read == row, (read, row)
