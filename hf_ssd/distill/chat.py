"""A chat template, taken apart: what comes before a user turn, what ends it, and what asks for an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..bench.encoding import PLACEHOLDER

# How three of four user turns begin, so that more is asked for than the target thinks of by itself, which is little. It
# goes on from there (after a space it would go on with a number). A `{word}` is one of its vocabulary: names, things.
OPENINGS = (
    "Who was {word}",
    "Translate German to English:",
    "Write a Python function that",
    "Tell me about {word} and",
    "Solve this problem step by step:",
    "Discuss",
    "Write an email to {word}",
    "When did {word}",
    "Extract all names and dates from the following text:\n\n",
    "What is the difference between {word} and",
    "Imagine you are",
    "A shop sells {word}",
    "Which of the following",
    "Explain how {word}",
    "Fix the mistakes in this code:\n\n```python\n",
    "Where is {word}",
    "Translate the following sentence into English:",
    "Summarize: {word}",
    "If {word}",
    "Write a blog post about {word}",
    "What is the name of the {word}",
    "Rewrite the following text so that it is easier to read:\n\n{word}",
    "Pretend to be {word}",
    "Implement",
    "Who plays {word} in",
    "What are the {word}",
    "Classify each of these reviews as positive or negative:\n\n",
    "What were the causes of {word}",
    "Read the passage and answer the question.\n\nPassage: {word}",
    "Describe {word}",
    "{word} has",
    "How does {word}",
    "Translate French to English:",
    "Write a program that",
    "What does {word} mean",
    "Give me a list of {word}",
    "Provide insights into {word}",
    "Write a short story that begins with the sentence: {word}",
    "How many {word}",
    "What is the value of",
    "Suppose that",
    "Compare {word}",
    "Why do {word}",
    "Edit the following paragraph and correct its grammar:\n\n{word}",
)

# How a user turn begins that is about a text. Where a question begins after the text, the target ends it.
OPENINGS_ON_TEXT = (
    "Summarize: {}",
    "{}\n\nWho",
    "Summarize the following text in a few sentences.\n\n{}",
    "{}\n\nWhat",
    "Rewrite the following text so that it is easier to read:\n\n{}",
    "Read the passage and answer the question.\n\nPassage: {}\n\nQuestion:",
    "{}\nWhen",
    "Extract all names from the following text:\n\n{}",
    "{}\n\nWrite a headline for this text",
    "{}\n\nHow",
)

WORD = re.compile(r"[Ġ▁][A-Za-z]{4,}")  # as token, after a space as byte-level and SentencePiece tokenizers write it


class ChatFormat:
    """How conversations are written for one tokenizer. Without a chat template a text has no turns.

    Args:
        tokenizer: The target's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.has_turns = bool(tokenizer.chat_template)
        self._before = self._after = ""
        if self.has_turns:
            self._before, self._after = self._render(PLACEHOLDER).split(PLACEHOLDER, 1)

    def words(self) -> list[str]:
        """The words of the vocabulary that have a token of their own; some only begin a longer one."""
        return [token[1:] for token in sorted(self._tokenizer.get_vocab()) if WORD.fullmatch(token)]

    def user_start(self, opening: str = "") -> list[int]:
        """Token ids of all that comes before a user turn, and of how it begins; of a text, without a template."""
        ids: list[int] = self._tokenizer(self._before + opening, add_special_tokens=not self.has_turns)["input_ids"]
        if not self.has_turns and not opening and self._tokenizer.eos_token_id in ids[-1:]:
            ids = ids[:-1]
        return ids or [self._tokenizer.eos_token_id or 0]

    def user_ends(self) -> list[int]:
        """Token ids that end a user turn: the first one that the template puts after it."""
        return self._tokenizer(self._after, add_special_tokens=False)["input_ids"][:1] if self.has_turns else []

    def user_text(self, opening: str, ids: Sequence[int]) -> str:
        """A user turn as text: how it begins, and the token ids that follow, up to where the template would go on."""
        start = self.user_start(opening)
        # Decoded by themselves the ids may lose the space that they begin with.
        before, whole = self._tokenizer.decode(start), self._tokenizer.decode([*start, *ids])
        rest = whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(ids)
        if self._after.strip():
            rest = rest.split(self._after.strip(), 1)[0]
        return (opening + self._without_specials(rest)).strip()

    def answer_text(self, ids: Sequence[int]) -> str:
        """What an assistant said, as text."""
        return self._without_specials(self._tokenizer.decode(ids)).strip()

    def _without_specials(self, text: str) -> str:
        for special in self._tokenizer.all_special_tokens:
            text = text.split(special, 1)[0]
        return text

    def prompt(self, user_text: str) -> list[int]:
        """Token ids after which the answer to a user turn follows."""
        if not self.has_turns:
            ids: list[int] = self._tokenizer(user_text)["input_ids"]
            return ids
        return list(self._tokenizer(self._render(user_text), add_special_tokens=False)["input_ids"])

    def _render(self, user_text: str) -> str:
        messages = [{"role": "user", "content": user_text}]
        rendered: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return rendered
