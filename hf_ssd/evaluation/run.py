"""`hf-ssd evaluate`: every arm on every item of the tasks, compared with plain decoding.

How it is measured. AR is transformers' own generate() on a model object that never becomes an SSD model. All arms take
turns item by item. Greedily, texts are compared token by token, and where one leaves AR's, AR is run once more for the
logits it chose from. Scores are compared item by item. Every sample is kept at once, so that an interrupted run goes on
where it was; all figures but those of the clock come out the same.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ..bench.arms import Arm, Runner, choose_arms
from ..bench.compare import generation_kwargs, load
from ..bench.environment import environment
from ..bench.schedule import Progress
from ..bench.settings import AR
from .differences import first_difference
from .records import RecordFile
from .results import Difference, Evaluation, summarise_clock, summarise_task
from .samples import Sampler, Samples, Step, arms_of, steps_of
from .settings import EvaluationSettings

SAMPLES_FILE = "samples.jsonl"


def evaluate_arms(settings: EvaluationSettings, progress: Progress | None = None) -> Evaluation:
    """Runs an evaluation, or what is left of it.

    Args:
        settings: What to evaluate.
        progress: Called before each step with what comes next, the steps done and the steps in all (0: not known yet).

    Raises:
        OSError: If a model is not found, or the records cannot be written.
        ValueError: If the models do not fit each other, or `out` holds something else.
        ImportError: If a package is missing.
    """
    report = progress or (lambda what, done, total: None)
    report("reading the models", 0, 0)
    pair, names = load(settings)
    choose_arms(settings.arms, settings.KNOWN_ARMS, pair.assistant)  # or refuse what was asked for
    arms = arms_of(settings)
    reference = next(arm for arm in arms if arm.name == AR)
    steps = steps_of(settings, arms)
    path = None if settings.out is None else settings.out / SAMPLES_FILE
    greedy = settings.temperature == 0
    with (
        RecordFile(path) as records,
        Runner(pair.target, pair.assistant, generation_kwargs(pair, settings.sampling)) as runner,
    ):
        sampler = Sampler(settings, names, runner, pair.tokenizer, records)
        samples = sampler.run(steps, report)
        report("comparing the texts", len(steps), len(steps))
        differences = find_differences(sampler, samples, reference, settings.dtype) if greedy else ()
    tasks = list(dict.fromkeys(item.task for item in settings.items))
    return Evaluation(
        pair=names,
        dtype=settings.dtype,
        generation={"max_new_tokens": settings.max_new_tokens, "seeds": settings.seeds, **settings.sampling},
        suites=dict(_source_of(suite) for suite in settings.suites),
        environment=environment(),
        tasks=tuple(summarise_task(arm, task, samples, reference, greedy=greedy) for task in tasks for arm in arms),
        differences=differences,
        clock=tuple(summarise_clock(arm, samples, reference) for arm in arms),
    )


def find_differences(sampler: Sampler, samples: Samples, reference: Arm, dtype: str) -> tuple[Difference, ...]:
    """Where texts leave AR's, with the gaps in AR's own logits there."""
    found = []
    logits: dict[Step, torch.Tensor] = {}  # of one AR text each, as far as the latest difference needs them
    for step, sample in samples.items():
        expected = Step(reference, step.item, step.seed)
        position = first_difference(sample.tokens, samples[expected].tokens)
        if position is None:
            continue
        difference = Difference(step.arm.name, step.item.task, step.item.name, position)
        if position < len(samples[expected].tokens):
            if len(logits.get(expected, ())) <= position:
                logits[expected] = sampler.reference_logits(expected, position + 1)
            token = sample.tokens[position] if position < len(sample.tokens) else None
            difference = with_gaps(difference, logits[expected][position], token, dtype)
        found.append(difference)
    return tuple(sorted(found, key=lambda d: (d.task, d.arm)))


def with_gaps(difference: Difference, logits: torch.Tensor, token: int | None, dtype: str) -> Difference:
    """Adds what AR's logits, of shape `(vocab_size,)`, say about a difference.

    Args:
        difference: Which one.
        logits: What AR chose from there, before any logits processor.
        token: The arm's token; `None` if its text has ended.
        dtype: Precision of the target.
    """
    best, second = logits.topk(2).values.tolist()
    step = torch.finfo(getattr(torch, dtype)).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-6)))
    return Difference(
        difference.arm,
        difference.task,
        difference.item,
        difference.position,
        top_two_gap=best - second,
        token_gap=None if token is None else best - float(logits[token]),
        step=step,
    )


def _source_of(suite: str) -> tuple[str, str]:
    """A suite's name and where it came from, without the folders of a file."""
    name, _, source = suite.partition("=")
    return name, Path(source).name if source and ":" not in source else source or "its own"
