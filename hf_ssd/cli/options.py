"""What the commands share: options, how they are read, and how results and errors are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.bench_settings import BenchSettings
    from ..bench.figures import BenchResult
    from ..bench.schedule import Progress

Number = TypeVar("Number", int, float)
Result = TypeVar("Result")

Target = Annotated[
    str | None, typer.Option(help="Name or folder of the target. Default: the embedded pair.", show_default=False)
]
Assistant = Annotated[str | None, typer.Option(help="Name or folder of the assistant.", show_default=False)]
Dtype = Annotated[str, typer.Option(help="bfloat16, float32 or float16.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws.")]
Repeats = Annotated[int, typer.Option(help="How often everything is run.")]
TargetThreads = Annotated[
    int | None, typer.Option(help="CPU threads of the target. Default: split.", show_default=False)
]
AssistantThreads = Annotated[
    int | None, typer.Option(help="CPU threads of the assistant. Default: split.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]

# Fields of SSDConfig, read by `ssd_settings`.
NumAssistantTokens = Annotated[str, typer.Option(help='Most draft tokens per round (K), or "auto".')]
DraftTreeSize = Annotated[str, typer.Option(help='Most draft tokens in a token tree, "auto" or "none" (chains only).')]
CacheBudget = Annotated[str, typer.Option(help='Outcomes prepared per round (B), or "auto".')]
FanOut = Annotated[str, typer.Option(help="per_instance, geometric or uniform.")]
AssistantQuantization = Annotated[
    str, typer.Option(help='"int8", "auto" or "none": the assistant\'s linear layers in 8 bits.')
]
Verification = Annotated[
    str, typer.Option(help='Verification rule when sampling: "coupled", "token", "block" or "auto".')
]
Backup = Annotated[
    str, typer.Option(help='What answers an outcome that was not prepared for: "jit", "ngram", "none" or "auto".')
]
DraftVocabSize = Annotated[str, typer.Option(help='Tokens to draft from, "auto" or "none" (all).')]


@contextmanager
def errors() -> Iterator[None]:
    """Shows what a user can mend as one line on standard error, and leaves with status 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


def split(text: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def number_or(name: str, text: str, words: dict[str, Any]) -> Any:
    """A whole number, or what one of the words stands for."""
    if text in words:
        return words[text]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` must be a whole number or one of {sorted(words)}, but got {text!r}.") from None


def numbers(name: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    """The numbers of a list with commas."""
    try:
        return tuple(kind(part) for part in split(text))
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"`{name}` must be {word} with commas between them, but got {text!r}.") from None


def ssd_settings(
    *,
    num_assistant_tokens: str,
    draft_tree_size: str,
    cache_budget: str,
    fan_out: str,
    assistant_quantization: str,
    draft_vocab_size: str,
    verification: str,
    backup: str,
) -> dict[str, Any]:
    """Fields of [`SSDConfig`] from what was typed for them. Words that it does not know are for its own checks."""
    return {
        "num_assistant_tokens": number_or("num_assistant_tokens", num_assistant_tokens, {"auto": "auto"}),
        "draft_tree_size": number_or("draft_tree_size", draft_tree_size, {"auto": "auto", "none": None}),
        "cache_budget": number_or("cache_budget", cache_budget, {"auto": "auto"}),
        "fan_out": fan_out,
        "assistant_quantization": None if assistant_quantization == "none" else assistant_quantization,
        "draft_vocab_size": number_or("draft_vocab_size", draft_vocab_size, {"auto": "auto", "none": None}),
        "verification": verification,
        "backup": backup,
    }


def run_benchmark(settings: BenchSettings) -> BenchResult:
    """Runs a benchmark under a progress bar."""
    from ..bench.benchmark import Benchmark

    return run_with_progress(lambda progress: Benchmark(settings, progress).run(), settings.out)


def run_with_progress(
    run: Callable[[Progress], Result], out: Path | None = None, counted: str = "calls done"
) -> Result:
    """Runs a measurement under a progress bar. Its folder is made before, so that a bad one is no surprise after.

    Args:
        run: The measurement; it is given whom to tell how far it is.
        out: Its folder, if it has one.
        counted: What to call the steps, where progress is lines of text.
    """
    from rich.console import Console

    from ..bench.report import progress_bar

    still()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress_bar(Console(stderr=True), counted) as progress:
        return run(progress)


def show_report(report: str, width: int, out: Path | None, files: Sequence[str]) -> None:
    """Prints a report in Markdown, and which files were written."""
    from rich.markdown import Markdown

    output = console(width)
    output.print(Markdown(report))
    if files:
        output.print(f"Written to {out}: {', '.join(files)}.", highlight=False)


def still() -> None:
    """Silences transformers: its own bars, and warnings about its own calls, would break up ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def console(width: int) -> Console:
    """Standard output; in a file or pipe, for which rich assumes 80 columns, at least `width` wide."""
    from rich.console import Console

    output = Console()
    if not output.is_terminal:
        output.width = max(output.width, width)
    return output
