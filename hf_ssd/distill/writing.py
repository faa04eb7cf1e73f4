"""Text that the target writes: answers to prompts, and whole conversations (Magpie, arXiv 2406.08464).

An instruct model that is given a chat template up to where the user speaks writes what a user might ask. An assistant
learns most from what its target really says, so the answers are what training looks at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypedDict

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..bench.settings import sampling_arguments
from ..compat import CACHE_KEY
from ..drafting.tree_cache import SlabCache
from ..jsonl import whole_lines
from .chat import OPENINGS, OPENINGS_ON_TEXT, ChatFormat
from .row_sampling import MostRowsEnded, RowSampler
from .settings import SELF, DistillSettings
from .sources import digest

MAX_USER_TOKENS = 128
MAX_QUESTION_TOKENS = 24  # of a user turn that has a text
USER_TEMPERATURE = 0.9
ON_TEXT_EVERY = 4  # of the batches of conversations, one has user turns about texts
ENDED_SHARE = 0.9  # of a batch; the other rows are cut there
SORTED_BATCHES = 16  # so many batches' prompts are sorted by length among themselves
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
        ended_share: The share of a batch's rows after whose end the others are cut.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: DistillSettings,
        temperatures: Sequence[float] = ANSWER_TEMPERATURES,
        ended_share: float = ENDED_SHARE,
    ) -> None:
        self._target = target
        self._temperatures, self._ended_share = temperatures, ended_share
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
            texts: What it said before and the conversations shall be about, one about each, so that long prompts
                occur. None lets it ask what it likes.
        """
        num_texts = self._settings.writing_batch_size
        if not self._format.has_turns:
            return self._answer([self._format.user_start()] * num_texts, [SELF] * num_texts, batch)
        openings, num_tokens = self._openings_on(texts, batch), MAX_QUESTION_TOKENS
        if not openings:
            openings, num_tokens = self._openings(batch), MAX_USER_TOKENS
        starts = [self._format.user_start(opening) for opening in openings]
        temperatures, ends = [USER_TEMPERATURE] * len(openings), self._format.user_ends()
        turns = self._generate(starts, temperatures, num_tokens, ends, seed=2 * batch)
        asked = [
            self._format.user_text(opening, without_end(turn, [*self._ends, *ends]))
            for opening, turn in zip(openings, turns, strict=True)
        ]
        prompts = [self._format.prompt(text) for text in asked if text]
        return self._answer(prompts, [SELF] * len(prompts), batch)

    def _openings(self, batch: int) -> list[str]:
        """How user turns begin; of four, one begins as the target likes."""
        draws = Random(f"{self._settings.seed} {batch}")
        openings = []
        for number in range(batch, batch + self._settings.writing_batch_size):
            # Counted by the turns that have one, so that none is left out.
            opening = self._known_openings[number * 3 // 4 % len(self._known_openings)] if number % 4 else ""
            openings.append(opening.format(word=draws.choice(self._words)) if "{word}" in opening else opening)
        return openings

    def _openings_on(self, texts: Sequence[Text], batch: int) -> list[str]:
        """How user turns about texts begin, where a text says something and leaves room."""
        openings = []
        for number, text in enumerate(texts[: self._settings.writing_batch_size], start=batch):
            answer = without_end(text["input_ids"][text["num_prompt_tokens"] :], self._ends)
            said = self._format.answer_text(answer)
            opening = OPENINGS_ON_TEXT[number % len(OPENINGS_ON_TEXT)].format(said)
            if said and len(self._format.prompt(opening)) + MAX_QUESTION_TOKENS <= self._room:
                openings.append(opening)
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
        temperatures = [self._temperatures[(batch + i) // 4 % len(self._temperatures)] for i in range(len(fitting))]
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
        with without_gaps(self._target):
            output = self._target.generate(
                input_ids.to(self._target.device),
                attention_mask=mask.to(self._target.device),
                logits_processor=LogitsProcessorList([RowSampler(temperatures, generator)]),
                stopping_criteria=StoppingCriteriaList([MostRowsEnded(ends, longest, self._ended_share)]),
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


@contextmanager
def without_gaps(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model's output projection is given states without gaps.

    The last states of several prompts are a view with gaps, for which torch multiplies by a copy of the projection for
    each prompt: 57 MB for 49,152 tokens of 576 numbers. On a CPU that takes longer than all layers.
    """
    projection = model.get_output_embeddings()
    hook = projection.register_forward_pre_hook(lambda module, args: (args[0].contiguous(), *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def without_end(ids: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """Token ids without the one that ends them, if there is one."""
    return ids[:-1] if ids and ids[-1] in ends else ids


def up_to_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Token ids up to the first that ends a text, which is kept."""
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids


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
    written: list[Text] = [json.loads(line) for line in whole_lines(path)]
    sources = {text["source"] for text in written}
    waiting = iter([prompt for prompt in prompts if digest(prompt) not in sources])
    batch, num_tokens, is_own_turn = len(written), num_written(written), False
    latest = written[-batch_size:]
    num_own = -(-sum(text["source"] == SELF for text in written) // batch_size)  # batches
    del written
    with path.open("a", encoding="utf-8") as file:
        while may_go_on(num_tokens) or not batch:
            questions = [] if is_own_turn else list(islice(waiting, batch_size))
            if not questions and not writes_own:
                return
            if questions:
                texts = writer.answer(questions, batch)
            else:
                num_own += 1
                texts = writer.write_own(batch, latest if num_own % ON_TEXT_EVERY == 0 else ())
            latest = texts or latest
            for text in texts:
                file.write(json.dumps(text) + "\n")
            file.flush()
            batch += max(1, len(texts))  # no two batches share their draws, whatever run they belong to
            num_tokens += num_written(texts)
            is_own_turn = writes_own and not is_own_turn
            yield num_tokens


def by_like_length(prompts: Sequence[str], batch_size: int) -> list[str]:
    """Prompts in an order in which those of a batch are of like length, as all are padded to the longest.

    The batches themselves are mixed, so that whenever time ends some of all lengths were answered.

    ```python
    >>> by_like_length(["a", "bbb", "c", "ddd"], 2)
    ['a', 'c', 'bbb', 'ddd']

    ```
    """
    ordered: list[str] = []
    for start in range(0, len(prompts), SORTED_BATCHES * batch_size):
        alike = sorted(prompts[start : start + SORTED_BATCHES * batch_size], key=len)
        starts = list(range(0, len(alike), batch_size))
        Random(start).shuffle(starts)
        ordered += [prompt for first in starts for prompt in alike[first : first + batch_size]]
    return ordered


def num_written(texts: Sequence[Text]) -> int:
    """Number of tokens after the prompts."""
    return sum(len(text["input_ids"]) - text["num_prompt_tokens"] for text in texts)
