"""`hf-ssd bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import errors, number_or, numbers, split

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
    target: Annotated[
        str | None, typer.Option(help="Name or folder of the target. Default: the embedded pair.", show_default=False)
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="Name or folder of the assistant.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 64,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let EOS end texts; lengths may then differ.")
    ] = False,
    temperatures: Annotated[str, typer.Option(help="With commas; 0 decodes greedily.")] = "0,0.5,0.7,1",
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
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
    replay: Annotated[bool, typer.Option(help="Record rounds and try every fan-out on them.")] = True,
    target_threads: Annotated[
        int | None, typer.Option(help="CPU threads of the target. Default: split.", show_default=False)
    ] = None,
    assistant_threads: Annotated[
        int | None, typer.Option(help="CPU threads of the assistant. Default: split.", show_default=False)
    ] = None,
    num_assistant_tokens: Annotated[str, typer.Option(help='Most draft tokens per round (K), or "auto".')] = "auto",
    draft_tree_size: Annotated[
        str, typer.Option(help='Most draft tokens in a token tree, "auto" or "none" (chains only).')
    ] = "auto",
    cache_budget: Annotated[str, typer.Option(help='Outcomes prepared per round (B), or "auto".')] = "auto",
    fan_out: Annotated[str, typer.Option(help="per_instance, geometric or uniform.")] = "per_instance",
    assistant_quantization: Annotated[
        str, typer.Option(help='"int8", "auto" or "none": the assistant\'s linear layers in 8 bits.')
    ] = "auto",
    draft_vocab_size: Annotated[str, typer.Option(help='Tokens to draft from, "auto" or "none" (all).')] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for bench.json, report.md, plots and trace.json.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
) -> None:
    """Measure SSD and transformers' ways to generate on a suite of prompts, with intervals, a report and plots."""
    from ..bench.bench_settings import BENCH_ARM_NAMES, BenchSettings, parse_variant

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
            replay=replay,
            target_threads=target_threads,
            assistant_threads=assistant_threads,
            num_assistant_tokens=number_or("num_assistant_tokens", num_assistant_tokens, {"auto": "auto"}),
            draft_tree_size=number_or("draft_tree_size", draft_tree_size, {"auto": "auto", "none": None}),
            cache_budget=number_or("cache_budget", cache_budget, {"auto": "auto"}),
            fan_out=fan_out,  # type: ignore[arg-type]
            assistant_quantization=None if assistant_quantization == "none" else assistant_quantization,  # type: ignore[arg-type]
            draft_vocab_size=number_or("draft_vocab_size", draft_vocab_size, {"auto": "auto", "none": None}),
            out=out,
        )
        _bench(settings, as_json)


def _bench(settings: BenchSettings, as_json: bool) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from transformers.utils import logging

    from ..bench.benchmark import Benchmark
    from ..bench.files import write_files
    from ..bench.markdown import write_report
    from ..bench.report import progress_bar

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
    with progress_bar(Console(stderr=True)) as progress:
        result = Benchmark(settings, progress).run()
    files = write_files(result, settings.out) if settings.out is not None else ()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    output = Console()
    if not output.is_terminal:
        output.width = max(output.width, 160)  # rich assumes 80 columns for a file or pipe
    output.print(Markdown(write_report(result)))
    if files:
        output.print(f"Written to {settings.out}: {', '.join(files)}.", highlight=False)
