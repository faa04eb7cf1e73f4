"""Suites: where the prompts of `hf-ssd bench` come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .prompts import KINDS, Prompt, select_prompts
from .source_texts import read_source_texts

LONG = "long"
SHORT_PROMPT_TOKENS = 256  # what a long prompt is compared with
HUB_PREFIX = "hub:"
BUILT_IN_SUITES = (*KINDS, LONG)

# Fields that a row's text is taken from, the first one that it has. Of several turns the first is taken: what is asked
# next depends on the answer, which would make the arms' prompts differ.
TEXT_FIELDS = ("turns", "question", "prompt", "text")

QUESTION = "What is this code for? Explain its main parts, then write unit tests for two of its functions."


def read_suite(name: str, prompt_tokens: Sequence[int] = ()) -> tuple[Prompt, ...]:
    """The prompts of a suite.

    Args:
        name: One of `BUILT_IN_SUITES`, a JSONL file, or `"hub:"` and the name or folder of a data set, to which
            `":CONFIG"` and `"@SPLIT"` may be added.
        prompt_tokens: Lengths of the prompts of the suite `"long"`.

    Raises:
        ValueError: If there is no such suite, or a row is not a prompt. The message says which.
        OSError: If a file cannot be read.
        ImportError: If the hub's `datasets` package is needed and missing.
    """
    if name in KINDS:
        return select_prompts((name,))
    if name == LONG:
        return long_prompts(prompt_tokens)
    if name.startswith(HUB_PREFIX):
        return read_dataset(name.removeprefix(HUB_PREFIX))
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"`suite` must be one of {list(BUILT_IN_SUITES)}, a JSONL file or {HUB_PREFIX}NAME, but got {name!r}, "
            "which is no file."
        )
    return read_jsonl(path)


def read_jsonl(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file: one object per line, with one of `TEXT_FIELDS` and perhaps a `category`.

    Raises:
        ValueError: If a line is no such object; it is named by its number.
    """
    prompts = [to_prompt(row, where, path.stem) for row, where in jsonl_rows(path)]
    return _not_empty(prompts, str(path))


def read_dataset(source: str) -> tuple[Prompt, ...]:
    """The prompts of a data set, as `dataset_rows` takes it.

    Raises:
        ImportError: If the `datasets` package is not installed.
        OSError: If the data set is not found.
        ValueError: If the split is not, or a row is no prompt.
    """
    label = source.partition("@")[0].partition(":")[0].rstrip("/").rpartition("/")[2]
    return _not_empty([to_prompt(row, where, label) for row, where in dataset_rows(source)], source)


def read_rows(source: str) -> tuple[tuple[Any, str], ...]:
    """The rows of a JSONL file, or of a data set after `HUB_PREFIX`, each with what to call it in an error.

    Raises:
        ValueError: If there is no such file, or a line is no JSON.
        OSError: If a file cannot be read, or the data set is not found.
        ImportError: If the hub's `datasets` package is needed and missing.
    """
    if source.startswith(HUB_PREFIX):
        return tuple(dataset_rows(source.removeprefix(HUB_PREFIX)))
    if not Path(source).is_file():
        raise ValueError(f"`suite` must be read from a JSONL file or {HUB_PREFIX}NAME, but {source!r} is no file.")
    return tuple(jsonl_rows(Path(source)))


def jsonl_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """The objects of a JSONL file, each with what to call it in an error.

    Raises:
        ValueError: If a line is no JSON; it is named by its number.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"`suite` must hold one JSON object per line, but {where} is none: {error}.") from None
        yield row, where


def dataset_rows(source: str) -> Iterator[tuple[Any, str]]:
    """The rows of a data set on the hub or in a folder, each with what to call it in an error.

    Args:
        source: `NAME`, `NAME:CONFIG`, `NAME@SPLIT` or `NAME:CONFIG@SPLIT`. Without a split it is `test`, or the only
            one.

    Raises:
        ImportError: If the `datasets` package is not installed.
        OSError: If the data set is not found.
        ValueError: If the split is not.
    """
    try:
        from datasets import DatasetDict, load_dataset
    except ImportError:
        raise ImportError('A `suite` from the hub needs the package `datasets`: pip install "hf-ssd[bench]".') from None
    path, _, split = source.partition("@")
    name, _, config = path.partition(":")
    rows = load_dataset(name, config or None)
    assert isinstance(rows, DatasetDict)
    split = split or ("test" if "test" in rows else next(iter(rows)))
    if split not in rows:
        raise ValueError(f"`suite` must name a split among {sorted(rows)}, but got {split!r}.")
    for index, row in enumerate(rows[split]):
        yield row, f"row {index} of {source}"


def long_prompts(lengths: Sequence[int]) -> tuple[Prompt, ...]:
    """Questions about source text of Python's standard library, cut to each of some lengths in tokens.

    The lengths are the categories. All of them ask about the same modules.
    """
    return tuple(
        Prompt(f"{length} tokens", text, QUESTION, length) for text in read_source_texts() for length in lengths
    )


def to_prompt(row: Any, where: str, default_kind: str) -> Prompt:
    """A row of a suite as a prompt.

    Args:
        row: What was read.
        where: What to call the row in an error.
        default_kind: Its category, where it names none.

    Raises:
        ValueError: If it holds no text.
    """
    fields = row if isinstance(row, Mapping) else {}
    field = next((name for name in TEXT_FIELDS if name in fields), None)
    if field is None:
        found = sorted(map(str, fields)) if fields else type(row).__name__
        raise ValueError(f"`suite` must hold one of {list(TEXT_FIELDS)} in every row, but {where} has {found}.")
    value = fields[field]
    text = value[0] if field == "turns" and isinstance(value, Sequence) and value else value
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"`suite` must hold a text in `{field}`, but {where} has {value!r}.")
    return Prompt(str(fields.get("category") or default_kind), text)


def sample_evenly(prompts: Sequence[Prompt], num_prompts: int) -> tuple[Prompt, ...]:
    """Some of the prompts: as many of every category as can be, spread evenly over it, the categories in turn.

    Raises:
        ValueError: If there are not that many.
    """
    if not 1 <= num_prompts <= len(prompts):
        raise ValueError(
            f"`sample` must be between 1 and {len(prompts)}, the number of prompts of the suite, but got {num_prompts}."
        )
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    counts = dict.fromkeys(by_kind, 0)
    while sum(counts.values()) < num_prompts:
        for kind, group in by_kind.items():
            if counts[kind] < len(group) and sum(counts.values()) < num_prompts:
                counts[kind] += 1
    picked = {
        kind: [group[i * len(group) // counts[kind]] for i in range(counts[kind])] for kind, group in by_kind.items()
    }
    longest = max(counts.values())
    return tuple(group[i] for i in range(longest) for group in picked.values() if i < len(group))


def _not_empty(prompts: Iterable[Prompt], where: str) -> tuple[Prompt, ...]:
    prompts = tuple(prompts)
    if not prompts:
        raise ValueError(f"`suite` must hold at least one prompt, but {where} is empty.")
    return prompts
