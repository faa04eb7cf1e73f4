"""`hf-ssd compare`: the same prompts through every arm, interleaved and timed.

How it is measured. Every arm generates the same prompts with the same arguments; EOS ends a text where it does for a
user. The arms take turns prompt by prompt, and the order rotates, so that a machine that slows down slows all of them.
Every arm runs a short text first; starting the assistant's process falls into that. The clock runs around generate().
An arm's speed is all tokens of a repeat over all its time, and the median over the repeats.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from .. import pairs
from ..generation import disable_ssd
from ..runtime import placement
from ..trace import Overlap, measure_overlap, write_chrome_trace
from .arms import Arm, Call, Runner, build_arms
from .prompts import Prompt
from .results import (
    ArmResult,
    Comparison,
    Difference,
    compare_arms,
    fastest_variants,
    find_differences,
    summarise_arm,
    summarise_prompts,
    tokens_per_s,
)
from .settings import AR, SSD, CompareSettings

Progress = Callable[[str, int, int], None]

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Step:
    """One call of the schedule. `repeat` is `None` for a warm-up."""

    arm: Arm
    prompt: int
    repeat: int | None = None


def load(settings: CompareSettings) -> tuple[pairs.Pair, dict[str, str]]:
    """Loads the models of a comparison, and says what they are called.

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


def schedule(arms: Sequence[Arm], num_prompts: int, repeats: int) -> tuple[Step, ...]:
    """All calls in order: a warm-up of every arm, then prompt by prompt every arm in turn.

    The turns start with another arm each time and run backwards every second time: no arm always follows the same one.
    """
    steps = [Step(arm, 0) for arm in arms]
    for repeat in range(repeats):
        for prompt in range(num_prompts):
            turn = repeat * num_prompts + prompt
            direction = -1 if turn % 2 else 1
            order = [arms[(turn + direction * i) % len(arms)] for i in range(len(arms))]
            steps += [Step(arm, prompt, repeat) for arm in order]
    return tuple(steps)


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
    pair, names = load(settings)
    config, cores = settings.ssd_config, placement.available_cores()
    target_threads, assistant_threads = placement.split_threads(config.target_threads, config.assistant_threads, cores)
    arms = build_arms(settings.arms, config, target_threads, assistant_threads, cores)
    inputs = [encode(pair.tokenizer, prompt) for prompt in settings.prompts]
    with Runner(pair.target, pair.assistant, generation_kwargs(pair, settings)) as runner:
        calls = _run_all(runner, arms, inputs, settings, report)
        num_calls = sum(len(group) for group in calls.values()) + len(arms)
        report("comparing the texts", num_calls, num_calls)
        results = _summarise(runner, calls, inputs, settings, target_threads)
        overlap = None
        if settings.trace_path is not None:
            ssd = next(arm for arm in arms if arm.name == SSD)
            overlap = _trace(runner, ssd, inputs[0], settings, settings.trace_path)
    best = fastest_variants(calls)
    lengths = [tokens["input_ids"].shape[1] for tokens in inputs]
    return Comparison(
        pair=names,
        dtype=settings.dtype,
        generation={"max_new_tokens": settings.max_new_tokens, "repeats": settings.repeats, **settings.sampling},
        environment=environment(),
        arms=results,
        prompts=summarise_prompts(settings.prompts, lengths, {name: calls[arm] for name, arm in best.items()}),
        overlap=overlap,
    )


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> dict[str, torch.Tensor]:
    """Token ids and mask of a prompt, in the tokenizer's chat template where it has one."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt.text}]
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        tokens = tokenizer(prompt.text, return_tensors="pt")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


def generation_kwargs(pair: pairs.Pair, settings: CompareSettings) -> dict[str, Any]:
    """The arguments of generate() that all arms share."""
    kwargs = settings.sampling
    if pair.target.generation_config.pad_token_id is None and pair.tokenizer.eos_token_id is not None:
        kwargs["pad_token_id"] = pair.tokenizer.eos_token_id  # what transformers would choose, without its warning
    return kwargs


def environment() -> dict[str, Any]:
    """Hardware and versions that the figures depend on."""
    return {
        "processor": _processor_name(),
        "num_cpus": os.cpu_count(),
        "available_cores": placement.available_cores(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _run_all(
    runner: Runner,
    arms: Sequence[Arm],
    inputs: Sequence[dict[str, torch.Tensor]],
    settings: CompareSettings,
    report: Progress,
) -> dict[Arm, dict[tuple[int, int], Call]]:
    calls: dict[Arm, dict[tuple[int, int], Call]] = {arm: {} for arm in arms}
    steps = schedule(arms, len(inputs), settings.repeats)
    for done, step in enumerate(steps):
        if step.repeat is None:
            report(f"warming up {step.arm.label}", done, len(steps))
            runner.run(step.arm, inputs[step.prompt], min(WARM_UP_TOKENS, settings.max_new_tokens), settings.seed)
            continue
        report(f"{step.arm.label}, prompt {step.prompt + 1} of {len(inputs)}", done, len(steps))
        # The same seed for every arm, another one for every text.
        seed = settings.seed + step.repeat * len(inputs) + step.prompt
        call = runner.run(step.arm, inputs[step.prompt], settings.max_new_tokens, seed)
        calls[step.arm][step.repeat, step.prompt] = call
    return calls


def _summarise(
    runner: Runner,
    calls: dict[Arm, dict[tuple[int, int], Call]],
    inputs: Sequence[dict[str, torch.Tensor]],
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
            differences = find_differences(calls[arm], reference)
            results[name] = replace(
                results[name],
                identical_to_ar=(len(inputs) - len(differences), len(inputs)),
                first_differences=tuple(
                    _with_gap(runner, difference, inputs, reference[0, difference.prompt], threads)
                    for difference in differences
                ),
            )
    return compare_arms(results)


def _with_gap(
    runner: Runner, difference: Difference, inputs: Sequence[dict[str, torch.Tensor]], reference: Call, threads: int
) -> Difference:
    prompt_ids = inputs[difference.prompt]["input_ids"][0].tolist()
    common = [*prompt_ids, *reference.tokens[: difference.position]]
    return replace(difference, logit_gap=runner.top_two_gap(common, threads))


def _trace(
    runner: Runner, arm: Arm, inputs: dict[str, torch.Tensor], settings: CompareSettings, path: str | Path
) -> Overlap:
    assert arm.config is not None
    traced = replace(arm, config=replace(arm.config, trace=True))
    stats = runner.run(traced, inputs, settings.max_new_tokens, settings.seed).stats
    assert stats is not None
    write_chrome_trace(stats, path)
    return measure_overlap(stats)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
