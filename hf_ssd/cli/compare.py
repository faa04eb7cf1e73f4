"""`hf-ssd compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import errors, number_or, split

if TYPE_CHECKING:
    from ..bench.settings import CompareSettings


def compare(
    target: Annotated[
        str | None, typer.Option(help="Name or folder of the target. Default: the embedded pair.", show_default=False)
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="Name or folder of the assistant.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per text.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="When sampling.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="When sampling.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    target_threads: Annotated[
        int | None, typer.Option(help="CPU threads of the target. Default: split.", show_default=False)
    ] = None,
    assistant_threads: Annotated[
        int | None, typer.Option(help="CPU threads of the assistant. Default: split.", show_default=False)
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help="Number of built-in prompts. Default: 4.", show_default=False)
    ] = None,
    kinds: Annotated[str, typer.Option(help="Kinds of built-in prompts, with commas.")] = "chat,maths,code,copying",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 1,
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
    arms: Annotated[
        str, typer.Option(help="Arms to run, with commas.")
    ] = "ar,ar_all_cores,hf_assisted,hf_assisted_all_cores,sd,ssd",
    trace: Annotated[
        Path | None, typer.Option(help="Write a time line of one SSD call (Chrome trace format).", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
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
            num_assistant_tokens=number_or("num_assistant_tokens", num_assistant_tokens, {"auto": "auto"}),
            draft_tree_size=number_or("draft_tree_size", draft_tree_size, {"auto": "auto", "none": None}),
            cache_budget=number_or("cache_budget", cache_budget, {"auto": "auto"}),
            fan_out=fan_out,  # type: ignore[arg-type]
            assistant_quantization=None if assistant_quantization == "none" else assistant_quantization,  # type: ignore[arg-type]
            draft_vocab_size=number_or("draft_vocab_size", draft_vocab_size, {"auto": "auto", "none": None}),
            arms=split(arms),
            trace_path=trace,
        )
        _compare(settings, as_json)


def _compare(settings: CompareSettings, as_json: bool) -> None:
    from rich.console import Console
    from transformers.utils import logging

    from ..bench.compare import compare as run_comparison
    from ..bench.report import print_report, progress_bar

    # transformers' own bars and warnings about its own calls would break up ours.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with progress_bar(Console(stderr=True)) as progress:
        comparison = run_comparison(settings, progress)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(), indent=2))
    else:
        output = Console()
        if not output.is_terminal:
            output.width = max(output.width, 120)  # rich assumes 80 columns for a file or pipe
        print_report(comparison, output)
