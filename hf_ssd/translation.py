"""An assistant with another tokenizer: which of its tokens are the target's too, and how it reads other text."""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from tokenizers import Tokenizer

from .token_bytes import special_tokens, token_bytes
from .vocabulary import MIN_SHARED_SHARE, UnsupportedError, VocabularyMismatchError, are_alike

# Before text that a tokenizer would otherwise take for the beginning of a line, and put a space before.
_ANCHOR = "\n"


@dataclass(eq=False)
class Translation:
    """Between the token ids of a target and those of an assistant with another tokenizer.

    Tokens that stand for the same bytes of text are *shared*. Drafts are made of these alone, so each draft token is
    one token on either side. Everything else, such as the prompt, is encoded anew.

    Args:
        shared: For each token id of the target that of the assistant's token for the same, `-1` where there is none.
        drafted: For each token id of the assistant that of the target, `-1` where it has none. At most one of the
            assistant's tokens leads to each.
        texts: For each token id of the target what it adds to a text, a special token's own name included. Ids that
            stand for nothing have no bytes.
        words: Those of the target's token ids that are ordinary text.
        prefix: What the assistant's tokenizer puts before any text.
        encode_text: The assistant's tokenizer, from text to token ids without special ones.
        assistant_texts: As `texts`, for the assistant's ordinary tokens.
    """

    shared: torch.Tensor
    drafted: torch.Tensor
    texts: list[bytes]
    words: frozenset[int]
    prefix: tuple[int, ...]
    encode_text: Callable[[str], list[int]]
    assistant_texts: dict[int, bytes]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._shared_list = self.shared.tolist()
        self._by_bytes = {data: index for index, data in self.assistant_texts.items() if data}
        self._longest = max(map(len, self._by_bytes), default=0)

    @property
    def num_shared(self) -> int:
        """Number of shared tokens."""
        return int((self.drafted >= 0).sum())

    def token(self, token: int) -> int | None:
        """The assistant's token for one of the target's, if that is shared."""
        index = self._shared_list[token] if token < len(self._shared_list) else -1
        return None if index < 0 else index

    def text(self, token: int) -> bytes:
        """What one of the target's tokens adds to a text."""
        return self.texts[token] if token < len(self.texts) else b""

    def encode_prompt(self, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """The assistant's token ids for a prompt of the target: text is encoded anew, special tokens are translated.

        Returns:
            Token ids, and what is left where the prompt ends within a character.
        """
        ids: list[int] = []
        rest = b""
        for is_text, group in groupby(tokens, key=self.words.__contains__):
            if is_text:
                data, rest = split_characters(b"".join(map(self.text, group)))
                ids += self._encode_run(data, is_first=not ids)
                continue
            rest = b""  # of a character that is never completed
            for token in group:
                shared = self.token(token)
                ids += self._encode_run(self.text(token), is_first=not ids) if shared is None else [shared]
        has_prefix = ids[: len(self.prefix)] == [*self.prefix]
        return ids if has_prefix else [*self.prefix, *ids], rest

    def encode(self, data: bytes) -> list[int]:
        """The assistant's token ids for text in the middle of a row. They stand for just these bytes if any do."""
        text = data.decode(errors="replace")
        candidates = [text, *([text[1:]] if text[:1] == " " else []), _ANCHOR + text]
        encoded = [self.encode_text(candidate) for candidate in candidates]
        for ids in encoded:
            exact = self._ending(ids, data)
            if exact is not None:
                return exact
        by_bytes = self.encode_bytes(data)
        return encoded[0] if by_bytes is None else by_bytes

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """The same for part of a character: the longest tokens first. `None` if the assistant has no such tokens."""
        ids = []
        while data:
            lengths = range(min(self._longest, len(data)), 0, -1)
            length = next((length for length in lengths if data[:length] in self._by_bytes), None)
            if length is None:
                return None
            ids.append(self._by_bytes[data[:length]])
            data = data[length:]
        return ids

    def _encode_run(self, data: bytes, *, is_first: bool) -> list[int]:
        # A tokenizer that begins texts with a space shows it in its tokens; the assistant's puts it back if it does.
        text = data.decode(errors="replace")
        return self.encode_text(text.removeprefix(" ") if is_first else text) if text else []

    def _ending(self, ids: Sequence[int], data: bytes) -> list[int] | None:
        """The last ones of `ids` that stand for just these bytes, if any do."""
        found = b""
        for count, index in enumerate(reversed(ids), 1):
            found = self.assistant_texts.get(index, b"") + found
            if len(found) >= len(data):
                return [*ids[-count:]] if found == data else None
        return None


class TextEncoder:
    """A tokenizer's way from text to token ids, special ones left out. It can be pickled.

    Args:
        tokenizer: As transformers has it. What is set on it later, such as truncation, has no effect.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._fast: Tokenizer | None = None if backend is None else Tokenizer.from_str(backend.to_str())
        self._slow = copy.deepcopy(tokenizer) if backend is None else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    def __call__(self, text: str) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._slow.encode(text, add_special_tokens=False))  # type: ignore[union-attr]


def split_characters(data: bytes) -> tuple[bytes, bytes]:
    r"""Text in UTF-8, and after it what is only the beginning of a character. What is no text stays with the text.

    ```python
    >>> split_characters("a é".encode()[:-1])
    (b'a ', b'\xc3')

    ```
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return data[: error.start], data[error.start :]
    return data, b""


_Made = dict[tuple[int, int, int, int], Translation | None]
_TRANSLATIONS: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, _Made]] = weakref.WeakKeyDictionary()


def translation_between(
    tokenizer: Any, assistant_tokenizer: Any, target_vocab_size: int, assistant_vocab_size: int
) -> Translation | None:
    """What an assistant with another tokenizer needs. Made once for each pair of tokenizers.

    Args:
        tokenizer: The target's.
        assistant_tokenizer: The assistant's.
        target_vocab_size: Number of token ids that the target knows, padding included.
        assistant_vocab_size: The same of the assistant.

    Returns:
        The translation, or `None` if the two vocabularies are the same, up to padding.

    Raises:
        VocabularyMismatchError: If too few tokens are shared.
    """
    made = _TRANSLATIONS.setdefault(tokenizer, weakref.WeakKeyDictionary()).setdefault(assistant_tokenizer, {})
    # Tokens may be added to a tokenizer.
    key = (len(tokenizer), len(assistant_tokenizer), target_vocab_size, assistant_vocab_size)
    if key not in made:
        sizes = (target_vocab_size, assistant_vocab_size)
        is_same = are_alike(tokenizer.get_vocab(), assistant_tokenizer.get_vocab(), *sizes)
        made[key] = None if is_same else _make(tokenizer, assistant_tokenizer, *sizes)
    return made[key]


def _make(tokenizer: Any, assistant_tokenizer: Any, target_size: int, assistant_size: int) -> Translation:
    words, assistant_words = token_bytes(tokenizer), token_bytes(assistant_tokenizer)
    specials, shared_specials = special_tokens(tokenizer), _shared_specials(tokenizer, assistant_tokenizer)
    texts = [b""] * target_size
    for index, data in (*words.items(), *((index, token.encode()) for token, index in specials.items())):
        if index < target_size:
            texts[index] = data
    for index in {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id} - {None}:
        if index < target_size:
            texts[index] = b""  # no text; its name would be read as such

    shared, drafted = torch.full((target_size,), -1), torch.full((assistant_size,), -1)
    by_bytes = {data: index for index, data in assistant_words.items() if data and index < assistant_size}
    # Where several ids stand for the same, drafts have the last: those of single bytes come first.
    own_ids = {data: index for index, data in words.items() if data and index < target_size}
    pairs = [(index, by_bytes[data]) for index, data in words.items() if data in by_bytes and index < target_size]
    pairs += [each for each in shared_specials if each[0] < target_size and each[1] < assistant_size]
    for index, assistant_index in pairs:
        shared[index] = assistant_index
        if own_ids.get(words.get(index, b""), index) == index:
            drafted[assistant_index] = index
    translation = Translation(
        shared=shared,
        drafted=drafted,
        texts=texts,
        words=frozenset(words),
        prefix=_prefix(assistant_tokenizer),
        encode_text=TextEncoder(assistant_tokenizer),
        assistant_texts=assistant_words,
    )
    smaller = min(len(words), len(assistant_words))
    if translation.num_shared < MIN_SHARED_SHARE * smaller:
        raise VocabularyMismatchError(
            f"`assistant_tokenizer` must share at least {MIN_SHARED_SHARE:.0%} of the smaller vocabulary with "
            f"`tokenizer`, but only {translation.num_shared} of {smaller} tokens are the same. Choose an assistant "
            "whose tokenizer is more like the target's."
        )
    return translation


def _shared_specials(tokenizer: Any, assistant_tokenizer: Any) -> list[tuple[int, int]]:
    """Special tokens of the same name, and those that end and begin a text."""
    of_target, of_assistant = special_tokens(tokenizer), special_tokens(assistant_tokenizer)
    pairs = {of_target[token]: of_assistant[token] for token in of_target.keys() & of_assistant.keys()}
    for name in ("eos_token_id", "bos_token_id"):
        index, assistant_index = getattr(tokenizer, name), getattr(assistant_tokenizer, name)
        is_new = index not in pairs and assistant_index not in pairs.values()
        if index is not None and assistant_index is not None and is_new:
            pairs[index] = assistant_index
    return sorted(pairs.items())


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens that a tokenizer puts before a text."""
    special = set(special_tokens(tokenizer).values())
    ids = tokenizer("a")["input_ids"]
    first = next((place for place, index in enumerate(ids) if index not in special), len(ids))
    return tuple(ids[:first])


def check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Refuses what is not a pair of tokenizers.

    Raises:
        UnsupportedError: If one is missing, or has no vocabulary.
    """
    for name, given in (("tokenizer", tokenizer), ("assistant_tokenizer", assistant_tokenizer)):
        if not hasattr(given, "get_vocab"):
            raise UnsupportedError(
                f"`{name}` must be a tokenizer, but got {given!r}. An assistant with another tokenizer needs both, "
                "`tokenizer` (the target's) and `assistant_tokenizer`."
            )
