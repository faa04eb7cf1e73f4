"""A file of finished work: what is in it need not be done again after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..jsonl import whole_lines


def key_of(**settings: Any) -> str:
    """A name for all that a result depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


class RecordFile:
    """Finished records by key, one JSON object per line, each written at once. A context manager.

    A last line that was being written when the run ended is dropped. Records of other settings have other keys; they
    stay and are not read.

    Args:
        path: The file; `None` keeps records in memory only.

    Raises:
        OSError: If the file cannot be read or written.
        ValueError: If it holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._file = None
        if path is None:
            return
        self._read(path)
        self._file = path.open("a", encoding="utf-8")

    def _read(self, path: Path) -> None:
        for number, line in enumerate(whole_lines(path), start=1):
            try:
                record = json.loads(line)
                self._records[record["key"]] = record
            except (KeyError, RecursionError, TypeError, ValueError):
                raise ValueError(
                    f"`out` must hold records of an earlier run, but line {number} of {path} is none. Take another "
                    "folder, or delete the file."
                ) from None

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._records[key]

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Keeps a record, on the disk before this returns."""
        self._records[key] = {"key": key, **record}
        if self._file is not None:
            self._file.write(json.dumps(self._records[key]) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
