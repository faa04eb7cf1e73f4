"""Programs without a file: notebook kernels, `exec`, and interactive sessions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# A kernel as ipykernel is one: no file, no standard input, output that is no file, cells run by exec in a running loop.
KERNEL = """
import asyncio, io, sys, warnings
main = sys.modules["__main__"]
vars(main).pop("__file__", None)
sys.stdin, real, sys.stdout = None, sys.stdout, io.StringIO()

async def run(cells):
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), vars(main))

asyncio.run(run(CELLS))
real.write(sys.stdout.getvalue())
"""

CELLS = (
    "import sys; sys.path[:0] = PATHS",
    """
import torch
from tiny_models import make_noisy, make_target, prompt
from streamers import take_time
from hf_ssd import enable_ssd
model = enable_ssd(make_target(), ASSISTANT)
""",
    "ids = model.generate(prompt(), stopping_criteria=take_time(), max_new_tokens=24, do_sample=False)",
    """
assert ids.tolist() == make_target().generate(prompt(), max_new_tokens=24, do_sample=False).tolist()
stats = model.ssd_stats
assert stats.degraded is None and stats.acceptance > 0, stats
print("own process:", bool(__import__("hf_ssd.runtime.pool").runtime.pool._WORKERS))
""",
)

CELL_CLASS = """
class Mine(type(make_noisy())):
    pass

assistant = make_noisy()
assistant.__class__ = Mine
model = enable_ssd(make_target(), assistant)
"""


def run_kernel(cells: tuple[str, ...]) -> str:
    paths = repr([str(TESTS.parent), str(TESTS)])
    code = KERNEL.replace("CELLS", repr(tuple(cell.replace("PATHS", paths) for cell in cells)))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("The assistant drafts in a thread of the caller's process") == ("Mine" in str(cells))
    return result.stdout


@pytest.mark.slow
def test_cells_have_a_process_for_the_assistant() -> None:
    cells = tuple(cell.replace("ASSISTANT", "make_noisy()") for cell in CELLS)
    assert run_kernel(cells) == "own process: True\n"


@pytest.mark.slow
def test_a_class_of_a_cell_drafts_in_a_thread() -> None:
    """It cannot be imported anywhere else."""
    first, second, *rest = CELLS
    cells = (first, second.replace("model = enable_ssd(make_target(), ASSISTANT)", ""), CELL_CLASS, *rest)
    assert run_kernel(cells) == "own process: False\n"
