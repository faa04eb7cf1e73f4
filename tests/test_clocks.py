"""Durations and time-outs go by a clock that nobody sets: the system's may jump."""

from __future__ import annotations

import ast
from pathlib import Path

import hf_ssd

PACKAGE = Path(hf_ssd.__file__).parent
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "date.today"}
# When something happened, for people.
STAMPS = {"monitoring/events.py"}


def wall_clocks_in(source: str) -> list[str]:
    names = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return [name for name in names if name in WALL_CLOCKS]


def test_no_duration_is_measured_by_the_systems_clock() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        assert name in STAMPS or not wall_clocks_in(path.read_text()), name


def test_a_clock_is_found() -> None:
    assert wall_clocks_in("import time\nstart = time.time()\nend = time.monotonic()") == ["time.time"]
