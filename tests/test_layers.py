"""Direct imports within `hf_ssd` only run to a smaller layer (DESIGN.md, section 2)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_ssd

PACKAGE = Path(hf_ssd.__file__).parent

# By module or by folder. This differs from DESIGN.md: `load_pair` ends in `enable_ssd`, so `pairs` is above
# `generation` and what is above `pairs` moved up with it; the part of it that knows no generation is `embedded`.
LAYERS = {
    "fork_lock": 0,
    "types": 0,
    "version": 0,
    "config": 1,
    "compat": 1,
    "decoders": 1,
    "jsonl": 1,
    "noise": 1,
    "sampling": 1,
    "streaming": 1,
    "theory": 1,
    "token_bytes": 1,
    "vocabulary": 1,
    "eagle3": 2,
    "wrappers": 2,
    "kv_cache": 2,
    "translation": 2,
    "tree_attention": 2,
    "target_trees": 3,
    "verification": 2,
    "metrics": 2,
    "planning": 3,
    "protocol": 3,
    "recorder": 3,
    "drafting": 4,
    "encoder_inputs": 4,
    "row": 4,
    "decoding": 5,
    "batch_decoding": 5,
    "runtime": 5,
    "checks": 5,
    "embedded": 6,
    "trace": 6,
    "monitoring": 6,
    "monitor": 6,
    "call_arguments": 6,
    "orchestration": 6,
    "generation": 7,
    "pairs": 8,
    "bench": 9,
    "distill": 10,
    "matrix": 9,
    "chaos": 10,
    "doctor": 10,
    "evaluation": 10,
    "cli": 11,
    "": 12,  # hf_ssd itself, the public API
}

# Also forbidden, though the numbers would allow it.
APART = {("decoding", "drafting"), ("decoding", "runtime")}


def unit_of(module: str) -> str:
    """The part of `hf_ssd` that a dotted name inside it belongs to."""
    return module.split(".")[0]


def imports_of(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Units that a module imports, also inside functions, but not those for type checkers only."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    parts = ["hf_ssd", *filter(None, module.split("."))]
    package = parts if is_package else parts[:-1]
    units = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            # `from . import pairs` names a module; `from .pairs import Pair` does not.
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin == "hf_ssd" else [origin]
        else:
            continue
        for name in names:
            if name == "hf_ssd" or name.startswith("hf_ssd."):
                unit = unit_of(name.removeprefix("hf_ssd").lstrip("."))
                units.add(unit if unit in LAYERS else "")
    return units


def sources() -> list[Path]:
    # What is in custom_generate is a model folder that transformers runs from outside: it uses the public API.
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("custom_generate", "data")
    )


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_run_downwards(path: Path):
    module = module_of(path)
    unit = unit_of(module)
    assert unit in LAYERS, f"{module} has no layer yet: give it one in this test and in the documentation"
    for imported in imports_of(path.read_text(), module, is_package=path.name == "__init__.py"):
        if imported == unit and (PACKAGE / unit).is_dir():
            continue  # files of one folder may use each other
        assert LAYERS[imported] < LAYERS[unit], (
            f"{module} ({LAYERS[unit]}) imports {imported or 'hf_ssd'} ({LAYERS[imported]})"
        )
        assert (unit, imported) not in APART, f"{module} must not know {imported}"


def test_no_import_is_missed():
    source = """
import hf_ssd.config
from . import pairs, __version__
from ..types import Outcome
from hf_ssd.runtime.placement import CPU
if TYPE_CHECKING:
    from ..generation import enable_ssd
def f():
    from .engine import DraftEngine
"""
    assert imports_of(source.replace("from . import", "from .. import"), "drafting.backup") == {
        "config", "pairs", "", "types", "runtime", "drafting",
    }  # fmt: skip
    assert imports_of("from .types import Outcome", "", is_package=True) == {"types"}


@pytest.mark.parametrize(
    "unit",
    [
        "types",
        "config",
        "sampling",
        "theory",
        "kv_cache",
        "verification",
        "metrics",
        "planning",
        "protocol",
    ],
)
def test_layers_up_to_three_know_no_process_and_no_logger(unit: str):
    paths = [path for path in sources() if unit_of(module_of(path)) == unit]
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            forbidden = [
                name for name in names if {"logging", "multiprocessing", "subprocess", "socket"} & set(name.split("."))
            ]
            assert not forbidden, f"{path.name} imports {forbidden}"
