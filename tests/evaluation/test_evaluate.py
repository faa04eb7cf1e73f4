"""`hf-ssd evaluate` as a user runs it, on a tiny pair in float32, through the real worker process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import save_tiny_pair
from typer.testing import CliRunner

import hf_ssd
from hf_ssd.cli import app
from hf_ssd.evaluation.records import RecordFile, key_of
from hf_ssd.evaluation.results import Difference
from hf_ssd.evaluation.run import with_gaps

MATHS = [{"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(2, 5)]
CODE = {
    "task_id": "T/0",
    "prompt": 'def one():\n    """ One. """\n',
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}
COPIES = [{"text": "a b c"}, {"text": "d e f"}]
NUM_CALLS = 3 * (3 + 1 + 2) + 3  # three arms on all items, and one more on the first of each task


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    target, assistant = save_tiny_pair(folder)
    suites = {"gsm8k": MATHS, "humaneval": [CODE], "copying": COPIES}
    for name, rows in suites.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    suite = ",".join(f"{name}={folder / name}.jsonl" for name in suites)
    pair = ["--target", str(target), "--assistant", str(assistant), "--dtype", "float32"]
    return ["evaluate", *pair, "--suite", suite, "--max-new-tokens", "16"]


GREEDY = ("--variant", "chains:draft_tree_size=none,backend=inline", "--variant-limit", "1")


@pytest.fixture(scope="module")
def out(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    result = CliRunner().invoke(app, [*options, *GREEDY, "--out", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "Written to" in result.stdout
    return folder


def report_of(folder: Path) -> dict[str, Any]:
    """All but what depends on the clock."""
    report = json.loads((folder / "evaluation.json").read_text())
    assert report.pop("clock")
    return report


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_texts_and_scores_are_those_of_plain_decoding(out: Path) -> None:
    report = report_of(out)
    figures = {(entry["arm"], entry["task"]): entry for entry in report["tasks"]}
    assert len(figures) == 4 * 3
    for (arm, task), entry in figures.items():
        if arm == "ar":
            assert entry["identical"] is None
            continue
        assert entry["identical"] == [entry["num_items"]] * 2
        assert entry["token_share"] == 1
        assert entry["score"]["value"] == figures["ar", task]["score"]["value"] or arm.startswith("ssd: ")
        assert entry["difference"]["value"] == 0
    assert report["differences"] == []
    assert {name: entry["measure"] for (_, name), entry in figures.items()} == {
        "gsm8k": "exact match",
        "humaneval": "pass@1",
        "copying": "ROUGE-L",
    }


def test_the_report_has_tables_and_speeds(out: Path) -> None:
    report = (out / "report.md").read_text()
    for text in ("## gsm8k: exact match", "| SSD, chains | 1 |", "3 of 3", "## Speed", "tokens/round"):
        assert text in report
    clock = {entry["arm"]: entry for entry in json.loads((out / "evaluation.json").read_text())["clock"]}
    assert clock["ar"]["ratio_to_ar"] == 1
    assert clock["ssd"]["acceptance"]["hit_rate"] is not None
    assert clock["sd"]["acceptance"]["hit_rate"] is None
    assert clock["ar"]["acceptance"] is None
    assert str(out) not in report


@pytest.mark.slow
def test_a_run_killed_half_way_and_started_again_ends_the_same(options: list[str], out: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from hf_ssd.cli import main; main()", *options, *GREEDY, "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=Path(hf_ssd.__file__).parent.parent, stderr=subprocess.DEVNULL)
    samples = tmp_path / "samples.jsonl"
    try:
        deadline = time.monotonic() + 90
        while not (samples.exists() and samples.read_bytes().count(b"\n") >= 4):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    finished = samples.read_bytes().count(b"\n")
    assert 4 <= finished < NUM_CALLS
    kept = samples.read_bytes().splitlines()[:finished]
    with samples.open("ab") as file:
        file.write(b'{"key": "torn", "sample": {"tok')  # what a write that was cut short leaves
    result = CliRunner().invoke(app, [*options, *GREEDY, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert samples.read_bytes().splitlines()[:finished] == kept
    assert len(lines_of(tmp_path)) == len(lines_of(out)) == NUM_CALLS
    assert report_of(tmp_path) == report_of(out)
    texts = [(line["arm"], line["item"], line["sample"]["tokens"]) for line in lines_of(tmp_path)]
    assert texts == [(line["arm"], line["item"], line["sample"]["tokens"]) for line in lines_of(out)]


def test_other_settings_do_not_take_each_others_samples(options: list[str], out: Path) -> None:
    before = len(lines_of(out))
    report = (out / "evaluation.json").read_text()
    arguments = [*options, "--limit", "1", "--arms", "ar", "--max-new-tokens", "8", "--out", str(out)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    added = lines_of(out)[before:]
    assert len(added) == 3
    assert all(len(line["sample"]["tokens"]) <= 8 for line in added)
    (out / "evaluation.json").write_text(report)


@pytest.mark.slow
def test_sampling_compares_distributions_instead_of_texts(options: list[str]) -> None:
    arguments = [*options, "--limit", "2,1,1", "--temperature", "1", "--seeds", "4", "--arms", "ar,ssd", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    (ssd,) = (entry for entry in report["tasks"] if (entry["arm"], entry["task"]) == ("ssd", "gsm8k"))
    assert ssd["num_items"] == 2
    assert ssd["identical"] is None
    assert 0 < ssd["score_p_value"] <= 1
    assert 0 < ssd["first_tokens"]["permutation_p_value"] <= 1
    assert ssd["first_tokens"]["num_prompts"] == 2


def test_a_gap_is_told_in_steps_of_the_precision() -> None:
    logits = torch.tensor([18.0, 17.875, 3.0])
    found = with_gaps(Difference("ssd", "gsm8k", "0", 5), logits, 1, "bfloat16")
    assert (found.top_two_gap, found.token_gap, found.step) == (0.125, 0.125, 0.125)
    third = with_gaps(Difference("ssd", "gsm8k", "0", 5), logits, 2, "float32")
    assert (third.top_two_gap, third.token_gap) == (0.125, 15.0)
    assert third.step == 2.0**-19
    assert with_gaps(Difference("ssd", "gsm8k", "0", 5), logits, None, "float32").token_gap is None


def test_records_survive_and_strangers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with RecordFile(path) as records:
        records.add("a", {"value": 1})
    with path.open("a") as file:
        file.write('{"key": "b", "val')
    with RecordFile(path) as records:
        assert "a" in records
        assert "b" not in records
        records.add("b", {"value": 2})
    with RecordFile(path) as records:
        assert records["b"] == {"key": "b", "value": 2}
    path.write_text("no record\n")
    with pytest.raises(ValueError, match=r"records of an earlier run, but line 1 of .*is none"):
        RecordFile(path)
    with RecordFile(None) as records:
        records.add("c", {})
        assert "c" in records


def test_keys_depend_on_every_setting_and_not_on_their_order() -> None:
    assert key_of(a=1, b=2) == key_of(b=2, a=1)
    assert key_of(a=1, b=2) != key_of(a=1, b=3)
