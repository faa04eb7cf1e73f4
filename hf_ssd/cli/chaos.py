"""`hf-ssd chaos` and `hf-ssd soak`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, Seed, console, errors, run_with_progress

Markdown = Annotated[Path | None, typer.Option(help="Write the table to this file.", show_default=False)]


def chaos(
    runs: Annotated[int, typer.Option(min=1, help="Number of runs.")] = 200,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that do them.")] = 1,
    markdown: Markdown = None,
    as_json: AsJson = False,
) -> None:
    """Let things go wrong at random while tiny models generate: the text stays right, and nothing is left behind."""
    from ..chaos.jobs import run_all
    from ..chaos.report import chaos_summary, chaos_table, write_chaos

    with errors():
        results = run_with_progress(
            lambda progress: run_all(runs, seed, jobs, lambda name, number: progress(name, number, runs))
        )
        if markdown is not None:
            settings = f"--runs {runs} --seed {seed}" + (f" --jobs {jobs}" if jobs > 1 else "")
            write_chaos(results, markdown, f"hf-ssd chaos {settings} --markdown {markdown}")
    failing = [each for each in results if each.problem is not None]
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in results], indent=2))
    else:
        output = console(width=140)
        output.print(chaos_table(results))
        for each in failing:
            output.print(
                f"run {each.run.number}, {each.run.fault.name} ({each.run.backend}): {each.problem}", markup=False
            )
        output.print(chaos_summary(results), highlight=False)
    if failing:
        raise typer.Exit(1)


def soak(
    calls: Annotated[int, typer.Option(min=4, help="Calls of generate(), of 100 tokens each on average.")] = 2000,
    seed: Seed = 0,
    markdown: Markdown = None,
    as_json: AsJson = False,
) -> None:
    """Call generate() many times on tiny models: memory, descriptors, threads and processes stay as they are."""
    from ..chaos.report import soak_table, write_soak
    from ..chaos.soak import soak as soak_calls

    with errors():
        result = run_with_progress(
            lambda progress: soak_calls(calls, seed, lambda number: progress("calls", number, calls))
        )
        if markdown is not None:
            write_soak(result, markdown, f"hf-ssd soak --calls {calls} --seed {seed} --markdown {markdown}")
    if as_json:
        looks = [asdict(each) for each in result.looks]
        typer.echo(json.dumps({"looks": looks, "growth": result.growth(), "problems": result.problems()}, indent=2))
    else:
        output = console(width=120)
        output.print(soak_table(result))
        output.print(result.summary(), highlight=False)
    if result.problems():
        raise typer.Exit(1)
