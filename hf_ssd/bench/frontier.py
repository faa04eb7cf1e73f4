"""`hf-ssd frontier`: what each verification rule and Saguaro sampling trade acceptance for hits.

A benchmark whose SSD arms differ in rule and coefficient, with all that `hf-ssd bench` does to make arms comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .bench_settings import VARIANT_PREFIX
from .figures import ArmFigures, BenchResult
from .settings import AR
from .statistics import Estimate

RULES = ("coupled", "token", "block")
COEFFICIENTS = (1.0, 0.7, 0.5, 0.3)


@dataclass(frozen=True)
class FrontierPoint:
    """One rule with one coefficient at one temperature.

    Args:
        temperature: Of target and assistant; 0 is greedy, where rule and coefficient mean nothing.
        rule: `"coupled"`, `"token"` or `"block"`.
        coefficient: C of Saguaro sampling; 1 is off.
        acceptance: Accepted share of the draft tokens that verification reached.
        hit_rate: Share of outcomes that the speculation cache was prepared for.
        hit_rate_to_greedy: That over the hit rate of greedy decoding on the same prompts.
        tokens_per_round: Mean number of tokens of a target forward.
        tokens_per_s: After the first token.
        speed_up: That over plain generate()'s.
        num_rounds: What the rates are worth.
    """

    temperature: float
    rule: str
    coefficient: float
    acceptance: float | None
    hit_rate: float | None
    hit_rate_to_greedy: float | None
    tokens_per_round: float | None
    tokens_per_s: Estimate
    speed_up: Estimate | None
    num_rounds: int


@dataclass(frozen=True)
class Frontier:
    """Everything that `hf-ssd frontier` found out.

    Args:
        points: By temperature, then rule, then coefficient.
        greedy: The same model pair decoding greedily.
        bench: The benchmark behind it.
    """

    points: tuple[FrontierPoint, ...]
    greedy: FrontierPoint | None
    bench: BenchResult

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(point.temperature for point in self.points))

    def at(self, temperature: float) -> tuple[FrontierPoint, ...]:
        return tuple(point for point in self.points if point.temperature == temperature)

    def fastest(self, temperature: float) -> FrontierPoint:
        return max(self.at(temperature), key=lambda point: point.tokens_per_s.value)

    def to_dict(self) -> dict[str, Any]:
        fastest = {
            f"{temperature:g}": {"rule": best.rule, "coefficient": best.coefficient}
            for temperature in self.temperatures
            for best in (self.fastest(temperature),)
        }
        greedy = None if self.greedy is None else asdict(self.greedy)
        bench = self.bench.to_dict()
        shown = {key: bench[key] for key in ("pair", "dtype", "suite", "generation", "environment")}
        return {**shown, "points": [asdict(point) for point in self.points], "greedy": greedy, "fastest": fastest}


def frontier_variants(rules: Sequence[str], coefficients: Sequence[float]) -> dict[str, dict[str, Any]]:
    """The SSD arms, as variants of a benchmark.

    Raises:
        ValueError: If there is no rule or no coefficient.
    """
    for name, values in (("rules", rules), ("coefficients", coefficients)):
        if not values:
            raise ValueError(f"`{name}` must hold at least one value, but is empty.")
    return {
        f"{rule}, C = {coefficient:g}": {"verification": rule, "saguaro_coefficient": coefficient}
        for rule in rules
        for coefficient in coefficients
    }


def frontier_of(bench: BenchResult) -> Frontier:
    """Reads the frontier from a benchmark with the arms of [`frontier_variants`]."""
    sampled = [measurement for measurement in bench.measurements if measurement.temperature > 0]
    greedy = next(
        (
            _point(0.0, arm, None)
            for measurement in bench.measurements
            if measurement.temperature == 0
            for name, arm in measurement.arms.items()
            if arm.rounds is not None
        ),
        None,
    )
    points = tuple(
        _point(measurement.temperature, arm, None if greedy is None else greedy.hit_rate)
        for measurement in sampled
        for name, arm in measurement.arms.items()
        if name.startswith(VARIANT_PREFIX)
    )
    return Frontier(points, greedy, bench)


def _point(temperature: float, arm: ArmFigures, greedy_hit_rate: float | None) -> FrontierPoint:
    settings, rounds = arm.settings or {}, arm.rounds
    assert rounds is not None
    speed = arm.decode_tokens_per_s or arm.tokens_per_s
    return FrontierPoint(
        temperature=temperature,
        rule=settings["verification"],
        coefficient=settings["saguaro_coefficient"],
        acceptance=rounds.acceptance,
        hit_rate=rounds.hit_rate,
        hit_rate_to_greedy=rounds.hit_rate / greedy_hit_rate
        if rounds.hit_rate is not None and greedy_hit_rate
        else None,
        tokens_per_round=rounds.tokens_per_round,
        tokens_per_s=speed,
        speed_up=arm.decode_ratios.get(AR) or arm.ratios.get(AR),
        num_rounds=rounds.num_rounds,
    )
