"""`hf-ssd predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, console, errors, numbers


def predict(
    result: Annotated[
        Path | None,
        typer.Argument(help="What `hf-ssd compare --json` or `hf-ssd bench` wrote.", show_default=False),
    ] = None,
    preset: Annotated[str | None, typer.Option(help='Published conditions: "paper".', show_default=False)] = None,
    target_ms: Annotated[
        float | None, typer.Option(help="A target forward of one token. Default: as measured.", show_default=False)
    ] = None,
    assistant_ms: Annotated[
        float | None, typer.Option(help="A draft token. Default: as measured.", show_default=False)
    ] = None,
    target_token_ms: Annotated[
        float | None, typer.Option(help="What one more token adds to a target forward.", show_default=False)
    ] = None,
    assistant_token_ms: Annotated[
        float | None, typer.Option(help="What one more token adds to an assistant forward.", show_default=False)
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Chance of a draft token to be accepted.", show_default=False)
    ] = None,
    hit_rate: Annotated[
        float | None,
        typer.Option(help="Share of outcomes prepared for, at the run's budget or the default.", show_default=False),
    ] = None,
    power_law: Annotated[
        float | None,
        typer.Option(help="r in: F prepared tokens miss with probability (1+F)^-r.", show_default=False),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="With commas; advice is for the first.")] = "1,2,4,8,16",
    budgets: Annotated[str, typer.Option(help="Outcomes prepared per round (B), with commas.")] = "4,8,16,32",
    target_devices: Annotated[int | None, typer.Option(help="Default: 1.", show_default=False)] = None,
    assistant_devices: Annotated[
        int | None, typer.Option(help="Beside the target's, in SSD. Default: 1.", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens in the vocabulary, for advice.", show_default=False)
    ] = None,
    entropy: Annotated[
        float | None, typer.Option(help="Mean entropy of the target, in nats, for its bound.", show_default=False)
    ] = None,
    entropy_second_moment: Annotated[
        float | None, typer.Option(help="Mean of sum p log^2 p; with --entropy.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict AR, SD and SSD from a measured run, or from times and rates: also for hardware one does not have."""
    from ..bench.conditions import Changes
    from ..bench.forecast import ForecastSettings
    from ..bench.scenarios import scenarios

    with errors():
        changes = Changes(
            target_ms=target_ms,
            assistant_ms=assistant_ms,
            target_token_ms=target_token_ms,
            assistant_token_ms=assistant_token_ms,
            acceptance=acceptance,
            hit_rate=hit_rate,
            power_law=power_law,
        )
        settings = ForecastSettings(
            batch_sizes=numbers("batch_sizes", batch_sizes, int),
            budgets=numbers("budgets", budgets, int),
            vocab_size=vocab_size,
            entropy=entropy,
            entropy_second_moment=entropy_second_moment,
        )
        found = scenarios(result, preset, changes, settings, target_devices, assistant_devices)
    if as_json:
        typer.echo(json.dumps([scenario.to_dict() for scenario in found], indent=2))
        return

    from ..bench.predict_report import print_scenario

    output = console(width=120)
    for scenario in found:
        print_scenario(scenario, output)
