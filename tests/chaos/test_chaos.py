"""That runs are what they say, notice what is wrong, and go well."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_ssd.chaos import trials
from hf_ssd.chaos.faults import FAULTS
from hf_ssd.chaos.jobs import run_all
from hf_ssd.chaos.report import chaos_rows, chaos_summary, write_chaos
from hf_ssd.chaos.saboteur import MISCHIEFS
from hf_ssd.chaos.soak import Look, SoakResult
from hf_ssd.chaos.trials import ChaosResult, ChaosRun, chaos_lab, draw_run
from hf_ssd.cli import app

QUICK = ("nothing", "the clock jumps", "the caller's criterion raises", "Ctrl-C", "the assistant raises")


@pytest.fixture(scope="module")
def lab():
    with chaos_lab() as lab:
        yield lab


def run_of(name: str, backend: str, **values) -> ChaosRun:
    fault = next(fault for fault in FAULTS if fault.name == name)
    run = ChaosRun(3, fault, backend, step=4, num_rows=1, seed=None, num_tokens=20)
    return dataclasses.replace(run, **values)


def test_runs_are_drawn_by_seed_and_meet_every_fault():
    assert [draw_run(1, number) for number in range(60)] == [draw_run(1, number) for number in range(60)]
    assert draw_run(1, 5) != draw_run(2, 5)
    runs = [draw_run(0, number) for number in range(200)]
    assert {run.fault.name for run in runs} == {fault.name for fault in FAULTS}
    assert {run.backend for run in runs} == {"process", "stream", "inline"}
    assert {run.num_rows for run in runs} == {1, 2, 3}
    assert {run.seed is None for run in runs} == {True, False}
    assert all(run.backend in run.fault.backends for run in runs)
    assert {fault.mischief for fault in FAULTS} - {None} == set(MISCHIEFS)


@pytest.mark.parametrize("backend", ["stream", "inline"])
@pytest.mark.parametrize("name", QUICK)
def test_runs_in_this_process_go_well(lab, name, backend):
    run = run_of(name, backend)
    if backend not in run.fault.backends:
        pytest.skip("not where the assistant has no place of its own")
    result = lab.run(run)
    assert result.problem is None
    assert (result.degraded is not None) == (name == "the assistant raises")


@pytest.mark.slow
def test_a_killed_worker(lab):
    result = lab.run(run_of("the worker is killed", "process", num_rows=2, seed=7))
    assert result.problem is None
    assert "has died" in result.degraded


def test_wrong_tokens_are_noticed(lab, monkeypatch):
    monkeypatch.setattr(lab, "_expected", lambda run: torch.zeros((1, 4), dtype=torch.long))
    assert "instead of" in lab.run(run_of("nothing", "inline")).problem


def test_a_fault_that_nobody_notices_is_a_problem(lab, monkeypatch):
    fault = dataclasses.replace(run_of("the worker is killed", "process").fault, strike=lambda worker: None)
    result = lab.run(run_of("nothing", "process", fault=fault))
    assert result.problem == "went on as if nothing had happened"


def test_a_second_warning_is_noticed(lab, monkeypatch):
    """One call, one warning, which has the cause."""
    warn = logging.getLogger("hf_ssd.row").warning
    monkeypatch.setattr(logging.getLogger("hf_ssd.row"), "warning", lambda text: (warn(text), warn(text)))
    problem = lab.run(run_of("the assistant raises", "stream")).problem
    assert problem.startswith("warned 2 times: ['Generation goes on without the assistant")
    assert "the assistant broke" in problem


def test_what_is_left_behind_is_noticed(lab, monkeypatch):
    monkeypatch.setattr(trials, "SETTLE_S", 0.1)
    left: list[int] = []
    fault = dataclasses.replace(
        run_of("nothing", "inline").fault, around=lambda: nullcontext(left.append(os.open(os.devnull, os.O_RDONLY)))
    )
    problem = lab.run(run_of("nothing", "inline", fault=fault)).problem
    for descriptor in left:
        os.close(descriptor)
    assert problem.startswith("left behind: {'descriptors'")


def test_an_error_of_the_library_is_a_problem_of_the_run(lab, monkeypatch):
    def broken(*args, **kwargs):
        raise AttributeError("a mistake of ours")

    monkeypatch.setattr(trials, "generate_with_ssd", broken)
    assert lab.run(run_of("nothing", "inline")).problem == "raised AttributeError('a mistake of ours')"


def make_results() -> list[ChaosResult]:
    return [
        ChaosResult(run_of("nothing", "inline"), None, None, 0.5),
        ChaosResult(run_of("the worker is killed", "process"), None, "it has died", 4.0),
        ChaosResult(run_of("the worker is killed", "process"), "left behind: much", "it has died", 2.0),
        ChaosResult(run_of("Ctrl-C", "stream"), None, None, 1.0),
    ]


def test_results_are_plain_values():
    for result in [*make_results(), ChaosResult(run_of("no process can be started", "process"), None, "x", 1.0)]:
        assert json.loads(json.dumps(result.to_dict()))["fault"] == result.run.fault.name


def test_the_table_counts_runs(tmp_path: Path):
    assert chaos_rows(make_results()) == [
        ("nothing", "1", "1", "0", "0.5 s", "0"),
        ("the worker is killed", "2", "1", "2", "4.0 s", "1"),
        ("Ctrl-C", "1", "ends by the exception", "0", "1.0 s", "0"),
    ]
    assert "4 runs: 3 as they should be, 1 not. 2 went on without" in chaos_summary(make_results())
    write_chaos(make_results(), tmp_path / "faults.md", "hf-ssd chaos")
    assert "| the worker is killed | 2 | 1 | 2 | 4.0 s | 1 |" in (tmp_path / "faults.md").read_text()


def looks(*caller_mb: float, **last: int) -> SoakResult:
    each = [Look(100 * i, 10_000 * i, mb, 300.0, 0.2, 9, 3, 1) for i, mb in enumerate(caller_mb, 1)]
    return SoakResult((*each[:-1], dataclasses.replace(each[-1], **last)))


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (looks(400, 450, 451, 450, 452), None),
        (looks(400, 450, 460, 470, 480), "caller_mb has grown by 30"),
        (looks(400, 450, 450, 450, 450, descriptors=10), "descriptors has grown by 1"),
        (looks(400, 450, 450, 450, 450, threads=4), "threads has grown by 1"),
    ],
)
def test_growth_after_the_warm_up_is_a_problem(result, problem):
    assert result.problems() == ([] if problem is None else [problem])


@pytest.mark.slow
class TestCommands:
    def test_chaos(self, tmp_path: Path):
        path = tmp_path / "faults.md"
        result = CliRunner().invoke(app, ["chaos", "--runs", "27", "--seed", "5", "--json", "--markdown", str(path)])
        assert result.exit_code == 0, result.output
        assert len(json.loads(result.stdout)) == 27
        assert "27 runs: 27 as they should be" in path.read_text()

    def test_several_jobs_give_what_one_gives(self):
        results = run_all(2, seed=5, num_jobs=2)
        assert [result.run for result in results] == [draw_run(5, number) for number in range(2)]
        assert [result.problem for result in results] == [None, None]
        assert [result.degraded is None for result in results] == [True, False]  # nothing; the worker is killed

    def test_soak(self):
        result = CliRunner().invoke(app, ["soak", "--calls", "200", "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["looks"][-1]["num_calls"] == 200
        assert found["problems"] == []
