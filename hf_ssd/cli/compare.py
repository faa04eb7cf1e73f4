"""`hf-ssd compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    AsJson,
    Assistant,
    AssistantQuantization,
    AssistantThreads,
    Backup,
    CacheBudget,
    DraftTreeSize,
    DraftVocabSize,
    Dtype,
    FanOut,
    NumAssistantTokens,
    Repeats,
    Seed,
    Target,
    TargetThreads,
    Verification,
    console,
    errors,
    run_with_progress,
    split,
    ssd_settings,
)

if TYPE_CHECKING:
    from ..bench.settings import CompareSettings


def compare(
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per text.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="When sampling.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="When sampling.", show_default=False)] = None,
    seed: Seed = 0,
    target_threads: TargetThreads = None,
    assistant_threads: AssistantThreads = None,
    prompts: Annotated[
        int | None, typer.Option(help="Number of built-in prompts. Default: 4.", show_default=False)
    ] = None,
    kinds: Annotated[str, typer.Option(help="Kinds of built-in prompts, with commas.")] = "chat,maths,code,copying",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be repeated.")] = None,
    repeats: Repeats = 1,
    num_assistant_tokens: NumAssistantTokens = "auto",
    draft_tree_size: DraftTreeSize = "auto",
    cache_budget: CacheBudget = "auto",
    fan_out: FanOut = "per_instance",
    assistant_quantization: AssistantQuantization = "auto",
    draft_vocab_size: DraftVocabSize = "auto",
    verification: Verification = "auto",
    backup: Backup = "auto",
    arms: Annotated[
        str, typer.Option(help="Arms to run, with commas.")
    ] = "ar,ar_all_cores,hf_assisted,hf_assisted_all_cores,sd,ssd",
    trace: Annotated[
        Path | None, typer.Option(help="Write a time line of one SSD call (Chrome trace format).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare SSD with plain and assisted generation of transformers, on the same prompts and machine."""
    from ..bench.settings import CompareSettings

    with errors():
        settings = CompareSettings(
            target=target,
            assistant=assistant,
            dtype=dtype,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
            num_prompts=prompts,
            kinds=split(kinds),
            texts=tuple(prompt or ()),
            repeats=repeats,
            **ssd_settings(
                num_assistant_tokens=num_assistant_tokens,
                draft_tree_size=draft_tree_size,
                cache_budget=cache_budget,
                fan_out=fan_out,
                assistant_quantization=assistant_quantization,
                draft_vocab_size=draft_vocab_size,
                verification=verification,
                backup=backup,
            ),
            arms=split(arms),
            trace_path=trace,
        )
        _compare(settings, as_json)


def _compare(settings: CompareSettings, as_json: bool) -> None:
    from ..bench.compare import compare as run_comparison
    from ..bench.report import print_report

    comparison = run_with_progress(lambda progress: run_comparison(settings, progress))
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_report(comparison, console(width=120))
