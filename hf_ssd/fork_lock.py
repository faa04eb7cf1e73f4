"""A lock that a fork of the process finds free."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any


class ForkLock:
    """A lock, used as a context manager; the thread that holds it may enter it again.

    A fork has only the thread that forked. If another one held a plain lock at that time, it would stay locked
    there for ever.
    """

    def __init__(self) -> None:
        self._locks: dict[int, Any] = {}  # by process

    def __enter__(self) -> None:
        # One step of the interpreter, so that two threads get the same.
        self._locks.setdefault(os.getpid(), threading.RLock()).acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks[os.getpid()].release()
