"""Our modules as a user loads them with `evaluate`, without a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import pytest
from tiny_models import make_noisy, make_target, prompt

import hf_ssd
from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.evaluation import MODULE_NAMES, load_metric, metric_path, round_columns

OFFLINE_PROBE = """
import json, sys
import evaluate
from hf_ssd.evaluation import metric_path
metric = evaluate.load(metric_path("losslessness"), cache_dir=sys.argv[1])
metric.add_batch(predictions=[[1, 2]], references=[[1, 3]])
metric.add_batch(predictions=[[4]], references=[[4]])
print(json.dumps([metric.compute(), [path for path in sys.modules if path.startswith("hf_ssd.pairs")]]))
"""


@pytest.mark.parametrize("name", MODULE_NAMES)
def test_every_module_says_what_it_is(name: str) -> None:
    metric = load_metric(name)
    assert isinstance(metric, evaluate.Metric)
    assert metric.module_type == "metric"
    assert "@article" in metric.citation
    assert "Returns:" in metric.inputs_description
    assert len(metric.description) > 100
    assert set(metric.features)


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`name` must be one of .*'losslessness'.*'acuracy'"):
        metric_path("acuracy")


@pytest.mark.slow
def test_a_module_loads_offline_into_a_cache_of_ones_own(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(hf_ssd.__file__).parent.parent)
    command = [sys.executable, "-c", OFFLINE_PROBE, str(tmp_path / "data")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    result, loaded = json.loads(run.stdout)
    assert result == {
        "identical_share": 0.5,
        "num_identical": 1,
        "num_texts": 2,
        "token_share": pytest.approx(2 / 3),
        "first_differences": [{"index": 0, "position": 1, "gap": None}],
    }
    assert loaded == []
    assert list((tmp_path / "modules").rglob("losslessness.py"))


def test_losslessness_tells_where_and_how_close() -> None:
    metric = load_metric("losslessness", "gaps")
    metric.add_batch(predictions=[[5, 6, 7], [5, 6]], references=[[5, 6, 7], [5, 9]], reference_gaps=[[], [1.5, 0.25]])
    metric.add_batch(predictions=[[1, 2, 3]], references=[[1, 2]], reference_gaps=[[2.0, 2.0]])
    result = metric.compute()
    assert result["identical_share"] == pytest.approx(1 / 3)
    assert result["token_share"] == pytest.approx(6 / 7)
    assert result["first_differences"] == [
        {"index": 1, "position": 1, "gap": 0.25},
        {"index": 2, "position": 2, "gap": None},  # AR's text has ended there
    ]


def test_distribution_match_compares_within_prompts() -> None:
    # Each prompt has one outcome of its own: pooled over prompts samplers look alike, within them as well.
    metric = load_metric("distribution_match")
    for prompt_number in range(3):
        metric.add_batch(
            predictions=[[prompt_number, 1]] * 20, references=[[prompt_number, 2]] * 20, prompts=[prompt_number] * 20
        )
    same = metric.compute(num_permutations=199)
    assert same["total_variation"] == 0
    assert same["permutation_p_value"] == same["chi_square_p_value"] == 1
    assert same["num_prompts"] == 3


def test_distribution_match_sees_what_differs_in_more_tokens() -> None:
    metric = load_metric("distribution_match")
    metric.add_batch(predictions=[[1, 1]] * 20, references=[[1, 2]] * 20, prompts=[0] * 20)
    result = metric.compute(num_tokens=2, num_permutations=199)
    assert result["total_variation"] == 1
    assert result["permutation_p_value"] == 1 / 200
    assert result["chi_square"] == pytest.approx(40)
    assert result["degrees_of_freedom"] == 1
    assert result["chi_square_p_value"] < 1e-8


def test_acceptance_is_what_the_statistics_of_a_call_say() -> None:
    target, assistant = make_target(), make_noisy()
    enable_ssd(target, assistant_model=assistant, ssd_config=SSDConfig(backend="inline"))
    metric = load_metric("acceptance")
    rounds = []
    for seed in range(2):
        target.generate(prompt(seed=seed), max_new_tokens=32, do_sample=False)
        metric.add_batch(**round_columns(target.ssd_stats))
        rounds.append(target.ssd_stats)
    result = metric.compute()
    assert result["num_rounds"] == sum(stats.num_rounds for stats in rounds)
    emitted = sum(r.num_emitted for stats in rounds for r in stats.rounds)
    assert result["tokens_per_round"] == pytest.approx(emitted / result["num_rounds"])
    hits = sum(stats.num_hits for stats in rounds)
    assert result["hit_rate"] == pytest.approx(hits / (hits + sum(stats.num_misses for stats in rounds)))
    accepted = sum(r.num_accepted for stats in rounds for r in stats.rounds)
    reached = sum(r.num_reached for stats in rounds for r in stats.rounds)
    assert result["acceptance"] == pytest.approx(accepted / reached)
    assert 0 < result["acceptance_by_position"][0] <= 1


def test_acceptance_without_an_assistant_has_no_rates() -> None:
    metric = load_metric("acceptance")
    metric.add_batch(accepted=[0, 0], reached=[0, 0], emitted=[1, 1], hit=[-1, -1])
    assert metric.compute() == {
        "num_rounds": 2,
        "tokens_per_round": 1.0,
        "acceptance": None,
        "acceptance_by_position": [],
        "hit_rate": None,
    }
