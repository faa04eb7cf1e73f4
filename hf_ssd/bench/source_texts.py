"""Long texts that every machine has: source files of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

# Single files of every supported Python, well over 4,096 tokens each.
MODULES = ("argparse", "tarfile", "difflib", "subprocess", "optparse", "mailbox", "doctest", "pickle")


def read_source_texts(modules: Sequence[str] = MODULES) -> tuple[str, ...]:
    """One text per module: its source, followed by the others' so that no length is out of reach.

    Raises:
        OSError: If this Python comes without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [(folder / f"{module}.py").read_text(encoding="utf-8") for module in modules]
    return tuple("\n\n".join([*sources[i:], *sources[:i]]) for i in range(len(sources)))
