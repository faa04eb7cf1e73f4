"""`hf-ssd distill`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Dtype, Seed, Target, errors, run_with_progress, show_report, split

if TYPE_CHECKING:
    from ..distill.settings import DistillSettings


def distill(
    out: Annotated[Path, typer.Option(help="Folder of the assistant. A run that was interrupted goes on there.")],
    kind: Annotated[
        str, typer.Option(help="model: a small model of the target's class. eagle3: one layer that reads its states.")
    ] = "model",
    target: Target = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Its decoder layers, the target's first. Default: a fifth of them, or those of --init-from.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Its hidden size. Default: the target's.", show_default=False)
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(help="Folder of an assistant to go on from.", show_default=False)
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens that an EAGLE-3 head may draft. Default: a quarter.", show_default=False),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="Tokens that an EAGLE-3 head drafts in training. Default: 4.", show_default=False),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="What to learn from, with commas: self (the target writes), JSONL files or hub:NAME with prompts that "
            "the target answers, text files and folders of them."
        ),
    ] = "self",
    held_out: Annotated[
        str | None,
        typer.Option(
            help="JSONL file or hub:NAME with prompts to measure on. Default: some texts are kept from training.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time in all, over all runs in this folder.")] = 60.0,
    tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens that the target writes. Default: two fifths of the time.", show_default=False),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Most passes over the texts.")] = 10,
    max_length: Annotated[int, typer.Option(help="Most tokens of a text.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer that the target writes.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Texts per step of training.")] = 8,
    writing_batch_size: Annotated[int, typer.Option(help="Texts that the target writes at once.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 3e-4,
    vocabulary: Annotated[
        str, typer.Option(help="Tokens that distributions are compared on: full, sampled or auto.")
    ] = "auto",
    teacher_cache: Annotated[
        str, typer.Option(help="Keep the target's hidden states on disk: on, off or auto (if there is room).")
    ] = "auto",
    save_minutes: Annotated[float, typer.Option(help="Time between checkpoints.")] = 5.0,
    dtype: Dtype = "bfloat16",
    device_map: Annotated[
        str | None, typer.Option(help='Where the target goes, as in from_pretrained: "auto".', show_default=False)
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make an assistant for a target by knowledge distillation, measure it, and write its model card."""
    from ..distill.settings import DistillSettings

    # Checked with the other settings.
    what: Any = kind
    choice: Any = vocabulary
    cache: Any = teacher_cache
    with errors():
        settings = DistillSettings(
            out=out,
            kind=what,
            target=target,
            layers=layers,
            width=width,
            init_from=init_from,
            draft_vocab_size=draft_vocab_size,
            depth=depth,
            data=split(data),
            held_out=held_out,
            minutes=minutes,
            tokens=tokens,
            epochs=epochs,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            writing_batch_size=writing_batch_size,
            learning_rate=learning_rate,
            vocabulary=choice,
            teacher_cache=cache,
            save_minutes=save_minutes,
            dtype=dtype,
            device_map=device_map,
            seed=seed,
        )
        _distill(settings, as_json)


def _distill(settings: DistillSettings, as_json: bool) -> None:
    from datasets import disable_progress_bars

    from ..distill.card import write_figures
    from ..distill.run import distill as run_distillation

    disable_progress_bars()
    result = run_with_progress(lambda progress: run_distillation(settings, progress), settings.out, "done")
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_report(write_figures(result), 120, settings.out, ("the assistant", "README.md", "distillation.json"))
