"""docs/faults.md names tests that exist, for every fault that is listed."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "::" in line
]
TESTS = sorted({test for row in ROWS for test in re.findall(r"`(tests/[^`]+)`", row[-1])})
# Those that the table was made from.
SOURCES = """
HF 32867, HF 47932, HF 28508, NeMo Automodel 3627, MTPLX 82, vllm-ascend 7807, lucebox 374, VL 6038, VL 13196,
TensorRT-LLM 19487, HF 30042, HF 30413, HF 39421, mlx-lm 1109, HF 48280, HF 46629, HF 30312, HF 46741, mlxcel 994,
SG 8726, VL 26498, nano-PEARL 4, HF 48981, HF 46790, HF 46993, EAGLE 75, SG 26330, VL 22987, HF 40739, mlx-lm 1297,
HF 28759, HF 45307, HF 46936, VL 57941, HF 22576, ssd-macos, the SSD reference engine
"""


@cache
def named_in(path: str) -> frozenset[str]:
    """The tests of a file, as pytest names them."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return frozenset(name for name in found if name.split("::")[-1].startswith("test_"))


@pytest.mark.parametrize("test", TESTS)
def test_the_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).is_file(), path
    assert name in named_in(path)


def test_every_fault_has_a_row_and_every_row_a_test() -> None:
    sources = [source.strip() for row in ROWS for source in row[1].split(",")]
    assert sorted(sources) == sorted(source.strip() for source in SOURCES.replace("\n", " ").split(","))
    assert all(re.findall(r"`tests/[^`]+::[^`]+`", row[2]) for row in ROWS)
    assert all(len(row) == 3 for row in ROWS)
