"""`hf-ssd frontier`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    numbers,
    run_benchmark,
    show_report,
    split,
)

if TYPE_CHECKING:
    from ..bench.bench_settings import BenchSettings


def frontier(
    suite: Annotated[
        str, typer.Option(help="chat, maths, code, copying, a JSONL file, or hub:NAME (also hub:NAME:CONFIG@SPLIT).")
    ] = "chat",
    sample: Annotated[
        int | None, typer.Option(help="Take so many prompts, spread over the categories.", show_default=False)
    ] = None,
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 64,
    temperatures: Annotated[str, typer.Option(help="With commas, all above 0.")] = "0.5,0.7,1",
    rules: Annotated[str, typer.Option(help="Verification rules, with commas.")] = "coupled,token,block",
    coefficients: Annotated[str, typer.Option(help="C of Saguaro sampling, with commas; 1 is off.")] = "1,0.7,0.5,0.3",
    repeats: Repeats = 1,
    seed: Seed = 0,
    target_threads: TargetThreads = None,
    assistant_threads: AssistantThreads = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for frontier.json, frontier.md and frontier.png.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure acceptance against hit rate for every verification rule and Saguaro coefficient, with the speed."""
    from ..bench.bench_settings import BenchSettings
    from ..bench.frontier import frontier_variants
    from ..bench.settings import AR

    with errors():
        chosen = numbers("temperatures", temperatures, float)
        if not chosen or min(chosen) <= 0:
            raise ValueError(
                f"`temperatures` must be above 0, but got {temperatures!r}: greedy decoding, which has no rule, is "
                "measured beside them anyway."
            )
        settings = BenchSettings(
            suite=suite,
            sample=sample,
            target=target,
            assistant=assistant,
            dtype=dtype,
            max_new_tokens=max_new_tokens,
            temperatures=(0.0, *chosen),
            repeats=repeats,
            seed=seed,
            arms=(AR,),
            variants=frontier_variants(split(rules), numbers("coefficients", coefficients, float)),
            replay=False,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
            out=out,
        )
        _frontier(settings, as_json)


def _frontier(settings: BenchSettings, as_json: bool) -> None:
    from ..bench.frontier import frontier_of
    from ..bench.frontier_report import write_frontier, write_frontier_files

    result = frontier_of(run_benchmark(settings))
    files = write_frontier_files(result, settings.out) if settings.out is not None else ()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_report(write_frontier(result), 130, settings.out, files)
