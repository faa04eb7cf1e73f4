"""`hf-ssd check-sampling` on a tiny pair: exact samplers pass, wrong ones are caught, interruptions do no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_pair import save_tiny_pair
from typer.testing import CliRunner

from hf_ssd.cli import app
from hf_ssd.evaluation.biased import BiasedLogitsProcessor
from hf_ssd.evaluation.cloze import CLOZE
from hf_ssd.evaluation.sampling_settings import SamplingSettings


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, assistant = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    sizes = ["--prompts", "3", "--samples", "16", "--max-new-tokens", "4", "--permutations", "999"]
    return ["check-sampling", "--target", str(target), "--assistant", str(assistant), *sizes]


@pytest.mark.slow
def test_exact_rules_pass_and_a_strong_bias_is_caught_also_after_an_interruption(
    options: list[str], tmp_path: Path
) -> None:
    arguments = [*options, "--rules", "token,coupled", "--bias", "0.4", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    result = json.loads((tmp_path / "sampling.json").read_text())
    assert result["told"] == ["biased on purpose"]
    assert result["passed"]
    assert len(result["tests"]) == 4 * 4
    assert 0.3 < result["mean_bias"] <= 0.4
    report = (tmp_path / "report.md").read_text()
    assert "No rule is told from AR" in report
    assert "is told from it" in report

    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 5 * 3
    (tmp_path / "samples.jsonl").write_text("".join(lines[:8]) + lines[8][:40])
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    again = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    assert again[:8] == lines[:8]
    for line, other in zip(again, lines, strict=True):
        record = json.loads(line)
        if record["sampler"] in ("AR", "AR again", "coupled"):  # what the token rule draws depends on the clock
            assert record == json.loads(other)
    resumed = json.loads((tmp_path / "sampling.json").read_text())
    assert resumed["told"] == ["biased on purpose"]
    for test, other in zip(resumed["tests"], result["tests"], strict=True):
        if test["sampler"] in ("AR again", "coupled"):
            assert test["value"] == other["value"]
            assert test["p_value"] == other["p_value"]


@pytest.mark.slow
def test_a_bias_that_is_too_small_to_see_fails_the_check(options: list[str]) -> None:
    result = CliRunner().invoke(app, [*options, "--rules", "token", "--bias", "0.001"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "NOT told" in " ".join(result.stdout.split())


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_bias_has_the_size_it_says(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 20, generator=generator) * 4
    logits[0, 3] = 60.0  # nothing left to move
    probs = (logits.double() / temperature).softmax(dim=-1)
    processor = BiasedLogitsProcessor(0.03, temperature)
    biased = (processor(torch.zeros(50, 1, dtype=torch.long), logits.clone()).double() / temperature).softmax(dim=-1)
    distance = (biased - probs).abs().sum(dim=-1) / 2
    room = (1 - probs.max(dim=-1).values).clamp(max=0.03)
    assert torch.allclose(distance, room, atol=1e-6)
    assert distance.max() == pytest.approx(0.03, abs=1e-6)
    assert (biased.argmax(dim=-1) == probs.argmax(dim=-1)).all()


def test_prompts_are_distinct_and_have_answers() -> None:
    assert len(CLOZE) == len(dict(CLOZE)) == 40
    assert all(text and answer and answer not in text for text, answer in CLOZE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be above 0 to sample, but got 0.0"),
        ({"num_prompts": 41}, "`prompts` must be between 1 and 40, but got 41"),
        ({"num_samples": 1}, "`samples` must be at least 2, but got 1"),
        ({"rules": ("greedy",)}, r"`rules` must be some of .*but got \['greedy'\]"),
        ({"bias": 0.0}, "`bias` must lie between 0 and 1, both excluded, but got 0.0"),
        ({"num_permutations": 99}, "`permutations` must be large enough .*but got 99"),
    ],
)
def test_settings_are_checked_before_a_model_is_read(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)
