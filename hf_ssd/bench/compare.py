"""`hf-ssd compare`: the same prompts through every arm, interleaved and timed.

How it is measured. Every arm generates the same prompts with the same arguments; EOS ends a text where it does for a
user. The arms take turns prompt by prompt, and the order rotates, so that a machine that slows down slows all of them.
Every arm runs a short text first; starting the assistant's process falls into that. The clock runs around generate().
An arm's speed is all tokens of a repeat over all its time, and the median over the repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import pairs
from ..generation import disable_ssd
from ..metrics import SSDStats
from ..runtime import placement
from ..trace import Overlap, measure_overlap, write_chrome_trace
from .arms import Arm, Call, Inputs, Runner, build_arms, choose_arms
from .encoding import encode
from .environment import environment
from .results import (
    ArmResult,
    Calls,
    Comparison,
    Difference,
    compare_arms,
    fastest_variants,
    find_differences,
    summarise_arm,
    summarise_prompts,
    tokens_per_s,
)
from .schedule import Progress, run_schedule
from .settings import AR, ARM_NAMES, SSD, CompareSettings, RunSettings


def load(settings: RunSettings) -> tuple[pairs.Pair, dict[str, str]]:
    """Loads the models of a measurement, and says what they are called.

    Raises:
        OSError: If a name or folder is not found.
        ValueError: If the two do not fit each other.
    """
    dtype = getattr(torch, settings.dtype)
    if settings.target is None or settings.assistant is None:
        names = {"target": "SmolLM2-135M-Instruct (embedded)", "assistant": "smollm2-135m-assistant (embedded)"}
        return pairs.embedded_pair(dtype=dtype), names
    pair = pairs.load_pair(settings.target, settings.assistant, dtype=dtype)
    disable_ssd(pair.target)  # transformers' own arms come from the model as transformers made it
    return pair, {"target": settings.target, "assistant": settings.assistant}


def compare(settings: CompareSettings, progress: Progress | None = None) -> Comparison:
    """Runs a comparison.

    Args:
        settings: What to compare.
        progress: Called before each step with what comes next, the steps done and the steps in all (0: not known yet).

    Returns:
        [`Comparison`]

    Raises:
        OSError: If a model is not found.
        ValueError: If the models do not fit each other.
    """
    report = progress or (lambda what, done, total: None)
    report("reading the models", 0, 0)
    pair, pair_names = load(settings)
    config, cores = settings.ssd_config, placement.available_cores()
    target_threads, assistant_threads = placement.split_threads(config.target_threads, config.assistant_threads, cores)
    names = choose_arms(settings.arms, ARM_NAMES, pair.assistant)
    arms = build_arms(names, config, target_threads, assistant_threads, cores)
    inputs = [encode(pair.tokenizer, prompt) for prompt in settings.prompts]
    with Runner(pair.target, pair.assistant, generation_kwargs(pair, settings.sampling)) as runner:
        calls = run_schedule(
            runner,
            arms,
            inputs,
            repeats=settings.repeats,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            report=report,
        )
        num_calls = sum(len(group) for group in calls.values()) + len(arms)
        report("comparing the texts", num_calls, num_calls)
        results = _summarise(runner, calls, inputs, settings, target_threads)
        overlap: Overlap | None = None
        if settings.trace_path is not None:
            ssd = next(arm for arm in arms if arm.name == SSD)
            stats = trace(runner, ssd, inputs[0], settings)
            write_chrome_trace(stats, settings.trace_path)
            overlap = measure_overlap(stats)
    best = fastest_variants(calls)
    lengths = [tokens["input_ids"].shape[1] for tokens in inputs]
    return Comparison(
        pair=pair_names,
        dtype=settings.dtype,
        generation={"max_new_tokens": settings.max_new_tokens, "repeats": settings.repeats, **settings.sampling},
        environment=environment(),
        arms=results,
        prompts=summarise_prompts(settings.prompts, lengths, {name: calls[arm] for name, arm in best.items()}),
        overlap=overlap,
    )


def generation_kwargs(pair: pairs.Pair, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of generate() that all arms share, and the tokenizers for those whose assistant needs both."""
    kwargs = dict(sampling)
    if pair.assistant_tokenizer is not None:
        kwargs |= {"tokenizer": pair.tokenizer, "assistant_tokenizer": pair.assistant_tokenizer}
    if pair.target.generation_config.pad_token_id is None and pair.tokenizer.eos_token_id is not None:
        kwargs["pad_token_id"] = pair.tokenizer.eos_token_id  # what transformers would choose, without its warning
    return kwargs


def _summarise(
    runner: Runner,
    calls: dict[Arm, dict[tuple[int, int], Call]],
    inputs: Sequence[Inputs],
    settings: CompareSettings,
    threads: int,
) -> dict[str, ArmResult]:
    results = {}
    best = fastest_variants(calls)
    reference = calls[best[AR]] if AR in best and not settings.temperature else None
    for name, arm in best.items():
        variants = {other.variant: tokens_per_s(calls[other]) for other in calls if other.name == name}
        results[name] = summarise_arm(arm, calls[arm], variants)
        if reference is not None:
            differences = measure_differences(runner, calls[arm], reference, inputs, threads)
            identical = (len(inputs) - len(differences), len(inputs))
            results[name] = replace(results[name], identical_to_ar=identical, first_differences=differences)
    return compare_arms(results)


def measure_differences(
    runner: Runner, calls: Calls, reference: Calls, inputs: Sequence[Inputs], threads: int
) -> tuple[Difference, ...]:
    """[`find_differences`] with the gap between the target's two highest logits at each of them."""
    differences = []
    for difference in find_differences(calls, reference):
        prompt_ids = inputs[difference.prompt]["input_ids"][0].tolist()
        common = [*prompt_ids, *reference[0, difference.prompt].tokens[: difference.position]]
        differences.append(replace(difference, logit_gap=runner.top_two_gap(common, threads)))
    return tuple(differences)


def trace(runner: Runner, arm: Arm, inputs: Inputs, settings: RunSettings) -> SSDStats:
    """Statistics of one more call of an SSD arm that keeps the time line of both sides."""
    assert arm.config is not None
    traced = replace(arm, config=replace(arm.config, trace=True))
    stats = runner.run(traced, inputs, settings.max_new_tokens, settings.seed).stats
    assert stats is not None
    return stats
