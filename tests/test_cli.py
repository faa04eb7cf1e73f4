from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_ssd.cli import app

runner = CliRunner()
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "somewhere"], r"`target` needs `assistant` too.*'somewhere'"),
        (["--assistant", "somewhere"], r"`assistant` needs `target` too.*'somewhere'"),
        (["--dtype", "int8"], r"`dtype` must be one of .*'int8'"),
        (["--arms", "ar,beam"], r"`arms` must be some of .*\['beam'\]"),
        (["--arms", ","], r"`arms` must be some of"),
        (["--kinds", "poems"], r"`kinds` must be some of .*\['poems'\]"),
        (["--prompts", "0"], r"`prompts` must be between 1 and \d+.*0"),
        (["--prompts", "999"], r"`prompts` must be between 1 and \d+.*999"),
        (["--prompts", "2", "--prompt", "Hello"], r"`prompts` counts built-in prompts.*2"),
        (["--prompt", " "], r"`prompt` must not be empty"),
        (["--max-new-tokens", "1"], r"`max_new_tokens` must be at least 2.*1"),
        (["--repeats", "0"], r"`repeats` must be at least 1.*0"),
        (["--temperature", "-1"], r"`temperature` must be 0 .*-1"),
        (["--top-k", "5"], r"`top_k` and `top_p` only act when sampling.*5"),
        (["--temperature", "1", "--top-k", "0"], r"`top_k` must be at least 1.*0"),
        (["--temperature", "1", "--top-p", "1.5"], r"`top_p` must be .*1\.5"),
        (
            ["--num-assistant-tokens", "many"],
            r"`num_assistant_tokens` must be a whole number or one of \['auto'\].*'many'",
        ),
        (["--num-assistant-tokens", "0"], r"`num_assistant_tokens` must be at least 1.*0"),
        (["--cache-budget", "0"], r"`cache_budget` must be at least 1.*0"),
        (
            ["--draft-vocab-size", "big"],
            r"`draft_vocab_size` must be a whole number or one of \['auto', 'none'\].*'big'",
        ),
        (["--target-threads", "0"], r"`target_threads` must be at least 1.*0"),
        (["--assistant-threads", "0"], r"`assistant_threads` must be at least 1.*0"),
        (["--arms", "ar", "--trace", "trace.json"], r"`trace` needs the arm 'ssd'"),
        (["--trace", "missing/folder/trace.json"], r"`trace` must lie in a folder that exists"),
    ],
)
def test_a_bad_option_is_refused_before_a_model_is_loaded(arguments: list[str], message: str) -> None:
    start = time.perf_counter()
    result = runner.invoke(app, ["compare", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert time.perf_counter() - start < 5


def test_a_folder_that_is_not_there_is_named(tmp_path) -> None:
    missing = str(tmp_path / "nothing")
    result = runner.invoke(app, ["compare", "--target", missing, "--assistant", missing])
    assert result.exit_code == 2
    assert missing in result.stderr


def test_version_lists_what_figures_depend_on() -> None:
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["hf_ssd", "torch", "transformers"]


def test_help_names_the_commands_without_importing_torch() -> None:
    code = (
        "import sys; from hf_ssd.cli import app; app(['--help'], standalone_mode=False); "
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
    assert "compare" in result.stdout
    assert "version" in result.stdout


def test_every_command_is_in_the_help_and_in_the_documentation() -> None:
    listed = runner.invoke(app, ["--help"]).stdout
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        assert name in listed
        assert f"hf-ssd {name}" in text, f"`hf-ssd {name}` is named nowhere"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "somewhere"], r"`target` and `assistant` must be given together.*'somewhere'"),
        (["--dtype", "int8"], r"`dtype` must be one of .*'int8'"),
        (["--max-prompt-tokens", "0"], r"`max_prompt_tokens` must be at least 1.*0"),
        (["--target", "/nowhere/a", "--assistant", "/nowhere/b"], r"/nowhere/a"),
    ],
)
def test_the_demo_says_what_is_wrong(arguments, message):
    pytest.importorskip("gradio")
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


def test_the_demo_says_how_to_install_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "pip install 'hf-ssd[demo]'" in result.stderr
