from __future__ import annotations

import pytest
import torch
from tiny_pair import byte_tokenizer

from demo.tokens import Source, Tape, TextPieces, describe, read_tape, source_of
from hf_ssd import Miss, Origin, RoundStats

TOKENIZER = byte_tokenizer()


def split_text(ids: list[int], *, is_whole: bool = True) -> list[str]:
    return TextPieces(TOKENIZER).extend(ids, is_whole=is_whole)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize("text", ["plain words", "über Größe", "two 🎈🎈 and 中文", "  spaces\n\n\tkept ", ""])
def test_pieces_are_the_text(text):
    pieces = split_text(ids_of(text))
    assert len(pieces) == len(ids_of(text))
    assert "".join(pieces) == text


def test_half_a_character_waits_for_the_rest():
    ids = ids_of("a🎈b")
    assert split_text(ids[:3], is_whole=False) == ["a", "", ""]
    assert split_text(ids, is_whole=False) == ["a", "", "", "", "🎈", "b"]
    assert "".join(split_text(ids[:3])).startswith("a")


def test_a_text_that_grows_is_split_as_the_whole_is():
    text, ids = TextPieces(TOKENIZER), ids_of("über 🎈🎈 Größe 中文!")
    for end in range(len(ids)):
        assert len(text.extend(ids[:end], is_whole=False)) == end
    assert text.extend(ids, is_whole=True) == split_text(ids)


def test_the_end_of_the_text_is_no_text():
    assert split_text([*ids_of("ab"), TOKENIZER.eos_token_id]) == ["a", "b", ""]


def round_of(num_accepted: int, num_draft: int, origin: Origin, **fields) -> RoundStats:
    fields.setdefault("path", tuple(range(num_accepted)))
    return RoundStats(num_draft, num_accepted, fields.pop("num_emitted", num_accepted + 1), origin, **fields)


def tape_of(text: str, rounds: list[RoundStats]) -> Tape:
    """A tape on which a prompt, the first token and the rounds' tokens were put."""
    tape, ids = Tape(), ids_of(text)
    tape.put(torch.tensor([[5, 6, 7]]))
    tape.put(torch.tensor(ids[:1]))
    at = 1
    for stats in rounds:
        for token in ids[at : at + stats.num_emitted]:
            tape.put(torch.tensor([token]))
        at += stats.num_emitted
        tape.put_round(stats)
    for token in ids[at:]:
        tape.put(torch.tensor([token]))
    return tape


def test_tokens_are_told_apart_by_origin():
    rounds = [
        round_of(2, 4, Origin.JUST_IN_TIME, miss=Miss.COLD),
        round_of(1, 3, Origin.CACHE, path=(2,)),
        round_of(0, 0, Origin.NONE),
    ]
    tape = tape_of("abcdefg!", rounds)
    tokens = read_tape(tape, TextPieces(TOKENIZER), has_rounds=True, is_over=False)
    kinds = [token.source for token in tokens]
    # The first token, two from the backup and the bonus, one from the cache and the bonus, one alone, one unreported.
    assert kinds == [
        Source.PLAIN,
        Source.BACKUP,
        Source.BACKUP,
        Source.BONUS,
        Source.CACHE,
        Source.BONUS,
        Source.PLAIN,
        Source.PENDING,
    ]
    assert "".join(token.text for token in tokens) == "abcdefg!"
    assert "round 2, speculation cache, branch 3 of 3 draft tokens" in tokens[4].note
    assert "hit" in tokens[3].note  # what became of the first round's outcome
    assert "prompt" in tokens[0].note
    times = [token.at_ms for token in tokens]
    assert times == sorted(times)


def test_plain_decoding_has_one_origin():
    tokens = read_tape(
        tape_of("abc", []), TextPieces(TOKENIZER), has_rounds=False, is_over=True, probabilities=(0.5, 0.25, 1.0)
    )
    assert {token.source for token in tokens} == {Source.PLAIN}
    assert [token.probability for token in tokens] == [0.5, 0.25, 1.0]


def test_a_round_that_was_cut_short_has_no_bonus_token():
    stats = round_of(3, 4, Origin.CACHE, num_emitted=2)
    assert [source_of(stats, place) for place in range(2)] == [Source.CACHE, Source.CACHE]


@pytest.mark.parametrize(
    ("following", "words"),
    [
        (round_of(0, 2, Origin.CACHE), "hit: the next draft was ready"),
        (round_of(0, 2, Origin.JUST_IN_TIME, miss=Miss.TOKEN), "miss: another token was prepared"),
        (round_of(0, 2, Origin.JUST_IN_TIME, miss=Miss.LENGTH), "miss: this length was not prepared"),
        (round_of(0, 2, Origin.JUST_IN_TIME, miss=Miss.COLD), "the next draft was not ready"),
    ],
)
def test_a_bonus_token_says_whether_it_was_prepared_for(following, words):
    assert words in describe(3, round_of(0, 2, Origin.CACHE), 0, following)
