"""The speculation cache: what has been prepared for which verification outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .types import Miss, Outcome


class Prepared(Protocol):
    """Something prepared for an outcome: `depth` draft tokens so far."""

    @property
    def depth(self) -> int: ...


T = TypeVar("T", bound=Prepared)


@dataclass(frozen=True)
class Hit(Generic[T]):
    """The outcome had been prepared for."""

    entry: T


class SpeculationCache(Generic[T]):
    """Maps outcomes to what was prepared for them. It lives for one round."""

    def __init__(self) -> None:
        self._entries: dict[Outcome, T] = {}

    def add(self, outcome: Outcome, entry: T) -> None:
        """Registers what is being prepared for `outcome`."""
        self._entries[outcome] = entry

    def lookup(self, outcome: Outcome) -> Hit[T] | Miss:
        """What was prepared for `outcome`, or why there is nothing."""
        entry = self._entries.get(outcome)
        if entry is not None:
            return Hit(entry) if entry.depth else Miss.UNFINISHED
        if not self._entries:
            return Miss.COLD
        lengths = {known.num_accepted for known in self._entries}
        return Miss.TOKEN if outcome.num_accepted in lengths else Miss.LENGTH

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries.values())
