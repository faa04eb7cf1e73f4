"""Tokens per second against batch size: how plain generation, SD and SSD fare when several rows share a call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from ..metrics import SSDStats
from .arms import Arm, Inputs, Method, Runner, torch_threads
from .schedule import WARM_UP_TOKENS, Progress, schedule
from .statistics import Estimate, Resampling


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


@dataclass(frozen=True)
class BatchFigures:
    """All arms at one batch size.

    Args:
        batch_size: Rows of a call.
        num_calls: Calls of each arm.
        arms: By name.
    """

    batch_size: int
    num_calls: int
    arms: Mapping[str, BatchArm]

    @property
    def fastest(self) -> str:
        return max(self.arms, key=lambda name: self.arms[name].tokens_per_s.value)


def can_batch(arm: Arm) -> bool:
    """Whether the arm takes several rows: transformers' assisted generation and prompt lookup do not."""
    return arm.method in (Method.PLAIN, Method.OURS)


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
        arms: The arms; those that take single rows only are left out.
        inputs: The tokenized prompts, one row each.
        batch_size: Rows of a call.
        repeats: How often everything is run.
        max_new_tokens: Tokens per row.
        seed: Seed of the draws.
        report: Told before each call.
    """
    arms = [arm for arm in arms if can_batch(arm)]
    pad_token_id = runner.generation_kwargs.get("pad_token_id") or 0
    batches = batches_of(inputs, batch_size, pad_token_id)
    calls: dict[str, dict[tuple[int, int], BatchCall]] = {arm.name: {} for arm in arms}
    steps = schedule(arms, len(batches), repeats)
    for done, step in enumerate(steps):
        report(f"{batch_size} rows, {step.arm.label}, batch {step.prompt + 1} of {len(batches)}", done, len(steps))
        length = max_new_tokens if step.repeat is not None else min(WARM_UP_TOKENS, max_new_tokens)
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
    figures = {}
    for name, of_arm in calls.items():
        stats = [call.stats for call in of_arm.values() if call.stats is not None]
        rounds = tuple(round_ for each in stats for round_ in each.rounds)
        pooled = SSDStats(mode=stats[0].mode, rounds=rounds) if rounds else None
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
        )
    return BatchFigures(batch_size, num_batches * repeats, figures)


def _pad(rows: Sequence[torch.Tensor], pad_token_id: int) -> Inputs:
    longest = max(map(len, rows))
    input_ids = torch.full((len(rows), longest), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, longest - len(row) :] = row
        attention_mask[index, longest - len(row) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}
