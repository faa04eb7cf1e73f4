"""One run: a call of `generate()` during which something goes wrong, and what is there afterwards."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..config import Backend, SSDConfig
from ..generation import generate_with_ssd
from ..matrix.run import families_named
from ..matrix.zoo import VOCAB_SIZE
from ..runtime import pool
from .faults import FAULTS, HANG_TIMEOUT_S, Fault, Interruption
from .saboteur import Saboteur

MAX_S = 60.0  # for a call and the one after it, the start of a process or two included
SETTLE_S = 5.0  # in which processes and threads that have been told to leave are gone

Verdict = Literal["passes", "fails"]


@dataclass(frozen=True)
class ChaosRun:
    """What is drawn for one run; the same for the same seed and number.

    Args:
        number: Which run.
        fault: What goes wrong.
        backend: Where the assistant is.
        step: After which step of the call it does.
        num_rows: Rows of the batch.
        seed: Seed of sampling, `None` for greedy decoding.
        num_tokens: Tokens per row.
    """

    number: int
    fault: Fault
    backend: Backend
    step: int
    num_rows: int
    seed: int | None
    num_tokens: int


@dataclass(frozen=True)
class ChaosResult:
    """What came of a run.

    Args:
        run: The run.
        problem: What is not as it should be, `None` if nothing.
        degraded: Why the call went on without the assistant, if it did.
        duration_s: Of the call and the one after it.
    """

    run: ChaosRun
    problem: str | None
    degraded: str | None
    duration_s: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        run = {each.name: getattr(self.run, each.name) for each in fields(self.run)}
        run["fault"] = self.run.fault.name
        return {**run, "problem": self.problem, "degraded": self.degraded, "duration_s": self.duration_s}


def draw_run(seed: int, number: int) -> ChaosRun:
    """Run `number` of a seed. Faults come in turn, so that each is met about as often; all else is random."""
    draw = random.Random(f"{seed} {number}")
    fault = FAULTS[number % len(FAULTS)]
    return ChaosRun(
        number,
        fault,
        backend=draw.choice(fault.backends),
        step=draw.randint(1, 24),
        num_rows=draw.choice([1, 1, 2, 3]),
        seed=draw.choice([None, draw.getrandbits(32)]),
        num_tokens=draw.randint(32, 48),
    )


class ChaosLab:
    """Models and a worker that runs share: it takes seconds to start, so one that survives serves the next run."""

    def __init__(self) -> None:
        family = families_named(["llama"])[0]
        self._target = family.make()
        self._assistant = family.make_assistant()
        self._warnings = _Warnings()
        self._warm_up()
        self._before = self._belongings()

    def close(self) -> None:
        """Ends the workers."""
        pool.close_worker(self._assistant)

    def run(self, run: ChaosRun) -> ChaosResult:
        """Does a run: the call, then one without a fault, and looks at what is left."""
        started = time.monotonic()
        degraded: list[str | None] = []
        try:
            problem = self._call_and_check(run, degraded)
        except Exception as error:  # nothing may be raised but what the fault is; the next run goes on
            problem = f"raised {error!r}"
        duration_s = time.monotonic() - started
        if problem is None and duration_s > MAX_S:
            problem = f"took {duration_s:.0f} s"
        return ChaosResult(run, problem, degraded[0] if degraded else None, duration_s)

    def _call_and_check(self, run: ChaosRun, degraded: list[str | None]) -> str | None:
        fault = run.fault
        assistant: PreTrainedModel = self._assistant
        if fault.mischief is not None:
            assistant = Saboteur.of(assistant, fault.mischief, run.step)
        if fault.around is not Fault.around:
            pool.close_worker(assistant)  # it would have started already
        expected = self._expected(run)
        interruption: BaseException | None = None
        ids = torch.empty(0)
        with fault.around(), self._warnings.counted() as warnings:
            try:
                ids = self._generate(run, assistant, strikes=True)
            except (Interruption, KeyboardInterrupt) as error:
                interruption = error
        stats: Any = self._target.ssd_stats
        if interruption is None:
            degraded.append(stats.degraded)
        if fault.ending == "interrupted":
            if interruption is None:
                return "the caller's exception was lost"
        elif interruption is not None:
            return f"raised {interruption!r}"
        elif not torch.equal(ids, expected):
            return f"gave {ids.tolist()} instead of {expected.tolist()}"
        elif fault.ending == "degraded" and stats.degraded is None:
            return "went on as if nothing had happened"
        elif len(warnings) != (stats.degraded is not None):
            return f"warned {len(warnings)} times: {warnings}"
        elif fault.ending == "whole" and stats.degraded is not None:
            return f"went on without the assistant: {stats.degraded}"
        del assistant
        return self._next_call(run) or self._left_behind()

    def _next_call(self, run: ChaosRun) -> str | None:
        """What is wrong with a call after it, with the assistant that all runs share."""
        ids = self._generate(run, self._assistant, strikes=False)
        stats: Any = self._target.ssd_stats
        if not torch.equal(ids, self._expected(run)):
            return "the call after it gave other tokens"
        if stats.degraded is not None:
            return f"the call after it went on without the assistant: {stats.degraded}"
        return None

    def _left_behind(self) -> str | None:
        """What there is more of than before all runs, once there was time to leave."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            gc.collect()
            now = self._belongings()
            more = {name: number for name, number in now.items() if number > self._before[name]}
            if not more:
                self._before = now  # what earlier runs have freed is no allowance for later ones
                return None
            if time.monotonic() > deadline:
                return f"left behind: {more}, before {self._before}"
            time.sleep(0.05)

    def _generate(self, run: ChaosRun, assistant: PreTrainedModel, *, strikes: bool) -> torch.Tensor:
        hangs = strikes and run.fault.hangs
        config = SSDConfig(
            backend=run.backend,
            seed=run.seed,
            timeout_s=HANG_TIMEOUT_S if hangs else MAX_S,
            assistant_quantization=None,
        )
        criteria = StoppingCriteriaList()
        if strikes and run.fault.strike is not None:
            criteria.append(_StrikeAt(run, assistant))
        ids: torch.Tensor = generate_with_ssd(
            self._target, assistant_model=assistant, ssd_config=config, stopping_criteria=criteria, **_arguments(run)
        )
        return ids

    def _expected(self, run: ChaosRun) -> torch.Tensor:
        config = SSDConfig(mode="ar", seed=run.seed)
        ids: torch.Tensor = generate_with_ssd(self._target, ssd_config=config, **_arguments(run))
        return ids

    def _belongings(self) -> dict[str, int]:
        """What this process has that a call may not add to: the workers that it may keep are not counted."""
        this = psutil.Process()
        has_process, has_thread = pool.living_workers(self._assistant)
        return {
            "processes": len(this.children(recursive=True)) - has_process,
            "descriptors": this.num_fds() - has_process,  # its socket
            "threads": threading.active_count() - has_thread,
        }

    def _warm_up(self) -> None:
        """Starts what stays: libraries have threads and descriptors of their own."""
        for backend in ("process", "stream", "inline"):
            config = SSDConfig(backend=backend, assistant_quantization=None)
            generate_with_ssd(
                self._target,
                assistant_model=self._assistant,
                ssd_config=config,
                input_ids=torch.ones((1, 4), dtype=torch.long),
                max_new_tokens=8,
            )


class _Warnings(logging.Handler):
    """What the library warns of that it goes on without the assistant. It is kept, and not shown."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "hf_ssd.row":
            self._texts.append(record.getMessage())

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[str]]:
        """Yields those that come inside."""
        logger = logging.getLogger("hf_ssd")
        self._texts, propagates = [], logger.propagate
        logger.addHandler(self)
        logger.propagate = False
        try:
            yield self._texts
        finally:
            logger.propagate = propagates
            logger.removeHandler(self)


class _StrikeAt(StoppingCriteria):
    """Lets a fault strike at its step. Stops nothing."""

    def __init__(self, run: ChaosRun, assistant: PreTrainedModel) -> None:
        self._run = run
        self._assistant = assistant
        self._num_steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._num_steps += 1
        if self._num_steps == self._run.step:
            assert self._run.fault.strike is not None
            is_process = self._run.backend == "process"
            self._run.fault.strike(pool.worker_process(self._assistant) if is_process else None)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _arguments(run: ChaosRun) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(run.number)
    return {
        "input_ids": torch.randint(1, VOCAB_SIZE, (run.num_rows, 8), generator=generator),
        "max_new_tokens": run.num_tokens,
        "do_sample": run.seed is not None,
    }


@contextlib.contextmanager
def chaos_lab() -> Iterator[ChaosLab]:
    """A lab that is closed afterwards, with one CPU thread: threads that wait for each other make tiny models slow."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lab = ChaosLab()
    try:
        yield lab
    finally:
        lab.close()
        torch.set_num_threads(num_threads)
