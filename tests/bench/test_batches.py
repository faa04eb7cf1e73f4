"""`hf-ssd bench --batch-sizes`: batches of prompts, and what is made of their times."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_pair import save_tiny_pair
from typer.testing import CliRunner

from hf_ssd.bench.arms import Arm, Method
from hf_ssd.bench.batches import BatchCall, _figures, batches_of, can_batch
from hf_ssd.bench.plots import plot_batches
from hf_ssd.cli import app
from hf_ssd.metrics import SSDStats
from hf_ssd.types import Origin, RoundStats


def test_prompts_are_padded_on_the_left_and_the_last_batch_is_filled_up() -> None:
    inputs = [{"input_ids": torch.arange(1, 2 + length)[None]} for length in (0, 2, 1)]
    first, second = batches_of(inputs, 2, pad_token_id=9)
    assert first["input_ids"].tolist() == [[9, 9, 1], [1, 2, 3]]
    assert first["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert second["input_ids"].tolist() == [[1, 2], [9, 1]]


def test_figures_are_of_all_rows_and_all_calls() -> None:
    arms = [Arm("ar", Method.PLAIN, 1), Arm("ssd", Method.OURS, 1)]
    rounds = tuple(RoundStats(2, 1, 2, Origin.CACHE, verify_ms=30.0, wait_ms=3.0, row=row) for row in range(2))
    stats = SSDStats(mode="ssd", rounds=rounds)
    calls = {
        "ar": {(0, 0): BatchCall(100, 5.0), (0, 1): BatchCall(100, 15.0)},
        "ssd": {(0, 0): BatchCall(100, 4.0, stats), (0, 1): BatchCall(100, 6.0, stats)},
    }
    figures = _figures(calls, arms, 4, 2, 1)
    assert (figures.batch_size, figures.num_calls, figures.fastest) == (4, 2, "ssd")
    assert figures.arms["ar"].tokens_per_s.value == 10.0
    assert figures.arms["ar"].latency_s == 10.0
    assert figures.arms["ar"].hit_rate is None
    ssd = figures.arms["ssd"]
    assert ssd.ratios["ar"].value == 2.0
    assert ssd.ratios["ar"].low < 2.0 < ssd.ratios["ar"].high
    assert (ssd.tokens_per_round, ssd.hit_rate, ssd.verify_ms, ssd.wait_ms) == (2.0, 1.0, 30.0, 3.0)


def test_arms_for_single_rows_are_left_out() -> None:
    assert [can_batch(Arm("x", method, 1)) for method in (Method.PLAIN, Method.OURS)] == [True, True]
    assert not any(can_batch(Arm("x", method, 1)) for method in (Method.ASSISTED, Method.PROMPT_LOOKUP))


@pytest.mark.slow
def test_the_command(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    target, assistant = save_tiny_pair(tmp_path)
    arguments = ["--target", str(target), "--assistant", str(assistant), "--dtype", "float32", "--suite", "chat"]
    arguments += ["--sample", "2", "--temperatures", "0", "--arms", "ar,hf_assisted,sd,ssd", "--no-replay"]
    arguments += ["--max-new-tokens", "12", "--batch-sizes", "1,2", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    batches = json.loads(result.stdout)["batches"]
    assert [(each["batch_size"], each["num_calls"]) for each in batches] == [(1, 2), (2, 1)]
    arms = ["ar", "sd", "ssd", *(f"ssd: backup {name}" for name in ("jit", "ngram", "none")), "auto"]
    assert all(list(each["arms"]) == arms for each in batches)
    assert all(each["arms"]["auto"]["over_best"]["value"] > 0 for each in batches)
    assert all(arm["tokens_per_s"]["value"] > 0 for each in batches for arm in each["arms"].values())
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Tokens/s of all rows together" in report
    assert "The rounds of SSD:" in report
    assert "Mode `auto`" in report
    assert (tmp_path / "out" / "batches.png").read_bytes().startswith(b"\x89PNG")
    assert plot_batches(()) is None


def test_a_bad_size_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "--batch-sizes", "0,2"])
    assert result.exit_code == 2
    assert "`batch_sizes` must be at least 1" in result.output
