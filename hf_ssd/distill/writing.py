"""Text that the target writes: answers to prompts, and whole conversations (Magpie, arXiv 2406.08464).

An instruct model that is given a chat template up to where the user speaks writes what a user might ask. An assistant
learns most from what its target really says, so the answers are what training looks at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypedDict

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import logging

from ..bench.settings import sampling_arguments
from ..compat import CACHE_KEY
from ..drafting.tree_cache import SlabCache
from .batched_decoding import fast_on_cpu
from .chat import OPENINGS, OPENINGS_ON_TEXT, ChatFormat
from .row_sampling import MostRowsEnded, RowSampler
from .settings import SELF, DistillSettings

logger = logging.get_logger(__name__)

MAX_USER_TOKENS = 128
MAX_QUESTION_TOKENS = 24  # of a user turn that has a text
USER_TEMPERATURE = 0.9
ON_TEXT_EVERY = 4  # of the batches of conversations, one has user turns about texts
ENDED_SHARE = 0.9  # of a batch; the other rows are cut there
# In turn. Half of the answers are greedy, as most calls are.
ANSWER_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)


class Text(TypedDict):
    """A text as token ids.

    Args:
        source: `"self"`, or a digest of the prompt that it answers.
        num_prompt_tokens: How many of the ids come before what the target said.
        input_ids: All of them.
    """

    source: str
    num_prompt_tokens: int
    input_ids: list[int]


class Writer:
    """Lets the target write, a batch at a time.

    Args:
        target: A decoder-only transformers model in evaluation mode.
        tokenizer: Its tokenizer.
        settings: Lengths, batch size and seed are taken from here.
        temperatures: Of the answers, in turn; 0 is greedy.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: DistillSettings,
        temperatures: Sequence[float] = ANSWER_TEMPERATURES,
    ) -> None:
        self._target = target
        self._temperatures = temperatures
        self._settings = settings
        self._format = ChatFormat(tokenizer)
        self._words = self._format.words()
        self._known_openings = [opening for opening in OPENINGS if self._words or "{word}" not in opening]
        ends = target.generation_config.eos_token_id
        self._ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        # For a prompt, beside its answer.
        self._room = max(settings.max_length - settings.max_new_tokens, settings.max_length // 2)
        pad = tokenizer.pad_token_id
        self._pad: int = pad if pad is not None else self._ends[0] if self._ends else 0

    def write_own(self, batch: int, texts: Sequence[Text] = ()) -> list[Text]:
        """Conversations of the target with itself.

        Args:
            batch: Number of texts before, which decides the draws.
            texts: What it said before and the conversations shall be about, each about one of them, so that long
                prompts occur. None lets it ask what it likes.
        """
        num_texts = self._settings.writing_batch_size
        if not self._format.has_turns:
            return self._answer([self._format.user_start()] * num_texts, [SELF] * num_texts, batch)
        openings, num_tokens = self._openings(batch), MAX_USER_TOKENS
        if texts:
            openings, num_tokens = self._openings_on(texts, batch), MAX_QUESTION_TOKENS
        starts = [self._format.user_start(opening) for opening in openings]
        temperatures = [USER_TEMPERATURE] * num_texts
        turns = self._generate(starts, temperatures, num_tokens, self._format.user_ends(), seed=2 * batch)
        asked = [
            (opening + self._format.user_text(turn)).strip() for opening, turn in zip(openings, turns, strict=True)
        ]
        prompts = [self._format.prompt(text) for text in asked if text]
        return self._answer(prompts, [SELF] * len(prompts), batch)

    def _openings(self, batch: int) -> list[str]:
        """How user turns begin; of four, one begins as the target likes."""
        draws = Random(f"{self._settings.seed} {batch}")
        openings = []
        for i in range(self._settings.writing_batch_size):
            # By the turns that have one, so that each is for all temperatures in turn.
            opening = self._known_openings[(batch + i) * 3 // 4 % len(self._known_openings)] if i % 4 else ""
            openings.append(opening.format(word=draws.choice(self._words)) if "{word}" in opening else opening)
        return openings

    def _openings_on(self, texts: Sequence[Text], batch: int) -> list[str]:
        said = [self._format.user_text(text["input_ids"][text["num_prompt_tokens"] :]).strip() for text in texts]
        openings = []
        for i in range(self._settings.writing_batch_size):
            opening = OPENINGS_ON_TEXT[(batch + i) % len(OPENINGS_ON_TEXT)].format(said[i % len(said)])
            is_short = len(self._format.user_start(opening)) + MAX_QUESTION_TOKENS <= self._room
            openings.append(opening if is_short else "")
        return openings

    def answer(self, questions: Sequence[str], batch: int) -> list[Text]:
        """Answers to user turns; those that leave little room for one are left out."""
        prompts = [self._format.prompt(question) for question in questions]
        return self._answer(prompts, [digest(question) for question in questions], batch)

    def _answer(self, prompts: Sequence[list[int]], sources: Sequence[str], batch: int) -> list[Text]:
        fitting = [
            (prompt, source) for prompt, source in zip(prompts, sources, strict=True) if 0 < len(prompt) <= self._room
        ]
        if not fitting:
            return []
        # By fours, of which one text had no opening.
        temperatures = [self._temperatures[i // 4 % len(self._temperatures)] for i in range(len(fitting))]
        longest = max(len(prompt) for prompt, _ in fitting)
        num_tokens = min(self._settings.max_new_tokens, self._settings.max_length - longest)
        answers = self._generate([prompt for prompt, _ in fitting], temperatures, num_tokens, [], seed=2 * batch + 1)
        return [
            {"source": source, "num_prompt_tokens": len(prompt), "input_ids": [*prompt, *answer]}
            for (prompt, source), answer in zip(fitting, answers, strict=True)
        ]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        num_tokens: int,
        ends: list[int],
        *,
        seed: int,
    ) -> list[list[int]]:
        """Continuations, each up to its end, which is kept."""
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[self._pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ends = list(dict.fromkeys([*self._ends, *ends]))
        generator = torch.Generator().manual_seed((self._settings.seed << 32) + seed)
        with fast_on_cpu(self._target):
            output = self._target.generate(
                input_ids.to(self._target.device),
                attention_mask=mask.to(self._target.device),
                logits_processor=LogitsProcessorList([RowSampler(temperatures, generator)]),
                stopping_criteria=StoppingCriteriaList([MostRowsEnded(ends, longest, ENDED_SHARE)]),
                eos_token_id=ends or None,
                pad_token_id=self._pad,
                max_new_tokens=num_tokens,
                **sampling_arguments(0.0),
                **self._cache(),
            )
        return [up_to_end(row, ends) for row in output[:, longest:].tolist()]

    def _cache(self) -> dict[str, Any]:
        """A cache that is not copied in every step, where the target keeps all tokens in all layers."""
        own = DynamicCache(config=self._target.config)
        is_plain = own.layers and all(type(layer) is DynamicLayer for layer in own.layers)
        return {CACHE_KEY: SlabCache()} if is_plain else {}


def up_to_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Token ids up to the first that ends a text, which is kept."""
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids


def digest(text: str) -> str:
    """What a prompt is known by in the file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_texts(
    writer: Writer,
    path: Path,
    *,
    writes_own: bool,
    prompts: Sequence[str],
    batch_size: int,
    may_go_on: Callable[[int], bool],
) -> Iterator[int]:
    """Adds to the file, batch by batch: answers to prompts that have none yet, and own conversations, in turn.

    Each batch is on disk before the next one begins.

    Args:
        writer: Writes them.
        path: JSONL file of [`Text`].
        writes_own: Whether there are own conversations.
        prompts: User turns to answer.
        batch_size: Prompts per batch.
        may_go_on: Asked before each batch, with the number of tokens so far; an empty file gets one all the same.

    Yields:
        Tokens written so far, over all runs.
    """
    written = repair(path)
    sources = {text["source"] for text in written}
    waiting = iter([prompt for prompt in prompts if digest(prompt) not in sources])
    batch, num_tokens, is_own_turn = len(written), num_written(written), False
    latest = written[-batch_size:]
    del written
    with path.open("a", encoding="utf-8") as file:
        while may_go_on(num_tokens) or not batch:
            questions = [] if is_own_turn else list(islice(waiting, batch_size))
            if not questions and not writes_own:
                return
            if questions:
                texts = writer.answer(questions, batch)
            else:
                is_on_texts = batch // batch_size % ON_TEXT_EVERY == ON_TEXT_EVERY - 1
                texts = writer.write_own(batch, latest if is_on_texts else ())
            latest = texts or latest
            for text in texts:
                file.write(json.dumps(text) + "\n")
            file.flush()
            batch += max(1, len(texts))  # no two batches share their draws, whatever run they belong to
            num_tokens += num_written(texts)
            is_own_turn = writes_own and not is_own_turn
            yield num_tokens


def num_written(texts: Sequence[Text]) -> int:
    """Number of tokens after the prompts."""
    return sum(len(text["input_ids"]) - text["num_prompt_tokens"] for text in texts)


def repair(path: Path) -> list[Text]:
    """Drops a line that a killed run left unfinished.

    Returns:
        The texts.
    """
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        logger.info(f"Dropping an unfinished line at the end of {path}.")
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]
