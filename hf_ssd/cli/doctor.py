"""`hf-ssd doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .options import AsJson, Assistant, Dtype, console, errors, run_with_progress


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Name or folder of the target. Default: the embedded one.", show_default=False)
    ] = None,
    assistant: Assistant = None,
    dtype: Dtype = "bfloat16",
    probe: Annotated[bool, typer.Option(help="Load the models and measure them on some prompts.")] = True,
    probe_tokens: Annotated[int, typer.Option(help="Most tokens per text of the probe.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Say whether a pair fits, what would be refused and why, and what speed-up to expect. Status 1: refused."""
    from ..doctor.settings import DoctorSettings

    with errors():
        settings = DoctorSettings(model=model, assistant=assistant, dtype=dtype, probe=probe, probe_tokens=probe_tokens)
        from ..doctor.examination import examine

        diagnosis = run_with_progress(lambda progress: examine(settings, progress))
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        from ..doctor.report import print_diagnosis

        print_diagnosis(diagnosis, console(width=120))
    if diagnosis.is_refused:
        raise typer.Exit(1)
