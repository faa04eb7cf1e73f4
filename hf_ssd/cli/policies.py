"""`hf-ssd policies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    AsJson,
    Assistant,
    AssistantThreads,
    Dtype,
    Repeats,
    Seed,
    Target,
    TargetThreads,
    errors,
    run_with_progress,
    show_report,
)


def policies(
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "bfloat16",
    prompts: Annotated[int, typer.Option(help="Prompts of the measurement with an unrelated assistant.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per text there.")] = 128,
    repeats: Repeats = 3,
    section_tokens: Annotated[int, typer.Option(help="Tokens of each of the changing text's three parts.")] = 300,
    seed: Seed = 0,
    target_threads: TargetThreads = None,
    assistant_threads: AssistantThreads = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for policies.json, policies.md and policies.png.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what mode "auto" makes of an assistant that is no help, and of a text that changes."""
    from ..bench.policies import PolicySettings, measure_policies
    from ..bench.policies_report import write_policies, write_policy_files

    with errors():
        settings = PolicySettings(
            target=target,
            assistant=assistant,
            dtype=dtype,
            num_prompts=prompts,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            section_tokens=section_tokens,
            seed=seed,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
        )
        result = run_with_progress(lambda progress: measure_policies(settings, progress), out)
        files = write_policy_files(result, out) if out is not None else ()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_report(write_policies(result), 140, out, files)
