"""Files with one JSON object per line, to which runs append that may be killed at any time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that were written to their end. A last one that was not is cut off the file.

    It is cut when all others were taken. Who refuses one of them, as the file is something else, leaves it as it is.

    Args:
        path: The file; if there is none, it has no lines.

    Raises:
        OSError: If it cannot be read, or not be cut.
    """
    if not path.exists():
        return
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    yield from whole.splitlines()
    if torn:
        logger.info(f"Dropping an unfinished line at the end of {path}.")
        os.truncate(path, len(whole) + len(newline))
