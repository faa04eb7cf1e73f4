"""What the commands share: how options are read, and how errors are shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

Number = TypeVar("Number", int, float)


@contextmanager
def errors() -> Iterator[None]:
    """Shows what a user can mend as one line on standard error, and leaves with status 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


def split(text: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def number_or(name: str, text: str, words: dict[str, Any]) -> Any:
    """A whole number, or what one of the words stands for."""
    if text in words:
        return words[text]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` must be a whole number or one of {sorted(words)}, but got {text!r}.") from None


def numbers(name: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    """The numbers of a list with commas."""
    try:
        return tuple(kind(part) for part in split(text))
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"`{name}` must be {word} with commas between them, but got {text!r}.") from None
