"""`hf-ssd bench`."""

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
    errors,
    numbers,
    run_benchmark,
    show_report,
    split,
    ssd_settings,
)

if TYPE_CHECKING:
    from ..bench.bench_settings import BenchSettings


def bench(
    suite: Annotated[
        str,
        typer.Option(help="chat, maths, code, copying, long, a JSONL file, or hub:NAME (also hub:NAME:CONFIG@SPLIT)."),
    ] = "code",
    sample: Annotated[
        int | None, typer.Option(help="Take so many prompts, spread over the categories.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(help="Suite long: prompt lengths, beside 256. Default: 4096.", show_default=False),
    ] = None,
    target: Target = None,
    assistant: Assistant = None,
    dtype: Dtype = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 64,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let EOS end texts; lengths may then differ.")
    ] = False,
    temperatures: Annotated[str, typer.Option(help="With commas; 0 decodes greedily.")] = "0,0.5,0.7,1",
    repeats: Repeats = 1,
    seed: Seed = 0,
    arms: Annotated[
        str | None, typer.Option(help="Arms to run, with commas. Default: all.", show_default=False)
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help='One more SSD arm, as "name:field=value,field=value" of SSDConfig; may be repeated.',
            show_default=False,
        ),
    ] = None,
    draft_lengths: Annotated[
        str, typer.Option(help="Draft lengths (K) for assisted generation, beside its defaults.")
    ] = "3,5,8",
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Also measure throughput with so many rows per call, with commas.", show_default=False),
    ] = None,
    replay: Annotated[bool, typer.Option(help="Record rounds and try every fan-out on them.")] = True,
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
        typer.Option(help="Folder for bench.json, report.md, plots and trace.json.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure SSD and transformers' ways to generate on a suite of prompts, with intervals, a report and plots."""
    from ..bench.bench_settings import BenchSettings, parse_variant
    from ..bench.settings import BENCH_ARM_NAMES

    with errors():
        settings = BenchSettings(
            suite=suite,
            sample=sample,
            prompt_tokens=None if prompt_tokens is None else numbers("prompt_tokens", prompt_tokens, int),
            target=target,
            assistant=assistant,
            dtype=dtype,
            max_new_tokens=max_new_tokens,
            stop_at_eos=stop_at_eos,
            temperatures=numbers("temperatures", temperatures, float),
            repeats=repeats,
            seed=seed,
            arms=BENCH_ARM_NAMES if arms is None else split(arms),
            variants=dict(parse_variant(text) for text in variant or ()),
            draft_lengths=numbers("draft_lengths", draft_lengths, int),
            batch_sizes=() if batch_sizes is None else numbers("batch_sizes", batch_sizes, int),
            replay=replay,
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
        _bench(settings, as_json)


def _bench(settings: BenchSettings, as_json: bool) -> None:
    from ..bench.files import write_files
    from ..bench.markdown import write_report

    result = run_benchmark(settings)
    files = write_files(result, settings.out) if settings.out is not None else ()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_report(write_report(result), 160, settings.out, files)
