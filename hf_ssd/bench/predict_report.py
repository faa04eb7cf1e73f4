"""A prediction for people: tables, bounds and advice in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .forecast import Check, Forecast
from .prediction import Prediction
from .scenarios import Scenario

TITLES = {"ar": "AR", "sd": "SD", "ssd": "SSD"}


def print_scenario(scenario: Scenario, console: Console) -> None:
    """Prints measured beside predicted, speeds over batch size and budget, bounds, and what to use."""
    forecast = scenario.forecast
    console.print(scenario.title, style="bold", highlight=False)
    for assumption in scenario.assumptions:
        console.print(f"Assumed: {assumption}", highlight=False)
    if scenario.checks:
        console.print(_checks(scenario.checks))
    console.print(_speeds(forecast))
    conditions, devices = forecast.conditions, forecast.settings.devices
    console.print(
        f"Tokens/s of all rows; in brackets per device, which are {devices.of('ar')} for AR and SD and "
        f"{devices.of('ssd')} for SSD. B: outcomes prepared per round. A target forward takes "
        f"{conditions.target_ms:.1f} ms, a draft token {conditions.token_ms:.1f} ms, a step ahead with B = "
        f"{conditions.budget} {conditions.step_ms:.1f} ms.",
        style="dim",
        highlight=False,
    )
    for sentence in (*_bounds(forecast), *_advice(forecast)):
        console.print(sentence, highlight=False)


def _checks(checks: Sequence[Check]) -> Table:
    table = _table("Measured and predicted, tokens/s after the first token")
    headings = ("measured", "predicted", "deviation", "tokens/round\nmeasured", "tokens/round\npredicted", "wait ms")
    for heading in headings:
        table.add_column(heading, justify="right")
    for check in checks:
        table.add_row(
            TITLES[check.mode],
            f"{check.measured:.2f}",
            f"{check.prediction.tokens_per_s:.2f}",
            f"{check.deviation:+.1%}",
            f"{check.measured_tokens_per_round:.2f}",
            f"{check.prediction.tokens_per_round:.2f}",
            f"{check.prediction.wait_ms:.1f}",
        )
    return table


def _speeds(forecast: Forecast) -> Table:
    devices = forecast.settings.devices

    def cell(prediction: Prediction) -> str:
        return f"{prediction.tokens_per_s:.1f} ({devices.share(prediction):.1f})"

    table = _table("Predicted tokens/s (per device)", "batch")
    for heading in ("AR", "SD", *(f"SSD, B = {budget}" for budget in forecast.settings.budgets)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in forecast.rows:
        table.add_row(str(row.batch_size), cell(row.ar), cell(row.sd), *(cell(each) for each in row.ssd))
    return table


def _bounds(forecast: Forecast) -> list[str]:
    critical = forecast.critical_batch_size
    sentences = [
        f"Perfect SSD, every round a hit and no wait: {forecast.perfect_ssd_tokens_per_s:.1f} tokens/s for one row.",
        f"A chain from this assistant gives at most {forecast.chain_bound:.2f} tokens per target forward.",
    ]
    if forecast.entropy_bound is not None:
        sentences.append(
            f"No draft of that many tokens gives more than about {forecast.entropy_bound:.2f} per target forward: the "
            "target's entropy says so."
        )
    if math.isinf(critical):
        sentences.append("Drafting just in time after a miss pays at every batch size.")
    elif critical < 1:
        sentences.append("Drafting just in time after a miss never pays here.")
    else:
        sentences.append(f"Drafting just in time after a miss pays up to batch size {critical:.1f}.")
    return sentences


def _advice(forecast: Forecast) -> list[str]:
    settings = ", ".join(f"{name}={value!r}" for name, value in forecast.advice.settings.items())
    size = forecast.settings.batch_sizes[0]
    return [f"[bold]For batch size {size}: SSDConfig({settings})[/bold]", *forecast.advice.reasons]


def _table(title: str, first: str = "") -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False)
    table.add_column(first, no_wrap=True)
    return table
