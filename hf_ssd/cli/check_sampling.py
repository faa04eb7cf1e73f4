"""`hf-ssd check-sampling`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    AsJson,
    Assistant,
    AssistantThreads,
    Backup,
    Dtype,
    NumAssistantTokens,
    Seed,
    Target,
    TargetThreads,
    errors,
    number_or,
    run_with_progress,
    show_report,
    split,
)

if TYPE_CHECKING:
    from ..evaluation.sampling_settings import SamplingSettings


def check_sampling(
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "float32",
    rules: Annotated[str, typer.Option(help="Verification rules, with commas.")] = "token,block,coupled",
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 0.7,
    prompts: Annotated[int, typer.Option(help="Number of built-in prompts.")] = 40,
    samples: Annotated[int, typer.Option(help="Samples per prompt and sampler.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per sample.")] = 6,
    bias: Annotated[float, typer.Option(help="Bias that has to be caught, in total variation per token.")] = 0.03,
    significance: Annotated[float, typer.Option(help="Chance of any false alarm that is allowed.")] = 0.05,
    permutations: Annotated[int, typer.Option(help="How often labels are exchanged.")] = 9999,
    seed: Seed = 0,
    target_threads: TargetThreads = None,
    assistant_threads: AssistantThreads = None,
    num_assistant_tokens: NumAssistantTokens = "auto",
    backup: Backup = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for samples.jsonl, sampling.json and report.md. A run that was interrupted goes on there.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that sampling is not told from transformers' own, by a test that catches a small bias. Fails otherwise."""
    from ..evaluation.sampling_settings import SamplingSettings

    answer: Any = backup  # checked with the other settings
    with errors():
        settings = SamplingSettings(
            target=target,
            assistant=assistant,
            dtype=dtype,
            rules=split(rules),
            temperature=temperature,
            num_prompts=prompts,
            num_samples=samples,
            max_new_tokens=max_new_tokens,
            bias=bias,
            significance=significance,
            num_permutations=permutations,
            seed=seed,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
            num_assistant_tokens=number_or("num_assistant_tokens", num_assistant_tokens, {"auto": "auto"}),
            backup=answer,
            out=out,
        )
        passed = _check(settings, as_json)
    raise typer.Exit(0 if passed else 1)


def _check(settings: SamplingSettings, as_json: bool) -> bool:
    from ..evaluation.sampling_check import check_sampling as run_check
    from ..evaluation.sampling_report import write_check, write_check_files

    result = run_with_progress(lambda progress: run_check(settings, progress), settings.out)
    files = write_check_files(result, settings.out) if settings.out is not None else ()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_report(write_check(result), 120, settings.out, files)
    return result.passed
