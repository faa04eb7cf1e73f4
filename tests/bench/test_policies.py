"""`hf-ssd policies`: its parts on a tiny pair, and its report of known figures."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import make_noisy
from tiny_pair import byte_tokenizer, save_tiny_pair
from typer.testing import CliRunner

from hf_ssd.bench.policies import (
    AUTO_WITHOUT_COPIES,
    Course,
    PolicyResult,
    UnrelatedArm,
    changing_text,
    unrelated_assistant,
)
from hf_ssd.bench.policies_report import section_ms, write_policies, write_policy_files
from hf_ssd.bench.settings import AR_ALL_CORES, AUTO, SSD
from hf_ssd.bench.statistics import Estimate
from hf_ssd.cli import app


def test_the_unrelated_assistant_has_the_shape_and_nothing_else() -> None:
    like = make_noisy()
    models = [unrelated_assistant(like, seed) for seed in (0, 0, 1)]
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (like, *models)]
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    heads = [model.lm_head.weight for model in (like, *models)]
    assert torch.equal(heads[1], heads[2])
    assert not torch.equal(heads[2], heads[3])
    assert not torch.equal(heads[0], heads[1])


def test_the_changing_text_has_three_parts_of_one_length() -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer.decode(changing_text(tokenizer, 300, seed=1))
    assert len(text) == 900
    assert text[:300].startswith('{"id": 100, "name": "item 100"')
    assert text[300:600].isalnum()
    assert text[600:].startswith('{"id": 400')
    assert text != tokenizer.decode(changing_text(tokenizer, 300, seed=2))
    with pytest.raises(ValueError, match=r"`section_tokens` must be at most \d+, but got 99999"):
        changing_text(tokenizer, 99_999)


@pytest.fixture
def result() -> PolicyResult:
    arms = {
        name: UnrelatedArm(Estimate(30.0, 29.0, 31.0), Estimate(0.97, 0.96, 0.98), {"ar": 100, "ssd": 20}, 3)
        for name in (AR_ALL_CORES, SSD, AUTO, AUTO_WITHOUT_COPIES)
    }
    times = tuple(0.5 + 0.03 * token for token in range(120))
    rounds = tuple(
        (2 * n + 1, "ar" if 20 <= n < 40 else "ssd", 2, None if 20 <= n < 40 else n % 2 == 0) for n in range(59)
    )
    switches = ((41, "ssd to ar: faster", False), (81, "ar to ssd: faster", False))
    courses = {AR_ALL_CORES: Course(times), SSD: Course(times, rounds), AUTO: Course(times, rounds, switches)}
    environment = {"processor": "a processor", "available_cores": 2, "torch": "2", "transformers": "5"}
    return PolicyResult({"target": "T", "assistant": "D"}, "float32", environment, arms, 40, courses)


def test_sections_are_timed_apart() -> None:
    times = [0.0]
    for token in range(1, 120):
        times.append(times[-1] + (0.01 if token < 40 else 0.03 if token < 80 else 0.02))
    assert section_ms(Course(tuple(times)), 40) == pytest.approx((10.0, 30.0, 20.0, 20.08), abs=0.05)


def test_report_and_files(result, tmp_path) -> None:
    report = write_policies(result)
    assert "| auto, no copied drafts | 30.0 [29.0, 31.0] | 0.97 [0.96, 0.98] | ar 100, ssd 20 | 3 |" in report
    assert "| auto | 30.0 | 30.0 | 30.0 | 30.0 |" in report
    assert "| 41 | ssd to ar: faster |" in report
    assert write_policy_files(result, tmp_path) == ("policies.json", "policies.png", "policies.md")
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "policies.json").read_text())["section_tokens"] == 40


@pytest.mark.parametrize(("option", "name"), [("--prompts", "num_prompts"), ("--section-tokens", "section_tokens")])
def test_nonsense_is_refused(option: str, name: str) -> None:
    found = CliRunner().invoke(app, ["policies", option, "0"])
    assert found.exit_code == 2
    assert f"`{name}` must be at least 1, but got 0" in found.stderr


@pytest.mark.slow
def test_the_command_on_a_tiny_pair(tmp_path) -> None:
    target, assistant = save_tiny_pair(tmp_path)
    sizes = ["--prompts", "1", "--repeats", "1", "--max-new-tokens", "40", "--section-tokens", "60"]
    names = ["--target", str(target), "--assistant", str(assistant), "--dtype", "float32"]
    found = CliRunner().invoke(app, ["policies", *names, *sizes, "--out", str(tmp_path), "--json"])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.stdout)
    assert set(figures["unrelated"]) == {AR_ALL_CORES, SSD, AUTO, AUTO_WITHOUT_COPIES}
    for course in figures["courses"].values():
        assert len(course["token_s"]) == 180
        assert course["token_s"] == sorted(course["token_s"])
    assert sum(each[2] for each in figures["courses"][AUTO]["rounds"]) == 179
    assert (tmp_path / "policies.png").exists()
