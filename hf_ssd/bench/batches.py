"""Tokens per second against batch size: plain generation, SD and SSD with each backup, when rows share a call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from ..metrics import SSDStats
from ..planning import Backup
from ..types import RoundStats
from .arms import Arm, Inputs, Method, Runner, torch_threads
from .critical import BackupFigures, compare_backups
from .schedule import WARM_UP_TOKENS, Progress, Step, schedule
from .settings import AR, AR_ALL_CORES, AUTO, SD, SSD
from .statistics import Estimate, Resampling

JIT: Backup = "jit"
FAST_BACKUPS: tuple[Backup, ...] = ("ngram", "none")
NUM_TRIAL_CALLS = 9  # of mode "auto", before it is measured


@dataclass(frozen=True)
class BatchCall:
    """One timed call for several rows."""

    num_tokens: int
    duration_s: float
    stats: SSDStats | None = None


@dataclass(frozen=True)
class BatchArm:
    """Figures of an arm at one batch size; `None` where the arm has no such figure.

    Args:
        tokens_per_s: Of all rows together, prefill included; the median over the repeats.
        latency_s: Time of a call, the median.
        ratios: `tokens_per_s` over that of each of transformers' arms, by the name of that arm.
        over_best: The same over that of the fastest of AR, SD and SSD, for the arm of mode `"auto"`.
        tokens_per_round: Mean number of tokens of a row in a round.
        hit_rate: Share of outcomes that were prepared for.
        verify_ms: Mean time of a verification, of all rows together.
        wait_ms: Mean time that the target waited for the assistant before it.
    """

    tokens_per_s: Estimate
    latency_s: float
    ratios: Mapping[str, Estimate]
    tokens_per_round: float | None = None
    hit_rate: float | None = None
    verify_ms: float | None = None
    wait_ms: float | None = None
    over_best: Estimate | None = None


@dataclass(frozen=True)
class BatchFigures:
    """All arms at one batch size.

    Args:
        batch_size: Rows of a call.
        num_calls: Calls of each arm.
        arms: By name.
        backups: Drafting just in time against each backup that takes no time, by the name of that.
    """

    batch_size: int
    num_calls: int
    arms: Mapping[str, BatchArm]
    backups: Mapping[str, BackupFigures] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        return max(self.arms, key=lambda name: self.arms[name].tokens_per_s.value)


def can_batch(arm: Arm) -> bool:
    """Whether the arm takes several rows: transformers' assisted generation and prompt lookup do not."""
    return arm.method in (Method.PLAIN, Method.OURS)


def batch_arms(arms: Sequence[Arm], all_cores: int) -> list[Arm]:
    """The arms to run with several rows: beside those that can, SSD with each backup, and in mode `"auto"`.

    Args:
        arms: The arms of the measurement.
        all_cores: Number of cores of the machine, all of which mode `"auto"` may use.
    """
    able = [arm for arm in arms if can_batch(arm)]
    ssd = next((arm for arm in able if arm.name == SSD), None)
    if ssd is None or ssd.config is None:
        return able
    backups = [
        replace(ssd, name=_of(each), config=replace(ssd.config, backup=each))
        for each in (JIT, *FAST_BACKUPS)
        if ssd.config.backup == "auto"
    ]
    return [*able, *backups, replace(ssd, name=AUTO, target_threads=all_cores, config=replace(ssd.config, mode="auto"))]


def num_batch_steps(arms: Sequence[Arm], num_prompts: int, batch_size: int, repeats: int) -> int:
    """Calls of `measure_batches`."""
    return len(_steps(arms, -(-num_prompts // batch_size), repeats))


def _of(backup: Backup) -> str:
    return f"{SSD}: backup {backup}"


def _steps(arms: Sequence[Arm], num_batches: int, repeats: int) -> list[Step]:
    """The schedule, with some calls before it in which mode `"auto"` tries the modes."""
    trials = [Step(arm, index % num_batches) for arm in arms if arm.name == AUTO for index in range(NUM_TRIAL_CALLS)]
    return [*trials, *schedule(arms, num_batches, repeats)]


def batches_of(inputs: Sequence[Inputs], batch_size: int, pad_token_id: int) -> list[Inputs]:
    """The prompts in batches, left-padded. The last one is filled up with the first prompts."""
    num_batches = -(-len(inputs) // batch_size)
    rows = [inputs[index % len(inputs)]["input_ids"][0] for index in range(num_batches * batch_size)]
    return [_pad(rows[start : start + batch_size], pad_token_id) for start in range(0, len(rows), batch_size)]


def measure_batches(
    runner: Runner,
    arms: Sequence[Arm],
    inputs: Sequence[Inputs],
    batch_size: int,
    *,
    repeats: int,
    max_new_tokens: int,
    seed: int,
    report: Progress,
) -> BatchFigures:
    """Runs all arms on the prompts in batches of one size, taking turns batch by batch after a warm-up.

    Args:
        runner: Has the models.
        arms: The arms.
        inputs: The tokenized prompts, one row each.
        batch_size: Rows of a call.
        repeats: How often everything is run.
        max_new_tokens: Tokens per row.
        seed: Seed of the draws.
        report: Told before each call.
    """
    pad_token_id = runner.generation_kwargs.get("pad_token_id") or 0
    batches = batches_of(inputs, batch_size, pad_token_id)
    calls: dict[str, dict[tuple[int, int], BatchCall]] = {arm.name: {} for arm in arms}
    steps = _steps(arms, len(batches), repeats)
    for done, step in enumerate(steps):
        report(f"{batch_size} rows, {step.arm.label}, batch {step.prompt + 1} of {len(batches)}", done, len(steps))
        is_short = step.repeat is None and step.arm.name != AUTO
        length = min(WARM_UP_TOKENS, max_new_tokens) if is_short else max_new_tokens
        call = _run(runner, step.arm, batches[step.prompt], length, seed + step.prompt)
        if step.repeat is not None:
            calls[step.arm.name][step.repeat, step.prompt] = call
    return _figures(calls, arms, batch_size, len(batches), repeats)


def _run(runner: Runner, arm: Arm, batch: Inputs, max_new_tokens: int, seed: int) -> BatchCall:
    kwargs: dict[str, Any] = {**runner.generation_kwargs, **batch, "max_new_tokens": max_new_tokens}
    torch.manual_seed(seed)
    model = runner.plain_target
    if arm.method is Method.OURS:
        model, kwargs["ssd_config"] = runner.target, arm.config
    with torch_threads(arm.target_threads):
        start = time.perf_counter()
        output = model.generate(**kwargs)
        duration_s = time.perf_counter() - start
    num_rows, num_prompt_tokens = batch["input_ids"].shape
    num_tokens = num_rows * (output.shape[1] - num_prompt_tokens)
    return BatchCall(num_tokens, duration_s, runner.target.ssd_stats if arm.method is Method.OURS else None)


def _figures(
    calls: Mapping[str, Mapping[tuple[int, int], BatchCall]],
    arms: Sequence[Arm],
    batch_size: int,
    num_batches: int,
    repeats: int,
) -> BatchFigures:
    resampling = Resampling(num_batches, repeats)

    def table(name: str, field: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(
            [[getattr(calls[name][repeat, batch], field) for batch in range(num_batches)] for repeat in range(repeats)],
            dtype=np.float64,
        )

    tokens = {name: table(name, "num_tokens") for name in calls}
    seconds = {name: table(name, "duration_s") for name in calls}
    speeds = {name: float(np.median(tokens[name].sum(axis=1) / seconds[name].sum(axis=1))) for name in calls}
    drawn = {name: resampling.speeds(tokens[name], seconds[name]) for name in calls}
    peers = [arm.name for arm in arms if arm.method is not Method.OURS]
    rivals = [name for name in (AR, AR_ALL_CORES, SD, SSD) if name in calls]
    best = max(rivals, key=lambda name: speeds[name]) if AUTO in calls and rivals else None
    rounds = {name: _rounds(of_arm) for name, of_arm in calls.items()}
    figures = {}
    for name, of_arm in calls.items():
        modes = [call.stats.mode for call in of_arm.values() if call.stats is not None and call.stats.rounds]
        pooled = SSDStats(mode=modes[-1], rounds=rounds[name]) if modes else None
        figures[name] = BatchArm(
            tokens_per_s=resampling.estimate(speeds[name], drawn[name]),
            latency_s=median(call.duration_s for call in of_arm.values()),
            ratios={
                peer: resampling.estimate(speeds[name] / speeds[peer], drawn[name] / drawn[peer]) for peer in peers
            },
            tokens_per_round=None if pooled is None else pooled.tokens_per_round,
            hit_rate=None if pooled is None else pooled.hit_rate,
            verify_ms=None if pooled is None else pooled.verify_ms,
            wait_ms=None if pooled is None else pooled.wait_ms,
            over_best=resampling.estimate(speeds[name] / speeds[best], drawn[name] / drawn[best])
            if name == AUTO and best is not None
            else None,
        )
    backups: dict[str, BackupFigures | None] = {
        each: compare_backups(rounds[_of(JIT)], rounds[_of(each)], speeds[_of(JIT)], speeds[_of(each)])
        for each in FAST_BACKUPS
        if {_of(JIT), _of(each)} <= set(calls)
    }
    known = {each: found for each, found in backups.items() if found is not None}
    return BatchFigures(batch_size, num_batches * repeats, figures, known)


def _rounds(calls: Mapping[tuple[int, int], BatchCall]) -> tuple[RoundStats, ...]:
    return tuple(each for call in calls.values() if call.stats is not None for each in call.stats.rounds)


def _pad(rows: Sequence[torch.Tensor], pad_token_id: int) -> Inputs:
    longest = max(map(len, rows))
    input_ids = torch.full((len(rows), longest), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, longest - len(row) :] = row
        attention_mask[index, longest - len(row) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}
