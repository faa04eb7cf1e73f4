"""Texts as a data set: token ids, and from where on they are to be learnt."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from datasets import Dataset

# Of so many texts one is kept from training, and no more of a part than that.
HELD_OUT_SHARE = 40
MAX_HELD_OUT = 64


def written_texts(path: Path, cache: Path) -> Dataset:
    """The texts of a JSONL file that the target wrote, in order."""
    from datasets import Dataset, Features, List, Value

    features = Features(
        {"source": Value("string"), "num_prompt_tokens": Value("int64"), "input_ids": List(Value("int64"))}
    )
    shutil.rmtree(cache / "json", ignore_errors=True)  # of the same file, when it was shorter
    texts = Dataset.from_json(str(path), cache_dir=str(cache), features=features)
    return texts.select_columns(["input_ids", "num_prompt_tokens"])


def document_texts(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, max_length: int, cache: Path) -> Dataset:
    """Documents, cut into pieces of `max_length` tokens, of which all but the first are learnt."""
    from datasets import Dataset, Features, List, Value

    def cut(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        pieces = []
        for text in batch["text"]:
            ids = tokenizer(text)["input_ids"]
            pieces += [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        return {"input_ids": pieces, "num_prompt_tokens": [1] * len(pieces)}

    documents = Dataset.from_dict({"text": [path.read_text(encoding="utf-8", errors="replace") for path in paths]})
    mark = documents_mark(documents["text"], max_length)
    return documents.map(
        cut,
        batched=True,
        batch_size=16,
        remove_columns=["text"],
        features=Features({"input_ids": List(Value("int64")), "num_prompt_tokens": Value("int64")}),
        cache_file_name=str(cache / f"documents-{mark}.arrow"),
        new_fingerprint=mark,
    )


def documents_mark(texts: Sequence[str], max_length: int) -> str:
    """What a set of documents, cut to a length, is known by in the cache."""
    mark = hashlib.sha256(str(max_length).encode())
    for text in texts:
        mark.update(hashlib.sha256(text.encode(errors="replace")).digest())
    return mark.hexdigest()[:16]


def plain_texts(texts: Dataset) -> Iterator[tuple[list[int], int]]:
    """Token ids of each text, and how many of them are its prompt."""
    columns = texts.select_columns(["input_ids", "num_prompt_tokens"]).with_format(None)
    for batch in columns.iter(batch_size=256):
        yield from zip(batch["input_ids"], batch["num_prompt_tokens"], strict=True)


def num_positions(texts: Dataset) -> int:
    """How many tokens of the texts are to be learnt."""
    return sum(len(ids) - start for ids, start in plain_texts(texts))


def split_held_out(parts: Sequence[Dataset]) -> tuple[Dataset, Dataset]:
    """The texts to train on, and those that tell how good the assistant has become.

    A text stays on its side when more are added after it in its part.

    Args:
        parts: Texts of several origins, some of each of which are held out.

    Raises:
        ValueError: If there are not at least two.
    """
    from datasets import concatenate_datasets

    held_out = [part.select(range(0, len(part), HELD_OUT_SHARE)[:MAX_HELD_OUT]) for part in parts]
    train = [
        part.select([i for i in range(len(part)) if i % HELD_OUT_SHARE or i >= HELD_OUT_SHARE * MAX_HELD_OUT])
        for part in parts
    ]
    if not sum(map(len, train)):
        raise ValueError(
            f"`data` must give at least 2 texts, but gave {sum(map(len, held_out))}. Name more, or give more minutes."
        )
    return concatenate_datasets(train), concatenate_datasets(held_out)


def frequent_tokens(texts: Dataset, size: int) -> list[int]:
    """The token ids that the target says most often, most frequent first."""
    counts: Counter[int] = Counter()
    for ids, start in plain_texts(texts):
        counts.update(ids[start:])
    return [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]]
