"""Code that comes with a model runs only where `trust_remote_code=True` was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import prompt
from tiny_pair import save_tiny_pair
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils
from typer.testing import CliRunner

from hf_ssd import SSDConfig, load_pair
from hf_ssd.cli import app
from hf_ssd.generation import generate_with_ssd
from hf_ssd.runtime import pool

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = {model_type!r}

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class CodeFolder:
    """A model folder with code, which leaves a mark when it runs."""

    def __init__(self, folder: Path, model_type: str = "of_its_own", *, tokenizer_only: bool = False) -> None:
        self.path, _ = save_tiny_pair(folder)
        self.mark = folder / "mark"
        code = CODE.format(mark=str(self.mark), model_type=model_type)
        (self.path / "code.py").write_text(code)
        (self.path / "custom_generate").mkdir()
        (self.path / "custom_generate" / "generate.py").write_text(code + "\ndef generate(model, **kwargs): ...\n")
        classes = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
        if not tokenizer_only:
            self._change("config.json", {"model_type": model_type, "auto_map": classes})
        values = {"auto_map": {"AutoTokenizer": ["code.OwnTokenizer", "code.OwnTokenizer"]}}
        self._change("tokenizer_config.json", {**values, "tokenizer_class": "OwnTokenizer"})

    def _change(self, name: str, values: dict[str, Any]) -> None:
        path = self.path / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch) -> None:
    """Where transformers copies such code to."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Nobody is there to answer a question.
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("it asked"))


@pytest.fixture
def own(tmp_path: Path) -> CodeFolder:
    return CodeFolder(tmp_path / "own")


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Path]:
    return save_tiny_pair(tmp_path / "plain")


def test_the_folder_runs_code_where_it_is_trusted(own: CodeFolder) -> None:
    AutoConfig.from_pretrained(own.path, trust_remote_code=True)
    assert own.mark.exists()


@pytest.mark.parametrize("role", ["target", "assistant"])
def test_load_pair(own: CodeFolder, plain: tuple[Path, Path], role: str) -> None:
    names = [str(own.path), str(plain[1])] if role == "target" else [str(plain[0]), str(own.path)]
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_pair(*names)
    assert not own.mark.exists()


def test_a_folder_of_a_known_type_is_loaded_without_its_code(tmp_path: Path, plain: tuple[Path, Path]) -> None:
    own = CodeFolder(tmp_path / "llama", "llama")
    pair = load_pair(str(plain[0]), str(own.path), ssd_config=SSDConfig(backend="inline"))
    assert type(pair.assistant).__module__.startswith("transformers.")
    assert not own.mark.exists()


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("doctor", "target"),
        ("doctor", "assistant"),
        ("compare", "target"),
        ("compare", "assistant"),
        ("distill", "target"),
    ],
)
def test_commands(own: CodeFolder, plain: tuple[Path, Path], tmp_path: Path, command: str, role: str) -> None:
    target, assistant = (own.path, plain[1]) if role == "target" else (plain[0], own.path)
    arguments = {
        "doctor": ["--model", str(target), "--assistant", str(assistant), "--dtype", "float32"],
        "compare": ["--target", str(target), "--assistant", str(assistant), "--prompts", "1"],
        "distill": ["--target", str(target), "--out", str(tmp_path / "out")],
    }[command]
    result = CliRunner().invoke(app, [command, *arguments])
    assert result.exit_code in (1, 2), result.output
    assert "custom code" in " ".join(result.output.split())
    assert not own.mark.exists()


def test_an_assistant_to_go_on_from(own: CodeFolder, plain: tuple[Path, Path]) -> None:
    from hf_ssd.distill.student import load_student

    target = AutoModelForCausalLM.from_pretrained(plain[0])
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_student(str(own.path), target)
    assert not own.mark.exists()


@pytest.mark.slow
def test_the_worker_runs_what_the_caller_has_loaded(own: CodeFolder, plain: tuple[Path, Path]) -> None:
    """It gets the assistant by the names of its classes, never a folder to load."""
    target = AutoModelForCausalLM.from_pretrained(plain[0])
    assistant = AutoModelForCausalLM.from_pretrained(own.path, trust_remote_code=True)
    ids = generate_with_ssd(
        target,
        inputs=prompt(6),
        assistant_model=assistant,
        ssd_config=SSDConfig(backend="process"),
        max_new_tokens=24,
    )
    assert ids.tolist() == target.generate(prompt(6), max_new_tokens=24).tolist()
    assert target.ssd_stats.degraded is None
    assert target.ssd_stats.acceptance == 1.0
    pool.close_worker(assistant)
