"""Tokens as they come: when, from where, and with which probability."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import StoppingCriteria

from hf_ssd import Miss, Origin, RoundStats, RoundStreamer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of half a character


class Source(str, Enum):
    """Where a token came from, as the page shows it."""

    CACHE = "cache"
    BACKUP = "backup"
    NGRAM = "ngram"
    BONUS = "bonus"
    PLAIN = "plain"  # one forward of the target for this token alone
    PENDING = "pending"  # its round has not been reported yet


@dataclass(frozen=True)
class Round:
    """A round and when it ended, in milliseconds after the call."""

    stats: RoundStats
    end_ms: float
    end: int  # tokens that there were then


@dataclass(frozen=True)
class Token:
    """One token of a text.

    Args:
        text: What it adds to the text; empty for half a character and for the end of the text.
        token_id: Its id.
        at_ms: When it was final, in milliseconds after the call began.
        source: Where it came from.
        note: Round, branch and what became of it, in words.
        probability: What the target gave it, all settings of sampling applied; `None` before the run is over.
    """

    text: str
    token_id: int
    at_ms: float
    source: Source
    note: str
    probability: float | None = None


class Tape(RoundStreamer):
    """Takes down tokens and rounds with the time. It only appends; what is read meanwhile is a prefix."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self.ids: list[int] = []
        self.times_ms: list[float] = []
        self.rounds: list[Round] = []
        self._has_prompt = False

    @property
    def now_ms(self) -> float:
        """Milliseconds since the call began."""
        return (time.monotonic() - self.start_s) * 1e3

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        now = self.now_ms
        for token in value.flatten().tolist():
            self.times_ms.append(now)
            self.ids.append(token)

    def put_round(self, stats: RoundStats) -> None:
        self.rounds.append(Round(stats, self.now_ms, len(self.ids)))

    def end(self) -> None:
        pass  # the call returns next


class StopWhenAsked(StoppingCriteria):
    """Ends a call at its next token once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


class TextPieces:
    """What each token adds to the text. A character of several tokens comes with the last of them.

    It goes on from where it was, so that a text that grows is decoded once: decoding takes time from the run.

    Args:
        tokenizer: Of the target.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str] = []
        # What was decoded last, from which token on: some tokenizers drop a space at the beginning.
        self._start, self._before = 0, ""

    def extend(self, ids: Sequence[int], *, is_whole: bool) -> list[str]:
        """The pieces of all tokens so far.

        Args:
            ids: Tokens of the answer; those that were given before are the first.
            is_whole: Whether no more follow, so that half a character is shown as such.
        """
        for end in range(len(self._pieces) + 1, len(ids) + 1):
            text = self._decode(ids[self._start : end])
            if text.endswith(UNFINISHED) and not (is_whole and end == len(ids)):
                self._pieces.append("")
                continue
            self._pieces.append(text[len(self._before) :])
            if not text.endswith(UNFINISHED):
                self._start = max(end - 4, self._start)
            self._before = self._decode(ids[self._start : end])
        return list(self._pieces)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def read_tape(
    tape: Tape, text: TextPieces, *, has_rounds: bool, is_over: bool, probabilities: Sequence[float] = ()
) -> list[Token]:
    """The tokens so far.

    Args:
        tape: What was taken down.
        text: Knows what the tokens before add to the text.
        has_rounds: Whether the arm has an assistant: without one each token is a forward of its own.
        is_over: Whether no more come.
        probabilities: Of the tokens, once they are known.
    """
    rounds = list(tape.rounds)
    ids = list(tape.ids)
    sources = [Source.PENDING if has_rounds and not is_over else Source.PLAIN] * len(ids)
    notes = ["the target alone"] * len(ids)
    if has_rounds and ids:
        sources[0], notes[0] = Source.PLAIN, "first token, from reading the prompt"
        for number, each in enumerate(rounds, 1):
            following = rounds[number].stats if number < len(rounds) else None
            first = each.end - each.stats.num_emitted
            for place in range(each.stats.num_emitted):
                sources[first + place] = source_of(each.stats, place)
                notes[first + place] = describe(number, each.stats, place, following)
    pieces = text.extend(ids, is_whole=is_over)
    return [
        Token(
            pieces[index],
            ids[index],
            tape.times_ms[index],
            sources[index],
            notes[index],
            probabilities[index] if index < len(probabilities) else None,
        )
        for index in range(len(ids))
    ]


def source_of(stats: RoundStats, place: int) -> Source:
    """Where the token at a place of its round came from."""
    if place >= stats.num_accepted:
        return Source.BONUS if stats.num_draft_tokens else Source.PLAIN
    if stats.origin is Origin.CACHE:
        return Source.CACHE
    return Source.NGRAM if stats.origin is Origin.NGRAM else Source.BACKUP


def describe(number: int, stats: RoundStats, place: int, following: RoundStats | None) -> str:
    """A token's round and branch in words."""
    if place < stats.num_accepted:
        origin = {Source.CACHE: "speculation cache", Source.NGRAM: "backup (n-gram)"}.get(
            source_of(stats, place), "backup (drafted just in time)"
        )
        branch = "-".join(str(index + 1) for index in stats.path[: place + 1])
        return f"round {number}, {origin}, branch {branch} of {stats.num_draft_tokens} draft tokens"
    what = "bonus token" if stats.num_draft_tokens else "the target alone"
    if following is None:
        return f"round {number}, {what}"
    answers = {Miss.TOKEN: "another token was prepared", Miss.LENGTH: "this length was not prepared"}
    if following.origin is Origin.CACHE:
        return f"round {number}, {what}; hit: the next draft was ready"
    reason = answers.get(following.miss) if following.miss is not None else None
    return f"round {number}, {what}; " + (f"miss: {reason}" if reason else "the next draft was not ready")
