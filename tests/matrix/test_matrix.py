"""The families of transformers and random arguments: SSD returns what plain decoding does, or refuses at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_ssd.batch_decoding import decodes_together
from hf_ssd.checks import UnsupportedError, check_model
from hf_ssd.cli import app
from hf_ssd.generation import generate_with_ssd
from hf_ssd.matrix import trials
from hf_ssd.matrix.call_trials import EQUAL, FAILS, RAISES_TOO, REFUSED, CallResult, try_invalid, try_valid
from hf_ssd.matrix.drawn_calls import draw_invalid, draw_valid
from hf_ssd.matrix.families import FAMILIES
from hf_ssd.matrix.run import WITH_PROCESS, families_named
from hf_ssd.matrix.trials import FamilyResult, try_family
from hf_ssd.matrix.zoo import Family, text_prompts
from hf_ssd.target_trees import Masks, counts_slots, masks_of

REFUSED_FAMILIES = [family for family in FAMILIES if family.is_refused]
# Trees, ALiBi, windows by slot, windows and capped scores, MLA and experts.
FEW = [("gpt2", "sdpa"), ("bloom", "eager"), ("gpt_neo", "eager"), ("gemma2", "eager"), ("longcat_flash", "sdpa")]


def title(family: Family) -> str:
    return f"{family.model_type}, {family.remark}"


def assert_as_expected(family: Family, result: FamilyResult) -> None:
    if result.result == trials.SKIPPED:
        pytest.skip(f"{family.model_type}: {result.reason}")
    assert result.result == (trials.REFUSED if family.is_refused else trials.PASSES), result.reason


class TestFamilies:
    @pytest.mark.parametrize(("model_type", "attention"), FEW)
    def test_one_of_each_way(self, model_type: str, attention: str) -> None:
        (family,) = families_named([model_type])
        assert_as_expected(family, try_family(family, attentions=[attention]))

    @pytest.mark.parametrize("family", REFUSED_FAMILIES, ids=title)
    def test_what_cannot_take_tokens_back_is_refused_by_name(self, family: Family) -> None:
        assert_as_expected(family, try_family(family))

    @pytest.mark.slow
    @pytest.mark.parametrize("family", [each for each in FAMILIES if not each.is_refused], ids=title)
    def test_all(self, family: Family) -> None:
        assert_as_expected(family, try_family(family))

    @pytest.mark.slow
    @pytest.mark.parametrize("model_type", WITH_PROCESS)
    def test_some_with_a_process_of_the_assistants_own(self, model_type: str) -> None:
        family = families_named([model_type])[0]
        assert_as_expected(family, try_family(family, "process"))

    def test_there_are_enough(self) -> None:
        assert len({each.model_type for each in FAMILIES if not each.is_refused}) >= 40
        assert len({(each.model_type, each.remark) for each in FAMILIES}) == len(FAMILIES)

    def test_a_family_is_the_same_each_time_and_leaves_the_random_state_alone(self) -> None:
        before = torch.get_rng_state()
        first, second = (Family("llama").make().state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert torch.equal(torch.get_rng_state(), before)

    def test_one_that_this_version_lacks_is_skipped_by_name(self) -> None:
        result = try_family(Family("no_such_family"))
        assert (result.result, result.reason) == (trials.SKIPPED, "not in this version of transformers")

    def test_another_text_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generate = trials.generate_with_ssd

        def wrong(target, **kwargs):
            ids = generate(target, **kwargs)
            ids[0, -1] = (ids[0, -1] + 1) % 64
            return ids

        monkeypatch.setattr(trials, "generate_with_ssd", wrong)
        result = try_family(Family("llama"), attentions=["sdpa"])
        assert result.result == trials.FAILS
        assert f"token {trials.NUM_TOKENS - 1} of row 0 differs" in str(result.reason)

    def test_drafts_that_are_never_right_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trials, "MIN_OWN_ACCEPTANCE", 1.1)
        result = try_family(Family("llama"), attentions=["sdpa"])
        assert result.result == trials.FAILS
        assert "a copy of the target drafts for it" in str(result.reason)


class TestWhatTheFamiliesFound:
    def test_windows_that_go_by_slots_allow_no_branches_and_no_holes(self) -> None:
        (family,) = families_named(["gpt_neo"])
        local, everywhere = family.make(), family.make(attention_types=[[["global"], 2]])
        assert counts_slots(local)
        assert masks_of(local) is Masks.OWN
        assert not decodes_together(local, {})
        assert not counts_slots(everywhere)
        assert masks_of(everywhere) is not Masks.OWN

    @pytest.mark.parametrize("role", ["target", "assistant"])
    @pytest.mark.parametrize(
        ("model_type", "match"),
        [
            ("lfm2", "Lfm2ForCausalLM keeps a recurrent state"),  # transformers calls it no stateful model
            ("openai-gpt", "OpenAIGPTLMHeadModel takes none"),
            ("cpmant", "CpmAntForCausalLM puts others of its own before them"),
        ],
    )
    def test_refusals_name_the_role_the_class_and_the_cause(self, role: str, model_type: str, match: str) -> None:
        (family,) = families_named([model_type])
        with pytest.raises(UnsupportedError, match=f"The {role} must .*{match}.*Change that"):
            check_model(role, family.make())

    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_a_repetition_penalty_is_drafted_with(self, num_rows: int) -> None:
        """It knows the padding of each row of the batch, and drafting gives it other numbers of rows."""
        target, twin = Family("llama").make(), Family("llama").make()
        prompts = text_prompts(num_rows)
        config = {"backend": "inline", "num_assistant_tokens": 4}
        settings = {"repetition_penalty": 1.5, "max_new_tokens": 28, "do_sample": False}
        plain = target.generate(**prompts, **settings)
        ids = generate_with_ssd(target, assistant_model=twin, ssd_config=config, **prompts, **settings)
        assert ids.tolist() == plain.tolist()
        assert target.ssd_stats.acceptance > 0.95

    def test_a_layer_that_is_not_known_is_refused(self) -> None:
        family = next(each for each in FAMILIES if "block-sparse" in each.remark)
        if not family.is_known:
            pytest.skip("not in this version of transformers")
        with pytest.raises(UnsupportedError, match=r"keeps what it read in MiniMaxM3VLSparse\w+"):
            check_model("target", family.make())


class TestCalls:
    def test_random_valid_calls(self) -> None:
        assert_no_failure([try_valid(1, number) for number in range(15)])

    def test_random_calls_with_one_thing_wrong(self) -> None:
        assert_no_failure([try_invalid(1, number) for number in range(42)])  # each fault once

    @pytest.mark.slow
    @pytest.mark.parametrize("first", range(0, 500, 50))
    def test_500_valid_calls(self, first: int) -> None:
        results = [try_valid(0, number) for number in range(first, first + 50)]
        assert_no_failure(results)
        assert sum(each.result == RAISES_TOO for each in results) < 5

    @pytest.mark.slow
    def test_200_calls_with_one_thing_wrong(self) -> None:
        assert_no_failure([try_invalid(0, number) for number in range(200)])

    def test_calls_are_the_same_each_time_and_differ(self) -> None:
        calls = [str(draw_valid(3, number)) for number in range(40)]
        assert calls == [str(draw_valid(3, number)) for number in range(40)]
        assert len(set(calls)) == 40
        faults = {draw_invalid(3, number).fault for number in range(200)}
        assert {"temperature", "use_cache", "fan_out", "seed"} <= faults

    def test_another_text_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_ssd.matrix import call_trials

        generate = call_trials.generate_with_ssd
        number = next(n for n in range(100) if draw_valid(0, n).arguments["do_sample"])

        def wrong(target, *, ssd_config, **kwargs):
            if ssd_config.mode != "ar":
                ssd_config = replace(ssd_config, seed=ssd_config.seed + 1)
            return generate(target, ssd_config=ssd_config, **kwargs)

        monkeypatch.setattr(call_trials, "generate_with_ssd", wrong)
        assert try_valid(0, number).result == FAILS

    def test_a_call_that_hangs_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_ssd.matrix import call_trials

        monkeypatch.setattr(call_trials, "TIMEOUT_S", 0.0)
        result = try_valid(0, 0)
        assert result.result == FAILS
        assert "No answer within" in str(result.reason)


class TestCommands:
    def test_families(self, tmp_path: Path) -> None:
        page = tmp_path / "families.md"
        arguments = [
            "families",
            "--only",
            "stablelm",
            "--only",
            "rwkv",
            "--jobs",
            "1",
            "--markdown",
            str(page),
            "--json",
        ]
        run = CliRunner().invoke(app, arguments)
        assert run.exit_code == 0, run.output
        results = {each["model_type"]: each for each in json.loads(run.stdout)}
        assert results["stablelm"]["result"] == "passes"
        assert results["rwkv"]["result"] == "refused"
        text = page.read_text()
        assert "2 models of 2 families: 1 pass, 1 are refused, 0 fail." in text
        assert "| rwkv | RwkvForCausalLM | RWKV |" in text
        assert "RwkvForCausalLM keeps a recurrent state |" in text

    def test_a_family_that_there_is_none_of(self) -> None:
        run = CliRunner().invoke(app, ["families", "--only", "lama"])
        assert run.exit_code == 2
        assert "`only` must name families, but got ['lama']" in run.output

    def test_arguments(self) -> None:
        run = CliRunner().invoke(app, ["arguments", "--valid", "2", "--invalid", "4", "--json"])
        assert run.exit_code == 0, run.output
        counts = json.loads(run.stdout)
        assert sum(counts["valid"].values()) == 2
        assert counts["invalid"] == {"refused": 4}
        assert counts["failures"] == []


def assert_no_failure(results: list[CallResult]) -> None:
    failures = [f"{each.call}\n  {each.reason}" for each in results if each.result == FAILS]
    assert not failures, "\n".join(failures)
    assert {each.result for each in results} <= {EQUAL, RAISES_TOO, REFUSED}
