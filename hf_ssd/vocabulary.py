"""Whether a target and an assistant speak the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Checkpoints of one family pad their embeddings to different multiples: a longer vocabulary may be the same one.
MAX_PADDING_DIFFERENCE = 1024
MIN_SIZE_RATIO = 0.9

# A few ids that stand for different tokens (special tokens that a release renamed) only cost acceptance there.
MAX_DIFFERING_SHARE = 0.01

# Drafts are made of the tokens that two tokenizers share. With fewer than this, of the smaller one, they are poor.
MIN_SHARED_SHARE = 0.1

_REMEDY = (
    "Pass both tokenizers, `tokenizer` (the target's) and `assistant_tokenizer`, to translate between the two, or "
    "choose an assistant of the target's own family."
)


class UnsupportedError(ValueError):
    """A model, a pair or an argument that cannot be decoded speculatively."""


class VocabularyMismatchError(UnsupportedError):
    """The assistant's token ids do not mean what the target's do."""


def placeholder_tokens(config: Any) -> frozenset[int]:
    """Token ids in whose place a multimodal model reads parts of images, videos or sounds."""
    names = (f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index"))
    ids = (getattr(config, name, None) for name in names)
    return frozenset(each for each in ids if isinstance(each, int))


def same_vocab_size(target_vocab_size: int, assistant_vocab_size: int) -> bool:
    """Whether two vocabulary sizes differ by no more than padding does.

    ```python
    >>> same_vocab_size(151936, 152064), same_vocab_size(151936, 32000), same_vocab_size(64, 32)
    (True, False, False)

    ```
    """
    small, large = sorted((target_vocab_size, assistant_vocab_size))
    return large - small <= MAX_PADDING_DIFFERENCE and small >= MIN_SIZE_RATIO * large


def check_vocab_sizes(target_vocab_size: int, assistant_vocab_size: int, *, assistant: str = "the assistant") -> None:
    """Refuses an assistant whose vocabulary differs in size by more than padding.

    Args:
        target_vocab_size: Number of token ids that the target knows, padding included.
        assistant_vocab_size: The same of the assistant.
        assistant: What to call the assistant in the message.

    Raises:
        VocabularyMismatchError: If the sizes show two vocabularies.
    """
    if not same_vocab_size(target_vocab_size, assistant_vocab_size):
        raise VocabularyMismatchError(
            f"`assistant_model` must share the target's vocabulary, but {assistant} knows {assistant_vocab_size} "
            f"tokens and the target {target_vocab_size}: more than padding explains, which is at most "
            f"{MAX_PADDING_DIFFERENCE}. {_REMEDY}"
        )


def are_alike(
    target_vocab: Mapping[str, int],
    assistant_vocab: Mapping[str, int],
    target_vocab_size: int,
    assistant_vocab_size: int,
) -> bool:
    """Whether two models speak one vocabulary, up to padding: nothing has to be translated.

    Args:
        target_vocab: Token to id, as a tokenizer's `get_vocab()` gives it.
        assistant_vocab: The same of the assistant.
        target_vocab_size: Number of token ids that the target knows, padding included.
        assistant_vocab_size: The same of the assistant.
    """
    try:
        check_vocab_sizes(target_vocab_size, assistant_vocab_size)
        check_vocabularies(target_vocab, assistant_vocab)
    except VocabularyMismatchError:
        return False
    return True


def check_vocabularies(
    target_vocab: Mapping[str, int], assistant_vocab: Mapping[str, int], *, assistant: str = "the assistant"
) -> None:
    """Refuses an assistant whose token ids stand for other tokens. Ids that only one side has are padding.

    Args:
        target_vocab: Token to id, as a tokenizer's `get_vocab()` gives it.
        assistant_vocab: The same of the assistant.
        assistant: What to call the assistant in the message.

    Raises:
        VocabularyMismatchError: If more than one in a hundred of the common ids stand for different tokens.
    """
    target_tokens = {index: token for token, index in target_vocab.items()}
    assistant_tokens = {index: token for token, index in assistant_vocab.items()}
    common = sorted(target_tokens.keys() & assistant_tokens.keys())
    differing = [index for index in common if target_tokens[index] != assistant_tokens[index]]
    if common and len(differing) <= MAX_DIFFERING_SHARE * len(common):
        return
    first = differing[0] if differing else None
    example = (
        "" if first is None else f" (id {first} is {target_tokens[first]!r} there and {assistant_tokens[first]!r} here)"
    )
    raise VocabularyMismatchError(
        f"`assistant_model` must share the target's vocabulary, but {len(differing)} of the {len(common)} token ids in "
        f"common stand for another token in {assistant}{example}. {_REMEDY}"
    )
