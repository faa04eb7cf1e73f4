"""`hf-ssd families`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, console, errors, still


def families(
    only: Annotated[
        list[str] | None, typer.Option(help="A family, as in a config's model_type; may be repeated.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="process, stream or inline. Default: inline, and process for some.", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that try families at the same time.")] = 2,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Try SSD on a tiny model of each of transformers' families that generate text, as target and as assistant."""
    from ..config import SSDConfig
    from ..matrix.report import rich_table, summary, write_markdown
    from ..matrix.run import families_named, try_families
    from ..matrix.trials import FAILS

    still()
    with errors():
        chosen = families_named(only or [])
        placed = None if backend is None else SSDConfig(backend=backend).backend  # type: ignore[arg-type]
        progress = console(width=160)
        results = []
        with progress.status("") as status:
            for result in try_families(chosen, jobs, placed):
                results.append(result)
                status.update(f"{len(results)} of {len(chosen)}: {result.model_type} {result.result}")
        if markdown is not None:
            write_markdown(results, markdown, f"hf-ssd families --markdown {markdown}")
    if as_json:
        typer.echo(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        output = console(width=160)
        output.print(rich_table(results))
        output.print(summary(results), highlight=False)
    if any(result.result == FAILS for result in results):
        raise typer.Exit(1)
