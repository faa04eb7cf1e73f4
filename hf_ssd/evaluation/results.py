"""From samples to the figures of an evaluation. Pure: no model, no clock, no output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ..bench.arms import Arm
from ..bench.statistics import Estimate, mean_with_interval
from .modules import load_metric
from .samples import Sample, Samples, Step
from .statistics import mean_difference_test
from .tasks import TASKS


@dataclass(frozen=True)
class Difference:
    """Where an arm's text leaves AR's.

    Args:
        arm: Name of the arm.
        task: Name of the task.
        item: Name of the item.
        position: The first token that differs, counted from the end of the prompt.
        top_two_gap: Gap between the two highest logits that AR chose from there.
        token_gap: How far the arm's token is below AR's in the same logits; `None` where a text ends there.
        step: Distance between neighbouring numbers of the precision at the size of AR's logit.
    """

    arm: str
    task: str
    item: str
    position: int
    top_two_gap: float | None = None
    token_gap: float | None = None
    step: float | None = None


@dataclass(frozen=True)
class TaskFigures:
    """An arm on a task. Nothing here depends on the clock.

    Args:
        arm: Name of the arm.
        task: Name of the task.
        measure: What the score is called.
        num_items: Items done.
        score: Mean score, with its bootstrap interval over items.
        difference: Mean of the score less AR's on the same item, likewise.
        identical: `[texts that are AR's, texts]`, when decoding greedily.
        token_share: Share of AR's tokens before a difference, when decoding greedily.
        score_p_value: Chance of a difference in score this large by permutation, when sampling.
        first_tokens: What the module `distribution_match` says of the first tokens, when sampling several times.
    """

    arm: str
    task: str
    measure: str
    num_items: int
    score: Estimate
    difference: Estimate | None = None
    identical: tuple[int, int] | None = None
    token_share: float | None = None
    score_p_value: float | None = None
    first_tokens: dict[str, Any] | None = None


@dataclass(frozen=True)
class ClockFigures:
    """What an arm took, over all tasks. It depends on the clock: how much is drafted does too.

    Args:
        arm: Name of the arm.
        tokens_per_s: Tokens over time of an answer, the median.
        ratio_to_ar: The same over AR's for the same item, the median: a pause of the machine in one answer does not
            count.
        acceptance: What the module `acceptance` says of the rounds of SD and SSD.
        degraded: Why the arm went on without its assistant, where it did.
    """

    arm: str
    tokens_per_s: float
    ratio_to_ar: float
    acceptance: dict[str, Any] | None = None
    degraded: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Figures of an evaluation and what they were measured with. All but `clock` are the same in a repeated run."""

    pair: dict[str, str]
    dtype: str
    generation: dict[str, Any]
    suites: dict[str, str]
    environment: dict[str, Any]
    tasks: tuple[TaskFigures, ...]
    differences: tuple[Difference, ...]
    clock: tuple[ClockFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, ready for JSON."""
        return asdict(self)


def summarise_task(arm: Arm, task: str, samples: Samples, reference: Arm, *, greedy: bool) -> TaskFigures:
    """Figures of an arm on a task, against the reference arm on the same items.

    Args:
        arm: Which arm.
        task: Which task.
        samples: All samples.
        reference: AR's arm.
        greedy: Whether texts can be compared token by token.
    """
    steps = [step for step in samples if step.arm == arm and step.item.task == task]
    own = [samples[step] for step in steps]
    theirs = [samples[Step(reference, step.item, step.seed)] for step in steps]
    names = [step.item.name for step in steps]
    figures: dict[str, Any] = {"score": mean_with_interval(_means(names, [s.score for s in own]))}
    if arm != reference:
        pairs = zip(own, theirs, strict=True)
        figures["difference"] = mean_with_interval(_means(names, [a.score - b.score for a, b in pairs]))
        figures |= _compare_texts(own, theirs) if greedy else _compare_draws(names, own, theirs)
    return TaskFigures(arm.name, task, TASKS[task].measure, len(set(names)), **figures)


def summarise_clock(arm: Arm, samples: Samples, reference: Arm) -> ClockFigures:
    """What an arm took, against the reference arm on the same items."""
    steps = [step for step in samples if step.arm == arm]
    own = [samples[step] for step in steps]
    theirs = [samples[Step(reference, step.item, step.seed)] for step in steps]
    with_rounds = [sample.rounds for sample in own if sample.rounds is not None and sample.rounds["accepted"]]
    acceptance = None
    if with_rounds and any(max(rounds["reached"]) for rounds in with_rounds):
        metric = load_metric("acceptance")
        for rounds in with_rounds:
            metric.add_batch(**rounds)
        acceptance = metric.compute()
    degraded = next((sample.degraded for sample in own if sample.degraded), None)
    speeds = [_tokens_per_s(sample) for sample in own]
    ratios = [speed / _tokens_per_s(other) for speed, other in zip(speeds, theirs, strict=True)]
    return ClockFigures(arm.name, median(speeds), median(ratios), acceptance, degraded)


def _compare_texts(own: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, Any]:
    metric = load_metric("losslessness")
    metric.add_batch(predictions=[s.tokens for s in own], references=[s.tokens for s in theirs])
    result = metric.compute()
    return {"identical": (result["num_identical"], result["num_texts"]), "token_share": result["token_share"]}


def _compare_draws(names: Sequence[str], own: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, Any]:
    by_item: dict[str, tuple[list[float], list[float]]] = {}
    for name, a, b in zip(names, own, theirs, strict=True):
        left, right = by_item.setdefault(name, ([], []))
        left.append(a.score)
        right.append(b.score)
    test = mean_difference_test([left for left, _ in by_item.values()], [right for _, right in by_item.values()])
    figures: dict[str, Any] = {"score_p_value": test.p_value}
    if len(own) > len(by_item):
        metric = load_metric("distribution_match")
        number = {name: index for index, name in enumerate(by_item)}
        metric.add_batch(
            predictions=[s.tokens for s in own],
            references=[s.tokens for s in theirs],
            prompts=[number[name] for name in names],
        )
        figures["first_tokens"] = metric.compute()
    return figures


def _means(names: Sequence[str], values: Sequence[float]) -> list[float]:
    """The mean of each item's values: samples of one item are no independent items."""
    by_item: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        by_item.setdefault(name, []).append(value)
    return [float(np.mean(group)) for group in by_item.values()]


def _tokens_per_s(sample: Sample) -> float:
    return len(sample.tokens) / sample.duration_s
