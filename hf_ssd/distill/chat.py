"""A chat template, taken apart: what comes before a user turn, what ends it, and what asks for an answer."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..bench.encoding import PLACEHOLDER

# How about half of the user turns begin, so that more than small talk is asked for. The target goes on from there.
OPENINGS = (
    "Summarize the following text in a few sentences.\n\n",
    "Translate the following sentence into English: ",
    "Write a Python function that ",
    "Read the passage and answer the question.\n\nPassage: ",
    "Solve this problem step by step: ",
    "Rewrite the following text so that it is easier to read:\n\n",
    "Write an email to ",
    "Extract all names and dates from the following text:\n\n",
    "What is the difference between ",
    "Imagine you are ",
    "Explain how ",
    "Fix the mistakes in this code:\n\n```python\n",
    "Which of the following ",
    "Give me a list of ",
    "Write a short story about ",
    "Who ",
)


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

    def user_start(self, opening: str = "") -> list[int]:
        """Token ids of all that comes before a user turn, and of how it begins; of a text, without a template."""
        ids: list[int] = self._tokenizer(self._before + opening, add_special_tokens=not self.has_turns)["input_ids"]
        if not self.has_turns and not opening and self._tokenizer.eos_token_id in ids[-1:]:
            ids = ids[:-1]
        return ids or [self._tokenizer.eos_token_id or 0]

    def user_ends(self) -> list[int]:
        """Token ids that end a user turn: the first one that the template puts after it."""
        return self._tokenizer(self._after, add_special_tokens=False)["input_ids"][:1] if self.has_turns else []

    def user_text(self, ids: Sequence[int]) -> str:
        """A user turn as text, up to where the template would go on."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        for special in self._tokenizer.all_special_tokens:
            text = text.split(special, 1)[0]
        return text.split(self._after.strip(), 1)[0].strip() if self._after.strip() else text.strip()

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
