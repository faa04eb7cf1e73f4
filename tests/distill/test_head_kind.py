"""`hf-ssd distill --kind eagle3` on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distill.making import Made, settings_of
from transformers import AutoModelForCausalLM

from hf_ssd.distill.run import distill
from hf_ssd.eagle3 import load_head


@pytest.fixture(scope="module")
def made(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("distilled")
    (folder / "document.txt").write_text("the red ball. the small stone. " * 320)
    data = ("self", str(folder / "document.txt"))
    return Made(settings_of(folder / "out", target_folder, kind="eagle3", data=data, draft_vocab_size=200))


def test_training_brings_it_nearer_to_the_target(made: Made) -> None:
    result = made.result
    assert result.agreement.kl < 0.7 * result.before.kl
    assert result.agreement.token_rule[1.0] > result.before.token_rule[1.0]
    assert len(result.deeper) == 2
    assert result.deeper[0].num_tokens < result.agreement.num_tokens
    assert result.layers == (1, 3)
    assert result.draft_vocab_size == 200


def test_it_is_a_head_of_the_target(made: Made, target_folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    head = load_head(str(made.settings.out), target)
    assert head.config.layer_ids(3) == [2, 1, 1]
    assert len(head.draft_tokens) == 200
    # What is not trained is the target's.
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[head.draft_tokens])
    assert head.config.speculators_config["verifier"]["name_or_path"] == str(target_folder)


def test_its_figures_are_in_the_card(made: Made) -> None:
    card = (made.settings.out / "README.md").read_text()
    assert "An EAGLE-3 head" in card
    assert "It drafts 200 tokens." in card
    chance, tokens = 1.0, 1.0
    for depth, each in enumerate((made.result.agreement, *made.result.deeper), start=1):
        chance *= each.agreement
        tokens += chance
        assert f"| {depth} | {each.agreement:.3f} |" in card
    assert f"| {tokens:.2f} |" in card


def test_ssd_drafts_with_it(made: Made) -> None:
    assert {rounds.degraded for rounds in made.result.rounds.values()} == {None}
    assert made.result.rounds[0.0].tokens_per_round > 1


def test_the_targets_states_are_kept_for_all_tokens(made: Made) -> None:
    sizes = sum(path.stat().st_size for path in (made.settings.out / "work" / "cache").glob("teacher-*.arrow"))
    # Of width 32: three states for every token, one where a token is learnt.
    assert sizes > 2 * 3 * 32 * made.result.num_tokens


def test_a_run_goes_on_from_the_same_start(made: Made) -> None:
    start = made.settings.out / "work" / "start"
    written = (start / "model.safetensors").stat().st_mtime_ns
    again = Made(made.settings)
    assert again.result.before == made.result.before
    assert again.result.agreement == made.result.agreement
    assert (start / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"`kind` must stay what .* was begun with, 'eagle3', but got 'model'"):
        distill(settings_of(made.settings.out, Path(made.settings.target), data=made.settings.data))


def test_it_goes_on_from_a_head_without_a_cache(made: Made, target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text("the red ball. the small stone. " * 60)
    settings = settings_of(
        tmp_path / "out", target_folder, kind="eagle3", data=(str(tmp_path / "document.txt"),), epochs=1,
        init_from=str(made.settings.out), teacher_cache="off", learning_rate=1e-4,
    )  # fmt: skip
    again = Made(settings)
    assert again.result.before.agreement == pytest.approx(again.result.agreement.agreement, abs=0.1)
    assert again.result.draft_vocab_size == 200
    assert not list((tmp_path / "out" / "work" / "cache").glob("teacher-*"))
    assert json.loads((tmp_path / "out" / "distillation.json").read_text())["init_from"] == str(made.settings.out)
