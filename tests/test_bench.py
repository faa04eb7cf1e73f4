from __future__ import annotations

import builtins
import json
import re
import time
from pathlib import Path

import pytest
from tiny_pair import save_tiny_pair
from typer.testing import CliRunner

from hf_ssd.bench.arms import build_arms
from hf_ssd.bench.bench_settings import BenchSettings, parse_variant
from hf_ssd.bench.benchmark import Benchmark
from hf_ssd.bench.figures import BenchResult
from hf_ssd.bench.files import write_files
from hf_ssd.bench.markdown import write_report
from hf_ssd.bench.profile import Profile
from hf_ssd.cli import app
from hf_ssd.config import SSDConfig

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "poems"], r"`suite` must be one of .*'poems'"),
        (["--sample", "0"], r"`sample` must be between 1 and \d+.*0"),
        (["--sample", "999"], r"`sample` must be between 1 and \d+.*999"),
        (["--prompt-tokens", "512"], r"`prompt_tokens` is for the suite 'long'.*\[512\] with 'code'"),
        (["--suite", "long", "--prompt-tokens", "0"], r"`prompt_tokens` must be at least 1.*\[0\]"),
        (["--suite", "long", "--prompt-tokens", "many"], r"`prompt_tokens` must be whole numbers.*'many'"),
        (["--temperatures", "0,hot"], r"`temperatures` must be numbers.*'0,hot'"),
        (["--temperatures", "0,-1"], r"`temperatures` must be 0 .*-1"),
        (["--temperatures", ","], r"`temperatures` must hold at least one number"),
        (["--arms", "ar,beam"], r"`arms` must be some of .*'prompt_lookup'.*\['beam'\]"),
        (["--draft-lengths", "0"], r"`draft_lengths` must be at least 1.*\[0\]"),
        (["--variant", "wide"], r"`variant` must have the form .*'wide'"),
        (["--variant", "wide:cache_budget"], r"`variant` must have the form .*'wide:cache_budget'"),
        (["--variant", "wide:budget=3"], r"`variant` must set fields of SSDConfig .*'wide' sets \['budget'\]"),
        (["--variant", "wide:cache_budget=0"], r"`variant` 'wide': `cache_budget` must be at least 1.*0"),
        (["--max-new-tokens", "1"], r"`max_new_tokens` must be at least 2.*1"),
        (["--repeats", "0"], r"`repeats` must be at least 1.*0"),
        (["--target", "somewhere"], r"`target` needs `assistant` too.*'somewhere'"),
        (["--out", __file__], r"`out` must be a folder.*test_bench\.py"),
    ],
)
def test_a_bad_option_is_refused_before_a_model_is_loaded(arguments: list[str], message: str) -> None:
    start = time.perf_counter()
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("arguments", "package"), [(["--out", "folder"], "matplotlib"), (["--suite", "hub:some/name"], "datasets")]
)
def test_a_missing_package_is_named_with_its_extra(
    arguments: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert package in result.stderr
    assert 'pip install "hf-ssd[bench]"' in result.stderr.replace("\n", " ")


def test_variants_are_read_with_their_types() -> None:
    assert parse_variant("all tokens: draft_vocab_size=none, fan_out=4/2/1,timeout_s=2.5,mode=sd,trace=true") == (
        "all tokens",
        {"draft_vocab_size": None, "fan_out": (4, 2, 1), "timeout_s": 2.5, "mode": "sd", "trace": True},
    )
    assert parse_variant("no backup: backup=none") == ("no backup", {"backup": "none"})


def test_every_arm_runs_on_the_threads_that_its_name_says() -> None:
    arms = build_arms(
        BenchSettings.KNOWN_ARMS,
        SSDConfig(),
        target_threads=3,
        assistant_threads=1,
        all_cores=4,
        draft_lengths=(5,),
        ssd_variants={"ssd: two": {"assistant_threads": 2, "cache_budget": 4}},
    )
    assert [(arm.label, arm.target_threads, arm.assistant_threads) for arm in arms] == [
        ("ar", 3, None),
        ("ar_all_cores", 4, None),
        ("hf_assisted (defaults)", 3, None),
        ("hf_assisted (K=5)", 3, None),
        ("hf_assisted_all_cores (defaults)", 4, None),
        ("hf_assisted_all_cores (K=5)", 4, None),
        ("hf_assisted_int8 (defaults)", 3, None),
        ("hf_assisted_int8 (K=5)", 3, None),
        ("hf_assisted_int8_all_cores (defaults)", 4, None),
        ("hf_assisted_int8_all_cores (K=5)", 4, None),
        ("prompt_lookup (K=3)", 3, None),
        ("prompt_lookup (K=10)", 3, None),
        ("prompt_lookup_all_cores (K=3)", 4, None),
        ("prompt_lookup_all_cores (K=10)", 4, None),
        ("sd", 3, 1),
        ("ssd", 3, 1),
        ("ssd: two", 3, 2),
    ]
    assert arms[-1].config is not None
    assert (arms[-1].config.cache_budget, arms[-2].config.cache_budget) == (4, "auto")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> BenchSettings:
    folder = tmp_path_factory.mktemp("bench")
    target, assistant = save_tiny_pair(folder)
    rows = [{"category": kind, "turns": [f"{kind} {i}"]} for kind in ("math_reasoning", "qa") for i in range(2)]
    suite = folder / "questions.jsonl"
    suite.write_text("\n".join(map(json.dumps, rows)))
    return BenchSettings(
        target=str(target),
        assistant=str(assistant),
        dtype="float32",
        suite=str(suite),
        max_new_tokens=12,
        temperatures=(0.0, 1.0),
        sample=3,
        draft_lengths=(2,),
        arms=("ar", "hf_assisted", "hf_assisted_int8", "prompt_lookup", "sd", "ssd"),
        variants={"small budget": {"cache_budget": 2}},
    )


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def result(settings: BenchSettings, steps: list[tuple[str, int, int]]) -> BenchResult:
    return Benchmark(settings, lambda *step: steps.append(step)).run()


ARMS = ["ar", "hf_assisted", "hf_assisted_int8", "prompt_lookup", "sd", "ssd", "ssd: small budget"]


def test_all_arms_write_the_same_texts_of_the_same_length(result: BenchResult) -> None:
    greedy, sampled = result.measurements
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    assert list(greedy.arms) == list(sampled.arms) == ARMS
    for name, arm in greedy.arms.items():
        assert arm.identical_to_ar == (3, 3), name
        assert arm.degraded is None
    assert all(arm.identical_to_ar is None for arm in sampled.arms.values())
    assert [prompt.num_new_tokens for prompt in greedy.prompts] == [12] * 3


def test_every_figure_has_an_interval_around_it(result: BenchResult) -> None:
    for measurement in result.measurements:
        for arm in measurement.arms.values():
            for estimate in (arm.tokens_per_s, *arm.ratios.values(), *arm.decode_ratios.values()):
                assert estimate.low <= estimate.value <= estimate.high
            assert set(arm.ratios) == set(ARMS[:4])
        assert measurement.arms["ar"].ratios["ar"].value == 1.0
        assert {category: len(arms) for category, arms in measurement.categories.items()} == {
            "math_reasoning": 7,
            "qa": 7,
        }


def test_rounds_and_profiles_are_kept_for_sd_and_ssd(result: BenchResult) -> None:
    for measurement in result.measurements:
        for name, arm in measurement.arms.items():
            assert (arm.rounds is not None) is (name in ARMS[4:])
        sd, ssd = measurement.arms["sd"], measurement.arms["ssd"]
        assert sd.rounds.hit_rate is None
        assert ssd.rounds.hit_rate is not None
        assert ssd.rounds.acceptance_by_position
        assert ssd.settings["cache_budget"] == "auto"
        assert measurement.arms["ssd: small budget"].settings["cache_budget"] == 2


def test_fan_outs_are_tried_at_every_temperature(result: BenchResult) -> None:
    assert [figures.temperature for figures in result.fan_outs] == [0.0, 1.0]
    for figures in result.fan_outs:
        assert list(figures.hit_rates) == ["per_instance", "geometric", "uniform"]
        assert figures.budgets == (4, 8, 16, 32)
        assert figures.num_rounds > 3


def test_progress_counts_every_call_once(result: BenchResult, steps: list[tuple[str, int, int]]) -> None:
    counted = [step for step in steps if step[2]]
    # 10 arms and variants: a warm-up and 3 prompts each; then 3 recordings; at two temperatures.
    assert {total for _, _, total in counted} == {2 * (10 + 10 * 3 + 3)}
    assert [done for _, done, _ in counted] == sorted(done for _, done, _ in counted)
    assert counted[-1][1] == counted[-1][2]


def test_the_json_holds_everything_but_the_spans(result: BenchResult) -> None:
    values = json.loads(json.dumps(result.to_dict()))
    assert "trace" not in values
    assert values["environment"]["torch"]
    ssd = values["measurements"][0]["arms"]["ssd"]
    assert set(ssd["ratios"]["ar"]) == {"value", "low", "high"}
    assert Profile.from_dict(ssd["profile"]).mode == "ssd"
    assert values["measurements"][0]["arms"]["sd"]["profile"]["mode"] == "sd"
    assert values["measurements"][0]["categories"]["qa"]["ssd"]["profile"] is None
    assert values["overlap"]["verify_ms"] > 0


def test_report_and_plots_are_written(result: BenchResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = write_files(result, tmp_path)
    plots = ["acceptance.png", "fan_outs.png", "speedup_t0.png", "speedup_t1.png", "time_line.png"]
    plots += ["speedup_decode_t0.png", "speedup_decode_t1.png", "tokens_per_round.png"]
    assert sorted(names) == sorted(["bench.json", "report.md", "trace.json", *plots])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in plots:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "report.md").read_text()
    for name in plots:
        assert f"]({name})" in report
    for words in ("math_reasoning", "SSD, small budget", "Prompt lookup", "per-instance less uniform", "torch"):
        assert words in report
    lines = [line for line in report.splitlines() if line.startswith("|")]
    assert all(line.count("|") >= 5 for line in lines)


def test_a_report_needs_neither_ar_nor_ssd(result: BenchResult) -> None:
    import dataclasses

    measurement = result.measurements[0]
    only_sd = dataclasses.replace(
        measurement,
        arms={"sd": dataclasses.replace(measurement.arms["sd"], ratios={}, decode_ratios={})},
        categories={name: {} for name in measurement.categories},
    )
    report = write_report(dataclasses.replace(result, measurements=(only_sd,), fan_outs=(), trace=None))
    assert "| SD |" in report
    assert "Fan-outs" not in report


def test_the_command_prints_json_and_nothing_else(settings: BenchSettings, tmp_path: Path) -> None:
    arguments = ["--target", settings.target, "--assistant", settings.assistant, "--dtype", "float32"]
    arguments += ["--arms", "ar", "--temperatures", "0", "--sample", "1", "--max-new-tokens", "4", "--no-replay"]
    result = runner.invoke(app, ["bench", *arguments, "--suite", settings.suite, "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert list(values["measurements"][0]["arms"]) == ["ar"]
    assert values["fan_outs"] == []


def test_prompts_longer_than_the_target_reads_are_refused(settings: BenchSettings) -> None:
    arguments = ["--target", settings.target, "--assistant", settings.assistant, "--dtype", "float32"]
    result = runner.invoke(app, ["bench", *arguments, "--suite", "long", "--prompt-tokens", "1020"])
    assert result.exit_code == 2
    message = result.stderr.replace("\n", " ")
    assert re.search(r"room for 64 new tokens within the 1024 that the target can read.*has 1020", message)
