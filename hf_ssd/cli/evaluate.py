"""`hf-ssd evaluate`."""

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
    Seed,
    Target,
    TargetThreads,
    Verification,
    errors,
    numbers,
    run_with_progress,
    show_report,
    split,
    ssd_settings,
)

if TYPE_CHECKING:
    from ..evaluation.settings import EvaluationSettings


def evaluate(
    suite: Annotated[
        str,
        typer.Option(
            help="gsm8k, humaneval, summarisation, copying, with commas; each from the hub, or NAME=FILE (JSONL)."
        ),
    ] = "gsm8k,humaneval",
    limit: Annotated[
        str | None,
        typer.Option(help="Items per task: one number, or one for each with commas. Default: all.", show_default=False),
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Arms to run, with commas: ar, ar_all_cores, hf_assisted, sd, ssd.")
    ] = "ar,sd,ssd",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help='One more SSD arm, as "name:field=value,field=value" of SSDConfig; may be repeated.',
            show_default=False,
        ),
    ] = None,
    variant_limit: Annotated[
        int | None, typer.Option(help="Items per task for these arms. Default: as for the others.", show_default=False)
    ] = None,
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "float32",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    seeds: Annotated[int, typer.Option(help="Samples per item, when sampling.")] = 1,
    seed: Seed = 0,
    target_threads: TargetThreads = None,
    assistant_threads: AssistantThreads = None,
    num_assistant_tokens: NumAssistantTokens = "auto",
    draft_tree_size: DraftTreeSize = "auto",
    cache_budget: CacheBudget = "auto",
    fan_out: FanOut = "per_instance",
    assistant_quantization: AssistantQuantization = "auto",
    draft_vocab_size: DraftVocabSize = "auto",
    verification: Verification = "auto",
    backup: Backup = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for samples.jsonl, evaluation.json and report.md. A run that was interrupted goes on there.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check on tasks that nothing is lost: scores, identical texts and speed of every arm against plain decoding."""
    from ..bench.bench_settings import parse_variant
    from ..evaluation.settings import EvaluationSettings

    with errors():
        settings = EvaluationSettings(
            suites=split(suite),
            limits=() if limit is None else numbers("limit", limit, int),
            arms=split(arms),
            variants=dict(parse_variant(text) for text in variant or ()),
            variant_limit=variant_limit,
            target=target,
            assistant=assistant,
            dtype=dtype,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=seeds,
            seed=seed,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
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
            out=out,
        )
        _evaluate(settings, as_json)


def _evaluate(settings: EvaluationSettings, as_json: bool) -> None:
    from ..evaluation.report import write_evaluation, write_files
    from ..evaluation.run import evaluate_arms

    result = run_with_progress(lambda progress: evaluate_arms(settings, progress), settings.out)
    files = write_files(result, settings.out) if settings.out is not None else ()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_report(write_evaluation(result), 140, settings.out, files)
