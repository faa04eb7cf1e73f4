"""`hf-ssd frontier`: all of it on a tiny pair, and its figures against the benchmark's."""

from __future__ import annotations

import json

import pytest
from tiny_pair import save_tiny_pair
from typer.testing import CliRunner

from hf_ssd.bench import benchmark
from hf_ssd.bench.arms import build_arms
from hf_ssd.bench.bench_settings import BenchSettings
from hf_ssd.bench.benchmark import Benchmark
from hf_ssd.bench.frontier import frontier_of, frontier_variants
from hf_ssd.bench.frontier_report import write_frontier
from hf_ssd.cli import app
from hf_ssd.config import SSDConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, str]:
    return tuple(map(str, save_tiny_pair(tmp_path_factory.mktemp("pair"))))


@pytest.fixture(scope="module")
def found(pair):
    target, assistant = pair
    settings = BenchSettings(
        target=target,
        assistant=assistant,
        dtype="float32",
        suite="chat",
        sample=1,
        max_new_tokens=40,
        temperatures=(0.0, 0.7, 1.0),
        arms=("ar",),
        variants=frontier_variants(("coupled", "block"), (1.0, 0.4)),
        replay=False,
    )
    return frontier_of(Benchmark(settings).run())


def test_has_every_rule_and_coefficient_at_every_temperature(found) -> None:
    assert found.temperatures == (0.7, 1.0)
    expected = [("coupled", 1.0), ("coupled", 0.4), ("block", 1.0), ("block", 0.4)]
    for temperature in found.temperatures:
        points = found.at(temperature)
        assert [(point.rule, point.coefficient) for point in points] == expected
        assert found.fastest(temperature) in points
        for point in points:
            assert 0 <= point.acceptance <= 1
            assert 0 <= point.hit_rate <= 1
            assert point.hit_rate_to_greedy is None or found.greedy.hit_rate > 0
            if point.hit_rate_to_greedy is not None:
                assert point.hit_rate_to_greedy * found.greedy.hit_rate == pytest.approx(point.hit_rate)
            assert point.tokens_per_s.value > 0
            assert point.speed_up.value > 0
    assert found.greedy.temperature == 0


def test_greedily_the_arms_are_one(found) -> None:
    greedy, sampled, _ = found.bench.measurements
    assert len(greedy.arms) == 2  # AR and one of SSD
    assert len(sampled.arms) == 5


def test_arms_that_differ_otherwise_all_run_greedily(pair, monkeypatch) -> None:
    variants = {
        "chains": {"draft_tree_size": None},
        "again": {},
        "token": {"verification": "token"},
        "token, chains": {"verification": "token", "draft_tree_size": None},
    }
    bench = Benchmark(BenchSettings(suite="chat", sample=1, arms=("ar", "sd", "ssd"), replay=False))
    bench._arms = build_arms(("ar", "sd", "ssd"), SSDConfig(), 1, 1, 2, ssd_variants=variants)
    assert [arm.name for arm in bench._arms_at(0.0)] == ["ar", "sd", "ssd", "chains", "again"]
    assert bench._arms_at(0.5) == bench._arms
    assert benchmark.greedy_settings(SSDConfig(seed=3, saguaro_coefficient=0.2)) == SSDConfig()


def test_the_report_says_what_was_measured(found) -> None:
    report = write_frontier(found)
    for point in found.points:
        assert f"| {point.rule} | {point.coefficient:g} | {point.acceptance:.2f} | {point.hit_rate:.2f} |" in report
    assert "frontier.png" not in report
    json.dumps(found.to_dict())


def test_the_command(pair, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    target, assistant = pair
    arguments = ["--target", target, "--assistant", assistant, "--dtype", "float32", "--sample", "1"]
    arguments += ["--max-new-tokens", "12", "--temperatures", "1", "--rules", "token", "--coefficients", "1,0.5"]
    result = CliRunner().invoke(app, ["frontier", *arguments, "--out", str(tmp_path / "new"), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "new" / "frontier.json").read_text())
    assert [point["coefficient"] for point in printed["points"]] == [1.0, 0.5]
    assert printed["fastest"]["1"]["rule"] == "token"
    assert (tmp_path / "new" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "![Acceptance against hit rate](frontier.png)" in (tmp_path / "new" / "frontier.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperatures", "0,0.5"], "`temperatures` must be above 0"),
        (["--rules", "magic"], "`verification` must be one of"),
        (["--rules", ""], "`rules` must hold at least one value"),
        (["--coefficients", "2"], "`saguaro_coefficient` must lie above 0"),
        (["--coefficients", "x"], "`coefficients` must be numbers"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["frontier", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
