"""What `--data` names: prompts for the target to answer, documents to read, or text that it writes by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bench.prompts import Prompt
from ..bench.suites import HUB_PREFIX, read_dataset, read_jsonl, sample_evenly
from .settings import SELF


@dataclass(frozen=True)
class Sources:
    """What there is to learn from.

    Args:
        writes_own: Whether the target writes both sides of conversations.
        prompts: User turns that it answers, each once.
        documents: Text files that are read as they are.
    """

    writes_own: bool
    prompts: tuple[str, ...]
    documents: tuple[Path, ...]

    @property
    def needs_writing(self) -> bool:
        return self.writes_own or bool(self.prompts)


@dataclass(frozen=True)
class HeldOut:
    """Prompts that an assistant does not learn from.

    Args:
        asked: Those to measure on, category by category.
        all: Those and the others of the same file.
    """

    asked: tuple[str, ...]
    all: frozenset[str]

    def __contains__(self, prompt: object) -> bool:
        return isinstance(prompt, str) and prompt.strip() in self.all

    @property
    def mark(self) -> str:
        """What these prompts are known by."""
        return digest("\0".join([*self.asked, *sorted(self.all)]))


def digest(text: str) -> str:
    """What a prompt is known by in the file of texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_held_out(source: str, most: int) -> HeldOut:
    """The prompts to measure on, and those to leave out of training.

    Args:
        source: JSONL file, or `"hub:"` and a data set.
        most: How many prompts to measure on; of more, as many of every category as can be are taken.

    Raises:
        ValueError: If there is no such file, or a row is no prompt.
        OSError: If a file cannot be read.
    """
    if not source.startswith(HUB_PREFIX) and not Path(source).is_file():
        raise ValueError(f"`held_out` must be a JSONL file or {HUB_PREFIX}NAME, but there is no file {source!r}.")
    prompts = read_prompts(source)
    # By category: what is then taken of them at even distances is of all categories.
    asked = sorted(sample_evenly(prompts, min(most, len(prompts))), key=lambda prompt: prompt.kind)
    return HeldOut(
        tuple(dict.fromkeys(prompt.text for prompt in asked)), frozenset(prompt.text.strip() for prompt in prompts)
    )


def read_prompts(source: str) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file, or of a data set after `HUB_PREFIX`."""
    return read_dataset(source.removeprefix(HUB_PREFIX)) if source.startswith(HUB_PREFIX) else read_jsonl(Path(source))


def read_sources(data: Sequence[str]) -> Sources:
    """Reads the prompts and finds the documents.

    Args:
        data: `"self"`, files and folders, or `"hub:"` and a data set. JSONL files and data sets hold prompts, in one of
            the fields that a suite of `hf-ssd bench` may have; other files are documents, and of a folder all below it.

    Raises:
        ValueError: If a file is not there, or a row is no prompt.
        OSError: If a file cannot be read.
    """
    prompts: list[str] = []
    documents: list[Path] = []
    for name in data:
        path = Path(name)
        if name == SELF:
            continue
        if name.startswith(HUB_PREFIX) or (path.suffix == ".jsonl" and path.is_file()):
            prompts += [prompt.text for prompt in read_prompts(name)]
        elif path.is_file():
            documents.append(path)
        elif path.is_dir():
            documents += sorted(each for each in path.rglob("*") if each.is_file() and each.suffix != ".jsonl")
        else:
            raise ValueError(
                f"`data` must be {SELF!r}, files, folders or {HUB_PREFIX}NAME, but got {name!r}, which is none of them."
            )
    return Sources(SELF in data, tuple(dict.fromkeys(prompts)), tuple(documents))
