"""`hf-ssd distill --kind eagle3` on a tiny target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distill.making import Made, settings_of
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM

from hf_ssd.distill.card import write_card
from hf_ssd.distill.head_kind import HeadKind
from hf_ssd.distill.head_start import make_head
from hf_ssd.distill.run import distill
from hf_ssd.eagle3 import load_head
from hf_ssd.vocabulary import UnsupportedError


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
    assert "Token embedding and output projection are the target's, unchanged. The embedding is not stored" in card
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


class TestAHeadToGoOnFrom:
    @pytest.fixture
    def target(self, target_folder: Path):
        return AutoModelForCausalLM.from_pretrained(target_folder)

    def kind(self, folder: Path, target, given) -> HeadKind:
        given.save_pretrained(folder / "given")
        settings = settings_of(
            folder / "out", Path(target.name_or_path), kind="eagle3", init_from=str(folder / "given")
        )
        return HeadKind(settings, target)

    def test_what_is_the_targets_stays_that(self, target, tmp_path: Path) -> None:
        student = self.kind(tmp_path, target, make_head(target, torch.arange(64), [2, 1, 1])).make(None, tmp_path)
        assert not student.model.lm_head.weight.requires_grad
        assert not student.model.embed_tokens.weight.requires_grad
        assert student.facts()["shares_projection"]

    def test_a_projection_of_its_own_is_trained(self, target, made: Made, tmp_path: Path) -> None:
        given = make_head(target, torch.arange(64), [2, 1, 1])
        with torch.no_grad():
            given.lm_head.weight.mul_(2)
        student = self.kind(tmp_path, target, given).make(None, tmp_path)
        assert student.model.lm_head.weight.requires_grad
        assert not student.model.embed_tokens.weight.requires_grad
        facts = {name: student.facts()[name] for name in ("shares_embedding", "shares_projection")}
        assert facts == {"shares_embedding": True, "shares_projection": False}
        card = write_card(replace(made.result, **facts))
        assert "The token embedding is the target's, unchanged; the output projection is its own." in card

    def test_an_embedding_that_is_stored_is_known_for_the_targets(self, target, tmp_path: Path) -> None:
        given = make_head(target, torch.arange(64), [2, 1, 1])
        given._keys_to_ignore_on_save = set()
        student = self.kind(tmp_path, target, given).make(None, tmp_path)
        assert "embed_tokens" in (tmp_path / "given" / "model.safetensors").read_bytes()[:4096].decode(errors="ignore")
        assert not student.model.embed_tokens.weight.requires_grad

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"hidden_size": 48}, "must hold a head for the target, but .* hidden size 32, but it reads .* size 48"),
            ({"vocab_size": 64}, "must hold a head for the target's 258 tokens, but .* knows 64"),
        ],
    )
    def test_one_of_another_target_is_refused_before_anything_is_written(
        self, target, other: dict, message: str, tmp_path: Path
    ) -> None:
        given = make_head(
            tiny_llama(**{"vocab_size": 258, "num_hidden_layers": 3, **other}), torch.arange(60), [2, 1, 1]
        )
        given._keys_to_ignore_on_save = set()  # with an embedding of its own nothing else tells
        with pytest.raises(UnsupportedError, match=f"`init_from` {message}"):
            self.kind(tmp_path, target, given)
