from __future__ import annotations

import pickle

import pytest
from tiny_tokenizers import byte_fallback, byte_level, unigram, words

from hf_ssd.token_bytes import token_bytes
from hf_ssd.translation import Translation, split_characters, translation_between
from hf_ssd.vocabulary import VocabularyMismatchError

BIG, SMALL = byte_level(420), byte_level(320)


def between(tokenizer, assistant_tokenizer, **sizes: int) -> Translation:
    found = translation_between(
        tokenizer,
        assistant_tokenizer,
        sizes.get("target_size", len(tokenizer)),
        sizes.get("assistant_size", len(assistant_tokenizer)),
    )
    assert found is not None
    return found


class TestSharedTokens:
    @pytest.mark.parametrize(
        ("target", "assistant"),
        [(BIG, SMALL), (SMALL, BIG), (BIG, byte_fallback()), (byte_fallback(), BIG), (BIG, unigram())],
    )
    def test_they_stand_for_the_same_text(self, target, assistant):
        found, data, assistant_data = between(target, assistant), token_bytes(target), token_bytes(assistant)
        pairs = [(index, found.token(index)) for index in data if found.token(index) is not None]
        assert len(pairs) > 40
        assert all(data[index] == assistant_data[other] for index, other in pairs)
        assert {data[index] for index, _ in pairs} == {*data.values()} & {*assistant_data.values()}

    def test_each_of_the_targets_tokens_is_drafted_as_one_token(self):
        # "<0x61>" and "a" are both the letter.
        found, tokenizer = between(byte_fallback(), BIG), byte_fallback()
        drafted = [index for index in found.drafted.tolist() if index >= 0]
        assert len(drafted) == len(set(drafted)) == found.num_shared
        single, letter = tokenizer.convert_tokens_to_ids(["<0x61>", "a"])
        assert found.token(single) == found.token(letter) == BIG.convert_tokens_to_ids("a")
        assert letter in drafted
        assert single not in drafted
        found = between(BIG, byte_fallback())
        drafted = [index for index in found.drafted.tolist() if index >= 0]
        assert len(drafted) == len(set(drafted))

    def test_special_tokens_are_shared_by_name_or_by_what_they_are_for(self):
        found = between(BIG, SMALL)
        assert found.token(BIG.convert_tokens_to_ids("<turn>")) == SMALL.convert_tokens_to_ids("<turn>")
        assert found.token(BIG.eos_token_id) == SMALL.eos_token_id
        other = between(BIG, byte_fallback())
        assert other.token(BIG.eos_token_id) == byte_fallback().eos_token_id
        assert other.token(BIG.convert_tokens_to_ids("<turn>")) is None

    def test_padding_is_nothing(self):
        found = between(BIG, SMALL, target_size=512, assistant_size=384)
        assert (len(found.shared), len(found.drafted)) == (512, 384)
        assert found.token(500) is None
        assert found.token(600) is None
        assert found.text(500) == found.text(600) == b""
        assert (found.drafted[len(SMALL) :] == -1).all()

    def test_tokens_beyond_a_models_vocabulary_are_left_out(self):
        found = between(BIG, SMALL, target_size=300, assistant_size=280)
        assert found.shared.max() < 280
        assert found.drafted.max() < 300


class TestEncoding:
    @pytest.mark.parametrize("assistant", [SMALL, byte_fallback()])
    @pytest.mark.parametrize("text", [" internationalised", "ised", "\n", "  two", "naïve", "x", " 😀", "。"])
    def test_text_in_the_middle_of_a_row_is_just_that_text(self, assistant, text):
        found, data = between(BIG, assistant), token_bytes(assistant)
        assert b"".join(data[index] for index in found.encode(text.encode())) == text.encode()

    def test_it_is_what_the_tokenizer_makes_of_it(self):
        assert between(BIG, SMALL).encode(b" international") == SMALL(" international")["input_ids"]
        ids = byte_fallback()("a international", add_special_tokens=False)["input_ids"]
        assert between(BIG, byte_fallback()).encode(b" international") == ids[1:]

    def test_what_has_no_tokens_is_what_the_tokenizer_has_for_it(self):
        found = between(BIG, unigram())
        assert unigram().unk_token_id in found.encode("😀".encode())
        assert found.encode_bytes(b"\xf0\x9f") is None

    def test_part_of_a_character_takes_the_longest_tokens(self):
        found = between(BIG, SMALL)
        (token,) = [index for index, data in token_bytes(SMALL).items() if data == b" \xf0\x9f\x98"]
        assert found.encode_bytes(b" \xf0\x9f\x98\x80") == [token, *SMALL.convert_tokens_to_ids(["Ģ"])]

    def test_a_tokenizer_set_to_truncate_still_reads_everything(self):
        assistant = byte_level(320, eos="<stop>")
        assistant("a", truncation=True, max_length=1)
        found = between(BIG, assistant)
        assistant("a", truncation=True, max_length=1)
        assert len(found.encode(b"a long text")) > 1

    def test_what_is_left_of_a_character(self):
        assert split_characters("ab😀".encode()[:-1]) == (b"ab", b"\xf0\x9f\x98")
        assert split_characters(b"ab\x80c") == (b"ab\x80c", b"")  # no text at all
        assert split_characters(b"") == (b"", b"")


class TestPrompts:
    def test_a_prompt_is_what_the_assistants_tokenizer_makes_of_its_text(self):
        text = "The international café: 2024 😀"
        for target, assistant in ((BIG, SMALL), (SMALL, BIG), (byte_fallback(), BIG), (BIG, byte_fallback())):
            ids, rest = between(target, assistant).encode_prompt(target(text)["input_ids"])
            assert (ids, rest) == (assistant(text)["input_ids"], b"")

    def test_special_tokens_are_translated_and_others_read_as_text(self):
        ids, _ = between(BIG, SMALL).encode_prompt(BIG("<turn>The cat<eos>sat")["input_ids"])
        assert ids == SMALL("<turn>The cat<eos>sat")["input_ids"]
        ids, _ = between(BIG, byte_fallback()).encode_prompt(BIG("The cat<turn>")["input_ids"])
        assert byte_fallback().decode(ids, skip_special_tokens=True).replace(" ", "") == "Thecat<turn>"

    def test_the_targets_begin_of_text_becomes_the_assistants(self):
        target = byte_fallback()("The cat")["input_ids"]
        assert target[0] == byte_fallback().bos_token_id
        assert between(byte_fallback(), BIG).encode_prompt(target)[0] == BIG("The cat")["input_ids"]
        ids, _ = between(BIG, byte_fallback()).encode_prompt(BIG("The cat")["input_ids"])
        assert ids[0] == byte_fallback().bos_token_id

    def test_a_prompt_that_ends_within_a_character(self):
        whole = BIG("The ø")["input_ids"]  # of no token, so two single bytes
        ids, rest = between(BIG, SMALL).encode_prompt(whole[:-1])
        assert (ids, rest) == (SMALL("The ")["input_ids"], b"\xc3")

    def test_no_prompt(self):
        assert between(BIG, SMALL).encode_prompt([]) == ([], b"")


def test_the_same_tokenizers_need_no_translation():
    assert translation_between(BIG, BIG, 420, 420) is None
    again = pickle.loads(pickle.dumps(BIG))
    assert translation_between(BIG, again, 448, 420) is None  # padded


def test_it_is_made_once_for_a_pair_and_anew_where_tokens_are_added():
    assistant = byte_level(320, eos="<other>")
    first = translation_between(BIG, assistant, 420, 320)
    assert translation_between(BIG, assistant, 420, 320) is first
    assistant.add_tokens(["für mich"])
    assert translation_between(BIG, assistant, 420, 320) is not first


def test_a_tokenizer_without_a_fast_form():
    class Slow:
        """A proxy that hides the fast one."""

        backend_tokenizer = None

        def __getattr__(self, name):
            return getattr(SMALL, name)

        def __len__(self):
            return len(SMALL)

        def __call__(self, text):
            return SMALL(text)

        def __deepcopy__(self, memo):
            return self

    slow = between(BIG, Slow())
    prompt = BIG("The cat <turn> für 😀")["input_ids"]
    assert slow.encode_prompt(prompt) == between(BIG, SMALL).encode_prompt(prompt)
    assert slow.encode(b" internationalised") == between(BIG, SMALL).encode(b" internationalised")


def test_it_can_be_sent():
    found = between(BIG, byte_fallback())
    again = pickle.loads(pickle.dumps(found))
    assert again.key == found.key
    prompt = BIG("The cat <turn> für 😀")["input_ids"]
    assert again.encode_prompt(prompt) == found.encode_prompt(prompt)


def test_too_little_in_common_is_refused_with_the_number():
    target, assistant = words([f"a{i}" for i in range(20)]), words(["a1", *(f"b{i}" for i in range(19))])
    with pytest.raises(VocabularyMismatchError, match=r"at least 10% .* only 1 of 20 tokens are the same"):
        translation_between(target, assistant, 20, 20)
