"""What the page runs is what any user of the library could run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_ssd

DEMO = Path(hf_ssd.__file__).parent.parent / "demo"
FILES = sorted(DEMO.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_demo_takes_only_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("hf_ssd.") for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_ssd":
            assert node.module == "hf_ssd", ast.unparse(node)
            assert {alias.name for alias in node.names} <= set(hf_ssd.__all__), ast.unparse(node)


def test_the_demo_is_found():
    assert DEMO / "app.py" in FILES
