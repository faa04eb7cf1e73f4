"""What `hf-ssd predict` finds out: predictions beside measurements, over batch sizes and budgets, and bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..theory import chain_bound, entropy_bound
from .advice import Advice, Devices, advise
from .conditions import Conditions
from .prediction import (
    Prediction,
    predict_ar,
    predict_critical_batch_size,
    predict_perfect_ssd,
    predict_sd,
    predict_ssd,
)
from .recorded import RecordedRun


@dataclass(frozen=True)
class Check:
    """A measured speed beside the predicted one, in tokens per second after the first token."""

    mode: str
    measured: float
    measured_tokens_per_round: float
    prediction: Prediction

    @property
    def deviation(self) -> float:
        """How much more was predicted, as a share of what was measured."""
        return self.prediction.tokens_per_s / self.measured - 1.0


@dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """What to predict for.

    Args:
        batch_sizes: Numbers of rows that are decoded together; advice is for the first.
        budgets: Cache budgets.
        devices: Numbers of devices.
        vocab_size: Tokens in the vocabulary; `None` if not known.
        entropy: Mean entropy of the target's distribution, in nats; `None` if not known.
        entropy_second_moment: Mean of `sum p log^2 p`; given with `entropy`.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
    """

    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16)
    budgets: Sequence[int] = (4, 8, 16, 32)
    devices: Devices = field(default_factory=Devices)
    vocab_size: int | None = None
    entropy: float | None = None
    entropy_second_moment: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "budgets"):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < 1:
                raise ValueError(f"`{name}` must be numbers of at least 1, with commas, but got {list(numbers)}.")
        if (self.entropy is None) != (self.entropy_second_moment is None):
            raise ValueError(
                f"`entropy` and `entropy_second_moment` belong together, but got {self.entropy} and "
                f"{self.entropy_second_moment}. Give both or neither."
            )


@dataclass(frozen=True)
class Row:
    """Predictions for one batch size: AR, SD, and SSD at every budget."""

    batch_size: int
    ar: Prediction
    sd: Prediction
    ssd: tuple[Prediction, ...]


@dataclass(frozen=True)
class Forecast:
    """What to expect under given conditions.

    Args:
        conditions: The pair and its hardware.
        settings: What was asked for.
        rows: Predictions, one row per batch size.
        perfect_ssd_tokens_per_s: Speed of one row if every round were a hit and nobody waited, at SSD's own depth.
        critical_batch_size: From here on drafting nothing after a miss beats drafting just in time.
        chain_bound: Most tokens per target forward that any chain of this assistant gives.
        entropy_bound: Most tokens per target forward of any draft of that many tokens, up to a constant. `None` where
            the target's entropy is not known, and at temperature 0.
        advice: Mode and settings for the first batch size.
    """

    conditions: Conditions
    settings: ForecastSettings
    rows: tuple[Row, ...]
    perfect_ssd_tokens_per_s: float
    critical_batch_size: float
    chain_bound: float
    entropy_bound: float | None
    advice: Advice

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, with tokens per second per device. What is infinite is `None`."""
        values = asdict(self)
        for name in ("critical_batch_size", "chain_bound"):
            values[name] = values[name] if math.isfinite(values[name]) else None
        share = self.settings.devices.share
        values["tokens_per_s_per_device"] = [
            {"batch_size": row.batch_size, "ar": share(row.ar), "sd": share(row.sd), "ssd": [share(p) for p in row.ssd]}
            for row in self.rows
        ]
        return values


def check(run: RecordedRun) -> tuple[Check, ...]:
    """Predictions for the arms of a run, beside what they reached.

    Each is predicted from times of single operations in its own arm (AR's are those of SD), acceptance by position over
    all arms, and for SSD its hit rates. Draft lengths, steps ahead, tokens per round, waiting and speed come out.
    """
    predictions = {"ar": predict_ar, "sd": predict_sd, "ssd": predict_ssd}
    return tuple(
        Check(mode, run.tokens_per_s[mode], _tokens_per_round(run, mode), predict(run.conditions(mode)))
        for mode, predict in predictions.items()
        if mode in run.tokens_per_s
    )


def forecast(conditions: Conditions, settings: ForecastSettings) -> Forecast:
    """Predicts everything that [`Forecast`] holds."""
    rows = tuple(
        Row(
            batch_size,
            predict_ar(conditions, batch_size),
            predict_sd(conditions, batch_size),
            tuple(predict_ssd(conditions, batch_size, budget) for budget in settings.budgets),
        )
        for batch_size in settings.batch_sizes
    )
    advice = advise(
        conditions,
        batch_size=settings.batch_sizes[0],
        budgets=settings.budgets,
        devices=settings.devices,
        vocab_size=settings.vocab_size,
    )
    budget = advice.prediction.budget
    depth = (predict_ssd(conditions, budget=budget).steps or 1) * conditions.depth_per_step
    bound = None
    if settings.entropy is not None and settings.entropy_second_moment is not None:
        num_tokens = max(round(conditions.width * depth), 1)
        bound = entropy_bound(settings.entropy, settings.entropy_second_moment, num_tokens)
    acceptance = conditions.acceptance
    return Forecast(
        conditions=conditions,
        settings=settings,
        rows=rows,
        perfect_ssd_tokens_per_s=predict_perfect_ssd(conditions, depth),
        critical_batch_size=predict_critical_batch_size(conditions, budget),
        chain_bound=chain_bound(sum(acceptance) / len(acceptance)),
        entropy_bound=bound,
        advice=advice,
    )


def _tokens_per_round(run: RecordedRun, mode: str) -> float:
    profile = run.profiles.get(mode)
    return 1.0 if profile is None else (profile.num_tokens - profile.num_calls) / profile.num_rounds
