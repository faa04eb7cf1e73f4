"""Files with one JSON object per line, to which runs append that may be killed at any time."""

from __future__ import annotations

import os
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that were written to their end; a last one that was not is cut off the file.

    Args:
        path: The file; if there is none, it has no lines.

    Raises:
        OSError: If it cannot be read, or not be cut.
    """
    if not path.exists():
        return []
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        logger.info(f"Dropping an unfinished line at the end of {path}.")
        os.truncate(path, len(whole) + len(newline))
    return whole.splitlines()
