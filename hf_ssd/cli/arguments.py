"""`hf-ssd arguments`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from .options import AsJson, Seed, console, still


def arguments(
    valid: Annotated[int, typer.Option(min=0, help="Random valid calls.")] = 500,
    invalid: Annotated[int, typer.Option(min=0, help="Random calls with one thing wrong.")] = 200,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Try random arguments of generate() on tiny models: SSD returns the same, and refuses what is wrong at once."""
    import warnings

    from ..matrix.call_trials import FAILS, try_invalid, try_valid

    still()
    warnings.simplefilter("ignore")  # transformers' on values that it leaves out
    output = console(width=120)
    with output.status("") as status:
        results = []
        for number in range(valid + invalid):
            status.update(f"{number} of {valid + invalid} calls")
            results.append(try_valid(seed, number) if number < valid else try_invalid(seed, number - valid))
    failures = [each for each in results if each.result == FAILS]
    counts = {
        kind: dict(Counter(each.result for each in some))
        for kind, some in (("valid", results[:valid]), ("invalid", results[valid:]))
    }
    if as_json:
        typer.echo(json.dumps({**counts, "failures": [f"{each.call}: {each.reason}" for each in failures]}, indent=2))
    else:
        for each in failures:
            output.print(f"{each.call}\n  {each.reason}", highlight=False, markup=False)
        for kind, some in counts.items():
            parts = ", ".join(f"{count} {result}" for result, count in sorted(some.items()))
            output.print(f"{kind} calls: {parts or 'none'}", highlight=False)
    if failures:
        raise typer.Exit(1)
