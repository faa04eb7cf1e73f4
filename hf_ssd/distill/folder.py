"""The folder of a distillation: the assistant, and below `work/` what the stages leave for the next run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .settings import KINDS, DistillSettings

HELD_OUT = "held_out"  # in the settings that a folder is bound to


class WorkFolder:
    """Where a distillation keeps what it would not like to do again.

    Args:
        out: The folder that the user named.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out / "work"
        self.texts = self.work / "texts.jsonl"
        self.held_out = self.work / "held_out.jsonl"
        self.cache = self.work / "cache"
        self.checkpoints = self.work / "checkpoints"
        self.log = self.work / "log.jsonl"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs out.

        Raises:
            ValueError: If another run holds the folder.
        """
        from filelock import FileLock, Timeout

        self.cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.work / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"`out` must be a folder that no other run uses, but {str(self.out)!r} is in use. Wait for that run, "
                "or name another folder."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def bind(self, settings: DistillSettings, held_out: str | None = None) -> None:
        """Notes what the folder is for, or checks that it is for that.

        Args:
            settings: What is wanted.
            held_out: What the prompts to measure on are known by. With others, some of those that were learnt from
                would be measured on.

        Raises:
            ValueError: If it was begun with other settings.
        """
        path = self.work / "settings.json"
        wanted = {**settings.fixed(), HELD_OUT: held_out}
        if not path.is_file():
            write_json(path, wanted)
            return
        begun = {"kind": KINDS[0], HELD_OUT: None, **json.loads(path.read_text())}
        if begun.pop(HELD_OUT) != held_out:
            raise ValueError(
                f"`held_out` must give the prompts that {str(self.out)!r} was begun with, or stay away if it was begun "
                f"without, but got {settings.held_out!r}: what is measured on may have been learnt from. Name another "
                "folder."
            )
        for name, value in begun.items():
            if wanted.get(name) != value:
                raise ValueError(
                    f"`{name}` must stay what {str(self.out)!r} was begun with, {value!r}, but got "
                    f"{wanted.get(name)!r}. Name another folder."
                )

    def seconds(self, stage: str) -> float:
        """Time that a stage took so far, over all runs."""
        return float(self._clock().get(stage, 0.0))

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Adds to that time."""
        write_json(self.work / "clock.json", {**self._clock(), stage: self.seconds(stage) + seconds})

    def note(self, entry: dict[str, Any]) -> None:
        """Appends a line to the log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _clock(self) -> dict[str, float]:
        path = self.work / "clock.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is never seen half-written."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2), encoding="utf-8")
    os.replace(partial, path)
