"""Reads what `hf-ssd compare --json` and `hf-ssd bench` wrote, as far as prediction needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import SSDConfig
from .conditions import Conditions, conditions_of
from .profile import Profile
from .settings import AR, SD, SSD

MAX_FILE_BYTES = 2**28
_REMEDY = "Give a file that `hf-ssd compare --json` or `hf-ssd bench` wrote, with an `sd` or `ssd` arm."


@dataclass(frozen=True)
class RecordedRun:
    """One measurement of a pair.

    Args:
        title: What was measured.
        tokens_per_s: Measured speed after the first token, by arm: `"ar"`, `"sd"` and `"ssd"`, as far as they ran.
        profiles: Profiles of `"sd"` and `"ssd"`, as far as they ran.
        config: The settings they ran with.
    """

    title: str
    tokens_per_s: Mapping[str, float]
    profiles: Mapping[str, Profile]
    config: SSDConfig

    def conditions(self, mode: str = SSD) -> Conditions:
        """The conditions of the run, with the times of one arm: AR's are those of SD, where only one side computes."""
        first = SSD if mode == SSD else SD
        names = sorted(self.profiles, key=lambda name: name != first)
        return conditions_of(self.config, [self.profiles[name] for name in names])

    def as_measured(self) -> Conditions:
        """The conditions of SSD, with what AR took for a token where that was measured."""
        conditions = self.conditions()
        if AR not in self.tokens_per_s:
            return conditions
        return replace(conditions, single_ms=1e3 / self.tokens_per_s[AR] - conditions.overhead_ms)


def read_runs(path: Path) -> tuple[RecordedRun, ...]:
    """The measurements in a file, one per temperature.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it holds no measurement that a prediction can start from.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"`result` must have at most {MAX_FILE_BYTES} bytes, but {str(path)!r} has {size}. {_REMEDY}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`result` must be JSON, but {str(path)!r} is not: {error}. {_REMEDY}") from None
    measurements = values.get("measurements", [values]) if isinstance(values, dict) else []
    try:
        runs = [_run(values, each) for each in measurements if isinstance(each, dict) and _has_profile(each)]
    except (TypeError, AttributeError, KeyError) as error:
        # Another program's, or changed by hand: what is read of it is not of the kind that was written.
        raise ValueError(
            f"`result` must hold what `hf-ssd compare --json` or `hf-ssd bench` wrote, but {str(path)!r} holds "
            f"something else: {error}. {_REMEDY}"
        ) from None
    if not runs:
        raise ValueError(f"`result` must hold the profile of an arm, but {str(path)!r} holds none. {_REMEDY}")
    return tuple(runs)


def _run(values: Mapping[str, Any], measurement: Mapping[str, Any]) -> RecordedRun:
    arms = measurement["arms"]
    profiles = {name: Profile.from_dict(arms[name]["profile"]) for name in (SD, SSD) if _profile(arms, name)}
    speeds = {name: _value(arms[name].get("decode_tokens_per_s")) for name in (AR, *profiles) if name in arms}
    settings = dict(arms[SSD if SSD in profiles else SD].get("settings") or {})
    settings.pop("tried_tokens_per_s", None)
    pair = values.get("pair", {})
    title = f"{pair.get('target', 'target')} with {pair.get('assistant', 'assistant')}, {values.get('dtype', '')}"
    if "temperature" in measurement:
        title += f", temperature {measurement['temperature']:g}"
    return RecordedRun(
        title=title,
        tokens_per_s={name: speed for name, speed in speeds.items() if speed is not None},
        profiles=profiles,
        config=SSDConfig.from_dict(settings),
    )


def _has_profile(measurement: Mapping[str, Any]) -> bool:
    return any(_profile(measurement.get("arms", {}), name) for name in (SD, SSD))


def _profile(arms: Mapping[str, Any], name: str) -> Any:
    return arms.get(name, {}).get("profile")


def _value(figure: Any) -> float | None:
    """A figure, or the middle of one that comes with an interval.

    Raises:
        TypeError: If it is none.
    """
    value = figure["value"] if isinstance(figure, dict) else figure
    if value is None or (isinstance(value, (int, float)) and 0 < value < float("inf")):
        return value
    raise TypeError(f"{value!r} is no speed")
