from __future__ import annotations

import pytest

from hf_ssd.vocabulary import VocabularyMismatchError, check_vocab_sizes, check_vocabularies, same_vocab_size


def vocabulary(size: int, **renamed: int) -> dict[str, int]:
    names = {index: f"token{index}" for index in range(size)}
    names.update({index: name for name, index in renamed.items()})
    return {name: index for index, name in names.items()}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (64, 64, True),
        (60, 64, True),
        (57, 64, False),  # less than nine tenths
        (151936, 152064, True),
        (32000, 33024, True),
        (32000, 33025, False),  # more than 1,024 apart
        (49152, 32000, False),
    ],
)
def test_sizes_may_differ_by_padding(first, second, same):
    assert same_vocab_size(first, second) is same
    assert same_vocab_size(second, first) is same


def test_another_size_is_refused_by_name():
    with pytest.raises(VocabularyMismatchError, match=r"some/assistant knows 32000 tokens and the target 49152"):
        check_vocab_sizes(49152, 32000, assistant="some/assistant")


def test_the_same_vocabulary_is_accepted_also_when_one_is_longer():
    check_vocabularies(vocabulary(1000), vocabulary(1000))
    check_vocabularies(vocabulary(1000), vocabulary(990))


def test_a_few_renamed_special_tokens_are_accepted():
    check_vocabularies(vocabulary(1000), vocabulary(1000, pad=3, reserved=4))


def test_other_tokens_at_the_same_ids_are_refused_by_name():
    other = {name: 999 - index for name, index in vocabulary(1000).items()}
    with pytest.raises(VocabularyMismatchError, match=r"1000 of the 1000 .* some/assistant \(id 0 is 'token0' there"):
        check_vocabularies(vocabulary(1000), other, assistant="some/assistant")


def test_nothing_in_common_is_refused():
    with pytest.raises(VocabularyMismatchError, match="0 of the 0"):
        check_vocabularies(vocabulary(4), {})
