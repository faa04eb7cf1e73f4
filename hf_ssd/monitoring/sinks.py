"""Where a monitor's events may go: the log, or a file of JSON lines. Any callable that takes an event will do."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers.utils import logging

from ..fork_lock import ForkLock
from .events import Event

logger = logging.get_logger(__name__)


def log_sink(event: Event) -> None:
    """Logs an event as one line of JSON: what somebody should look at as a warning, the rest as information."""
    (logger.warning if event.is_warning else logger.info)(json.dumps(event.to_dict()))


class JsonlSink:
    """Appends each event to a file, as one line of JSON that is there at once.

    Args:
        path: The file; made, with its folder, where there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = ForkLock()

    def __call__(self, event: Event) -> None:
        # Opened each time, so that log rotation works and nothing is left open.
        line = (json.dumps(event.to_dict()) + "\n").encode()
        with self._lock:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line)  # in one go: other processes may append too
            finally:
                os.close(descriptor)

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"
