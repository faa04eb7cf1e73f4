"""Where a prediction starts: the file of a measured run, published conditions, or times and rates that are given."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .advice import Devices
from .conditions import Changes, assumed_conditions
from .forecast import Check, Forecast, ForecastSettings, check, forecast
from .presets import PRESETS
from .recorded import read_runs


@dataclass(frozen=True)
class Scenario:
    """A prediction, with where it comes from.

    Args:
        title: What it is of.
        forecast: What to expect.
        checks: What was measured beside what is predicted for that; empty where nothing was measured.
        assumptions: What was assumed and why; empty where all was measured or given.
    """

    title: str
    forecast: Forecast
    checks: tuple[Check, ...] = ()
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        checks = [{**asdict(each), "deviation": each.deviation} for each in self.checks]
        return {**asdict(self), "checks": checks, "forecast": self.forecast.to_dict()}


def scenarios(
    result: Path | None,
    preset: str | None,
    changes: Changes,
    settings: ForecastSettings,
    target_devices: int | None = None,
    assistant_devices: int | None = None,
) -> tuple[Scenario, ...]:
    """The predictions that were asked for: one for each measurement in a file, otherwise one.

    Args:
        result: A file that `hf-ssd compare --json` or `hf-ssd bench` wrote.
        preset: A name in `PRESETS`.
        changes: What is different from these; without them all that is known.
        settings: What to predict for; its devices are replaced.
        target_devices: Number of the target's devices; `None` is the preset's, or one.
        assistant_devices: Number of the assistant's in SSD; `None` as above.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a value is not allowed, or there is nothing to start from.
    """
    if result is not None and preset is not None:
        raise ValueError(f"`preset` replaces a result, but got {preset!r} together with {str(result)!r}. Give one.")

    if preset is not None and preset not in PRESETS:
        raise ValueError(f"`preset` must be one of {sorted(PRESETS)}, but got {preset!r}.")
    published = None if preset is None else PRESETS[preset]
    usual = Devices() if published is None else published.devices
    devices = Devices(
        usual.target if target_devices is None else target_devices,
        usual.assistant if assistant_devices is None else assistant_devices,
    )
    settings = replace(settings, devices=devices)
    if published is not None:
        prediction = forecast(published.conditions.changed(changes), settings)
        return (Scenario(published.title, prediction, assumptions=published.assumptions),)
    if result is None:
        return (Scenario("The given times and rates", forecast(assumed_conditions(changes), settings)),)
    return tuple(
        Scenario(run.title, forecast(run.as_measured().changed(changes), settings), checks=check(run))
        for run in read_runs(result)
    )
