"""Runs one after the other, or in several processes at once: most of a run's time is the start of a process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

from .trials import ChaosLab, ChaosResult, chaos_lab, draw_run

_LABS: list[ChaosLab] = []  # of a process that runs are given to


def run_all(
    num_runs: int, seed: int, num_jobs: int = 1, tell: Callable[[str, int], None] = lambda name, number: None
) -> list[ChaosResult]:
    """The results of runs 0, 1, ... of a seed, in order.

    Args:
        num_runs: Number of runs.
        seed: Of what is random.
        num_jobs: Processes that do them.
        tell: Called with the name and number of each run.
    """
    results = []
    with ExitStack() as stack:
        if num_jobs == 1:
            lab = stack.enter_context(chaos_lab())
        else:
            context = multiprocessing.get_context("spawn")
            executor = stack.enter_context(ProcessPoolExecutor(num_jobs, context, initializer=_open_lab))
            futures = [executor.submit(_run, seed, number) for number in range(num_runs)]
        for number in range(num_runs):
            run = draw_run(seed, number)
            tell(f"{run.fault.name} ({run.backend})", number)
            # A fault holds functions, which do not travel; it is drawn again.
            results.append(lab.run(run) if num_jobs == 1 else ChaosResult(run, *futures[number].result()))
    return results


def _open_lab() -> None:
    _LABS.append(chaos_lab().__enter__())  # for as long as the process lives


def _run(seed: int, number: int) -> tuple[str | None, str | None, float]:
    result = _LABS[0].run(draw_run(seed, number))
    return result.problem, result.degraded, result.duration_s
