from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distill.making import SIZES, Made, settings_of
from tiny_models import prompt
from tiny_pair import byte_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_ssd.cli import app
from hf_ssd.distill.folder import WorkFolder
from hf_ssd.distill.run import distill
from hf_ssd.distill.training import last_checkpoint, rate
from hf_ssd.drafting.draft_vocab import frequent_tokens


@pytest.fixture(scope="module")
def made(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("distilled")
    # Documents that a model can learn to predict, and text of the target's own.
    (folder / "document.txt").write_text("the red ball. the small stone. " * 320)
    return Made(
        settings_of(folder / "out", target_folder, data=("self", str(folder / "document.txt"))), backend="process"
    )


class TestAssistant:
    def test_training_brings_it_nearer_to_the_target(self, made: Made) -> None:
        result = made.result
        assert result.agreement.kl < 0.7 * result.before.kl
        assert result.agreement.token_rule[1.0] > result.before.token_rule[1.0]
        assert result.layers == (1, 3)
        assert result.num_steps > 0

    def test_it_loads_as_any_model_and_speaks_the_targets_tokens(self, made: Made, target_folder: Path) -> None:
        assistant = AutoModelForCausalLM.from_pretrained(made.settings.out)
        target = AutoModelForCausalLM.from_pretrained(target_folder)
        assert assistant.config.num_hidden_layers == 1
        assert torch.equal(assistant.get_input_embeddings().weight, target.get_input_embeddings().weight)
        assert assistant.generate(prompt(6), max_new_tokens=4).shape == (1, 10)

    def test_its_figures_are_in_the_card(self, made: Made) -> None:
        card = (made.settings.out / "README.md").read_text()
        assert f"{made.result.agreement.agreement:.3f}" in card
        assert f"1 decoder layers of width {made.result.width[0]}" in card
        kept = json.loads((made.settings.out / "distillation.json").read_text())
        assert kept["agreement"]["agreement"] == made.result.agreement.agreement
        assert set(kept["rounds"]) == {"0.0", "0.7", "1.0"}
        assert kept["rounds"]["0.0"]["tokens_per_round"] >= 1
        assert kept["rounds"]["0.0"]["degraded"] is None

    def test_the_draft_vocabulary_finds_its_frequent_tokens(self, made: Made) -> None:
        listed = json.loads((made.settings.out / "frequent_tokens.json").read_text())
        (space,) = byte_tokenizer()(" ")["input_ids"]
        assert space in listed[:3]
        assert frequent_tokens(str(made.settings.out), 5, 258) == listed[:5]

    @pytest.mark.slow
    def test_the_command_line_compares_it(self, made: Made, target_folder: Path) -> None:
        arguments = ["--prompts", "1", "--max-new-tokens", "6", "--dtype", "float32", "--arms", "ar,ssd", "--json"]
        pair = ["--target", str(target_folder), "--assistant", str(made.settings.out)]
        result = CliRunner().invoke(app, ["compare", *pair, *arguments])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["arms"]["ssd"]["identical_to_ar"] == [1, 1]


class TestFolder:
    def test_where_all_is_done_a_run_only_measures(self, made: Made) -> None:
        again = Made(made.settings)
        assert again.result.num_steps == made.result.num_steps
        assert again.result.before == made.result.before
        assert again.result.agreement == made.result.agreement
        assert not any(what.startswith(("writing", "training")) for what in again.said)

    def test_it_stays_with_what_it_was_begun_for(self, made: Made, target_folder: Path) -> None:
        with pytest.raises(ValueError, match=r"`layers` must stay what .* was begun with, 1, but got 2\."):
            distill(settings_of(made.settings.out, target_folder, layers=2, data=made.settings.data))

    def test_two_runs_do_not_share_it(self, made: Made) -> None:
        with WorkFolder(made.settings.out).held(), pytest.raises(ValueError, match="that no other run uses"):
            distill(made.settings)

    def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(self, tmp_path: Path) -> None:
        for step, state in ((5, '{"global_step": 5}'), (10, '{"glob')):
            (tmp_path / f"checkpoint-{step}").mkdir()
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        (tmp_path / "checkpoint-15").mkdir()
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
        assert last_checkpoint(tmp_path / "nothing") is None


def test_without_a_cache_the_target_is_asked_in_training(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text("the red ball. the small stone. " * 60)
    data = (str(tmp_path / "document.txt"),)
    made = Made(
        settings_of(tmp_path / "out", target_folder, data=data, teacher_cache="off", vocabulary="sampled", epochs=8)
    )
    assert made.result.agreement.kl < 0.9 * made.result.before.kl
    assert not list((tmp_path / "out" / "work" / "cache").glob("teacher-*"))
    assert made.result.minutes.keys() == {"training"}


def test_prompts_to_measure_on(target_folder: Path, tmp_path: Path) -> None:
    asked = [{"prompt": f"what does a {animal} do?", "category": animal} for animal in ("dog", "cat", "cow")]
    held_out = tmp_path / "asked.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in [*asked, {"prompt": "x" * 400, "category": "long"}]))
    (tmp_path / "learnt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"prompt": "who?"}, asked[0]]))
    data = (str(tmp_path / "learnt.jsonl"),)
    settings = settings_of(tmp_path / "out", target_folder, data=data, held_out=str(held_out), epochs=2)
    made = Made(settings)
    assert made.result.num_texts == 1  # not what is measured on
    assert made.result.agreement.num_tokens == 3 * 16
    assert f"to prompts of `{held_out}`" in (settings.out / "README.md").read_text()
    answers = settings.out / "work" / "held_out.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    for row in rows:
        prompt_ids = torch.tensor([row["input_ids"][: row["num_prompt_tokens"]]])
        assert target.generate(prompt_ids, max_new_tokens=16, do_sample=False)[0].tolist() == row["input_ids"]
    again = Made(settings)
    assert again.result.agreement == made.result.agreement
    assert answers.read_text().splitlines() == [json.dumps(row) for row in rows]
    for other in (None, str(tmp_path / "learnt.jsonl")):
        with pytest.raises(ValueError, match=r"`held_out` must give the prompts that .* was begun with"):
            distill(replace(settings, held_out=other))


def test_prompts_to_measure_on_that_leave_no_room_are_refused(target_folder: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "asked.jsonl"
    held_out.write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    with pytest.raises(ValueError, match=r"`held_out` must give prompts that leave room .* for max_length=192\."):
        distill(settings_of(tmp_path / "out", target_folder, held_out=str(held_out)))


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [rate(step, step / 1000) for step in range(1001)]
    assert rates[0] < rates[10] < rates[49] == max(rates) == rates[799] == 1.0
    assert rates[-1] == min(rates) == 0.02
    assert rate(3, 0.5) == 1.0  # few steps, each of them long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], r"`layers` must be at least 1, but got 0\."),
        (["--minutes", "0"], r"`minutes` must be a positive number, but got 0"),
        (["--vocabulary", "some"], r"`vocabulary` must be one of .*'some'"),
        (["--teacher-cache", "yes"], r"`teacher_cache` must be one of .*'yes'"),
        (["--dtype", "int4"], r"`dtype` must be one of .*'int4'"),
        (["--data", ","], r"`data` must name something to learn from"),
        (["--data", "missing.txt"], r"`data` must be 'self', files.*'missing.txt'"),
        (["--held-out", "nowhere.jsonl"], r"`held_out` must be a JSONL file .*'nowhere\.jsonl'"),
        (["--kind", "eagle"], r"`kind` must be one of .*'eagle'"),
        (["--kind", "eagle3", "--layers", "2"], r"`layers` must be left out for kind='eagle3', but got 2"),
        (["--draft-vocab-size", "99"], r"`draft_vocab_size` must be left out for kind='model', but got 99"),
        (["--init-from", "x", "--width", "8"], r"`init_from` decides the assistant's size, but got width=8"),
    ],
)
def test_a_bad_option_is_refused_before_a_model_is_loaded(arguments: list[str], message: str, tmp_path: Path) -> None:
    import re

    start = time.perf_counter()
    result = CliRunner().invoke(app, ["distill", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert time.perf_counter() - start < 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SIZES)
def test_smoke(kind: str, tmp_path: Path) -> None:
    """From a tiny target that can talk to an assistant that guesses it, killed and resumed on the way."""
    from talking_target import make_talking_target

    target, out = tmp_path / "target", tmp_path / "assistant"
    make_talking_target().save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    options = {"--kind": kind, "--target": target, "--out": out, "--minutes": 1.5, "--save-minutes": 0.1}
    options |= {"--epochs": 40, "--max-length": 160, "--max-new-tokens": 64, "--dtype": "float32"}
    options |= {"--learning-rate": 2e-3}
    options |= {f"--{name}": value for name, value in SIZES[kind].items()}
    command = [sys.executable, "-c", "from hf_ssd.cli import main; main()", "distill", "--json"]
    command += [str(part) for option in options.items() for part in option]

    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 400
        while last_checkpoint(out / "work" / "checkpoints") is None:
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < end, "there was no checkpoint in time"
            time.sleep(0.1)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    kept = last_checkpoint(out / "work" / "checkpoints")
    num_texts = (out / "work" / "texts.jsonl").read_text().count("\n")

    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_steps"] > int(kept.name.rpartition("-")[2])
    # What was there was not made again.
    assert (out / "work" / "texts.jsonl").read_text().count("\n") == num_texts
    log = [json.loads(line) for line in (out / "work" / "log.jsonl").read_text().splitlines()]
    # What a head says after the target's last state is easily guessed here, but not what it drafts from its own.
    name = {"model": "eval_agreement", "eagle3": "eval_agreement_3"}[kind]
    watched = [entry[name] for entry in log if name in entry]
    assert watched[0] < 0.4 < 0.8 < watched[-1]
    assert result["before"]["agreement"] < result["agreement"]["agreement"]
    assert min(each["agreement"] for each in (result["agreement"], *result["deeper"])) > 0.8
    assert result["agreement"]["token_rule"]["1.0"] > 0.7

    pair = ["--target", str(target), "--assistant", str(out), "--dtype", "float32"]
    asked = ["--prompt", "tell me what my aunt does.", "--arms", "ar,sd,ssd", "--json"]
    compared = CliRunner().invoke(app, ["compare", *pair, *asked])
    assert compared.exit_code == 0, compared.output
    ssd = json.loads(compared.stdout)["arms"]["ssd"]
    assert ssd["identical_to_ar"] == [1, 1]
    assert ssd["tokens_per_round"] > 2
