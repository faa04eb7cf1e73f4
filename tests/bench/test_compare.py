"""`hf-ssd compare` as a user runs it, on a tiny pair in float32, through the real worker process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from other_tokenizer_pair import make_pair
from tiny_models import make_noisy, make_target
from tiny_pair import byte_tokenizer, save_tiny_pair
from tiny_tokenizers import byte_level
from typer.testing import CliRunner

from hf_ssd.bench.arms import Runner, build_arms
from hf_ssd.bench.encoding import encode
from hf_ssd.bench.prompts import Prompt
from hf_ssd.bench.schedule import schedule
from hf_ssd.bench.settings import ARM_NAMES, CompareSettings
from hf_ssd.cli import app
from hf_ssd.config import SSDConfig

TEXTS = ("What is a cache?", "Count from one to ten in words.")
PEERS = ("ar", "ar_all_cores", "hf_assisted", "hf_assisted_all_cores")
SSD_FIGURES = ("tokens_per_round", "acceptance", "hit_rate", "depth_at_hit", "verify_ms", "wait_ms", "draft_ms")


@pytest.fixture(scope="module")
def pair_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, assistant = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    return ["--target", str(target), "--assistant", str(assistant), "--dtype", "float32", "--max-new-tokens", "24"]


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="module")
def report(pair_options: list[str], trace_path: Path) -> dict[str, Any]:
    options = ["--prompt", TEXTS[0], "--prompt", TEXTS[1], "--repeats", "2", "--trace", str(trace_path), "--json"]
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["compare", *pair_options, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert torch.get_num_threads() == threads
    return json.loads(result.stdout)  # nothing but JSON on standard output


def test_the_report_has_the_documented_fields(report: dict[str, Any], pair_options: list[str]) -> None:
    assert report["pair"] == {"target": pair_options[1], "assistant": pair_options[3]}
    assert report["dtype"] == "float32"
    assert report["generation"]["max_new_tokens"] == 24
    assert report["environment"]["torch"] == torch.__version__
    assert tuple(report["arms"]) == ARM_NAMES
    ratios = {f"ratio_to_{peer}" for peer in PEERS}
    speeds = {"tokens_per_s", "decode_tokens_per_s", "ttft_ms"}
    others = {"identical_to_ar", "first_differences", "threads", "settings", "degraded", "profile"}
    fields = {*speeds, *ratios, *SSD_FIGURES, *others}
    for arm in report["arms"].values():
        assert set(arm) == fields
        assert arm["tokens_per_s"] > 0
        assert arm["decode_tokens_per_s"] > 0
        assert arm["ttft_ms"] > 0
        assert arm["degraded"] is None


def test_every_text_is_ar_s_in_float32(report: dict[str, Any]) -> None:
    for arm in report["arms"].values():
        assert arm["identical_to_ar"] == [len(TEXTS), len(TEXTS)]
        assert arm["first_differences"] == []


def test_ratios_divide_by_the_arms_they_name(report: dict[str, Any]) -> None:
    arms = report["arms"]
    for arm in arms.values():
        for peer in PEERS:
            assert arm[f"ratio_to_{peer}"] == pytest.approx(arm["tokens_per_s"] / arms[peer]["tokens_per_s"])


def test_figures_that_an_arm_does_not_have_are_null(report: dict[str, Any]) -> None:
    arms = report["arms"]
    # Whether so short a text has a hit, and with it a depth at hits, is up to the clock.
    assert all(arms["ssd"][figure] is not None for figure in SSD_FIGURES if figure != "depth_at_hit")
    assert arms["sd"]["hit_rate"] is None
    assert arms["sd"]["depth_at_hit"] is None
    assert arms["sd"]["acceptance"] > 0
    assert arms["ar"]["tokens_per_round"] == 1
    assert arms["hf_assisted"]["tokens_per_round"] > 1
    for name in PEERS:
        assert all(arms[name][figure] is None for figure in SSD_FIGURES[1:])


def test_threads_and_settings_are_stated(report: dict[str, Any]) -> None:
    arms = report["arms"]
    target = arms["ar"]["threads"]["target"]
    assert arms["ar"]["threads"] == {"target": target, "assistant": None, "total": target}
    assert arms["hf_assisted"]["threads"]["total"] == target
    assert arms["ssd"]["threads"]["target"] == arms["sd"]["threads"]["target"] == target
    assert arms["ssd"]["threads"]["assistant"] >= 1
    assert arms["ar_all_cores"]["threads"]["total"] == report["environment"]["available_cores"]
    assert arms["ssd"]["settings"]["mode"] == "ssd"
    assert arms["ssd"]["settings"]["cache_budget"] == SSDConfig().cache_budget
    tried = arms["hf_assisted"]["settings"]["tried_tokens_per_s"]
    assert set(tried) == {"defaults", "K=3", "K=5"}
    assert (
        tried[arms["hf_assisted"]["settings"]["variant"]] == max(tried.values()) == arms["hf_assisted"]["tokens_per_s"]
    )


def test_prompts_are_listed_with_their_speeds(report: dict[str, Any]) -> None:
    assert [(p["kind"], p["text"]) for p in report["prompts"]] == [("own", text) for text in TEXTS]
    for prompt in report["prompts"]:
        assert prompt["num_prompt_tokens"] == len(f"<user>{prompt['text']}<assistant>")  # one token per byte
        assert prompt["num_new_tokens"] == 24
        assert set(prompt["tokens_per_s"]) == set(ARM_NAMES)


def test_the_trace_shows_both_sides_and_their_overlap(report: dict[str, Any], trace_path: Path) -> None:
    events = [e for e in json.loads(trace_path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {1, 2}
    assert {"verify", "draft step"} <= {e["name"] for e in events}
    assert report["overlap"]["verify_ms"] > 0
    # That both sides work at once is shown in tests/runtime; how much a short text has of it is the machine's business.
    assert 0 <= report["overlap"]["overlap_ms"] <= report["overlap"]["verify_ms"]


def test_the_table_says_in_words_what_it_means(pair_options: list[str]) -> None:
    result = CliRunner().invoke(app, ["compare", *pair_options, "--prompt", TEXTS[0]], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "SSD's speed against transformers' assisted generation: " in words
    assert "SSD 1 of 1" in words
    assert "warming up" in result.stderr


def test_sampling_runs_every_arm_and_compares_no_texts(pair_options: list[str]) -> None:
    options = ["--prompt", TEXTS[0], "--temperature", "0.8", "--top-k", "20", "--arms", "ar,hf_assisted,ssd", "--json"]
    result = CliRunner().invoke(app, ["compare", *pair_options, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report["arms"]) == {"ar", "hf_assisted", "ssd"}
    assert report["generation"]["do_sample"]
    assert report["generation"]["top_k"] == 20
    assert report["arms"]["ssd"]["identical_to_ar"] is None
    assert report["arms"]["ssd"]["ratio_to_ar_all_cores"] is None


def test_a_runner_leaves_models_and_threads_as_they_were() -> None:
    target, assistant = make_target(vocab_size=258), make_noisy(vocab_size=258)
    before = [(type(m), m.generation_config, m.generation_config.to_dict()) for m in (target, assistant)]
    threads = torch.get_num_threads()
    inputs = encode(byte_tokenizer(), Prompt("own", TEXTS[0]))
    arms = build_arms(ARM_NAMES, SSDConfig(), 1, 1, 2)
    with Runner(target, assistant, {"do_sample": False}) as runner:
        texts = {arm.label: runner.run(arm, inputs, 12).tokens for arm in arms}
        assert torch.get_num_threads() == threads
    assert len(texts) == len(arms)
    assert len(set(texts.values())) == 1
    for model, (kind, config, values) in zip((target, assistant), before, strict=True):
        assert type(model) is kind
        assert model.generation_config is config
        assert model.generation_config.to_dict() == values


def test_the_schedule_warms_up_then_takes_turns() -> None:
    arms = build_arms(ARM_NAMES, SSDConfig(), 1, 1, 2)
    assert len(arms) == 10
    steps = schedule(arms, num_prompts=3, repeats=2)
    assert [step.arm for step in steps[:10]] == list(arms)
    assert all(step.repeat is None for step in steps[:10])
    turns = [steps[i : i + 10] for i in range(10, len(steps), 10)]
    assert [(turn[0].repeat, turn[0].prompt) for turn in turns] == [(r, p) for r in range(2) for p in range(3)]
    for turn in turns:
        assert {step.arm for step in turn} == set(arms)
        assert len({(step.repeat, step.prompt) for step in turn}) == 1
    assert len({turn[0].arm for turn in turns}) == len(turns)


def test_without_a_chat_template_the_text_is_taken_as_it_is() -> None:
    tokens = encode(byte_tokenizer(chat_template=None), Prompt("own", "abc"))
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape == (1, 3)


def test_settings_build_the_config_that_is_measured() -> None:
    settings = CompareSettings(
        num_assistant_tokens=3, cache_budget=7, draft_vocab_size=None, target_threads=2, backup="none"
    )
    assert settings.ssd_config == SSDConfig(
        num_assistant_tokens=3, cache_budget=7, draft_vocab_size=None, target_threads=2, backup="none"
    )
    assert CompareSettings(temperature=0.5, top_p=0.9).sampling == {
        "do_sample": True, "num_beams": 1, "temperature": 0.5, "top_k": 0, "top_p": 0.9,
    }  # fmt: skip


@pytest.mark.slow
def test_a_pair_with_two_tokenizers(tmp_path: Path) -> None:
    """transformers' own assisted generation gets both tokenizers too."""
    tokenizers = byte_level(420), byte_level(320)
    for name, model, tokenizer in zip(("target", "assistant"), make_pair(*tokenizers), tokenizers, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = ["--target", str(tmp_path / "target"), "--assistant", str(tmp_path / "assistant"), "--dtype", "float32"]
    options = [
        "--prompt",
        "The cat",
        "--repeats",
        "1",
        "--max-new-tokens",
        "12",
        "--arms",
        "ar,hf_assisted,ssd",
        "--json",
    ]
    result = CliRunner().invoke(app, ["compare", *pair, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    arms = json.loads(result.stdout)["arms"]
    assert [arms[name]["identical_to_ar"] for name in ("ar", "hf_assisted", "ssd")] == [[1, 1]] * 3
    assert arms["ssd"]["degraded"] is None
