"""Which mode and settings to use under given conditions, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .conditions import Conditions
from .prediction import Prediction, predict_ar, predict_sd, predict_ssd

# A simpler mode or setting is preferred to one that is faster by less than this: it is within what predictions miss by.
MARGIN = 1.03

# Longer speculations than `"auto"` allows, which a fast assistant can fill.
LONG_SPECULATIONS = (24, 32)

_Choice = TypeVar("_Choice")

_NAMES = {"ar": "AR", "sd": "SD", "ssd": "SSD"}


@dataclass(frozen=True)
class Devices:
    """Numbers of devices. SD's assistant shares the target's; SSD's has its own.

    Raises:
        ValueError: If a number is below 1.
    """

    target: int = 1
    assistant: int = 1

    def __post_init__(self) -> None:
        for name in ("target", "assistant"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}_devices` must be at least 1, but got {getattr(self, name)}.")

    def of(self, mode: str) -> int:
        return self.target + (self.assistant if mode == "ssd" else 0)

    def share(self, prediction: Prediction) -> float:
        """Tokens per second per device."""
        return prediction.tokens_per_s / self.of(prediction.mode)


@dataclass(frozen=True)
class Advice:
    """What to use.

    Args:
        settings: Fields of [`SSDConfig`], or of the `ssd_config` dict.
        prediction: What to expect of them.
        reasons: Why, in sentences.
    """

    settings: Mapping[str, Any]
    prediction: Prediction
    reasons: tuple[str, ...]


def advise(
    conditions: Conditions,
    *,
    batch_size: int,
    budgets: Sequence[int],
    devices: Devices,
    vocab_size: int | None = None,
) -> Advice:
    """The simplest mode and settings that are about as fast as any.

    Args:
        conditions: The pair and its hardware.
        batch_size: Rows that are decoded together.
        budgets: Cache budgets to choose from.
        devices: Numbers of devices.
        vocab_size: Tokens in the vocabulary; `None` if not known.
    """
    budget = _simplest({b: predict_ssd(conditions, batch_size, b) for b in sorted(budgets)})
    predict: dict[str, Callable[[Conditions], Prediction]] = {
        "ar": lambda given: predict_ar(given, batch_size),
        "sd": lambda given: predict_sd(given, batch_size),
        "ssd": lambda given: predict_ssd(given, batch_size, budget),
    }
    modes = {mode: function(conditions) for mode, function in predict.items()}
    mode = _simplest(modes)
    settings: dict[str, Any] = {"mode": mode}
    if mode == "ar":
        return Advice(settings, modes[mode], (_reason(modes, modes[mode]), *_about_devices(modes, mode, devices)))
    if mode == "ssd":
        settings["cache_budget"] = "auto"
    lengths = {"auto" if conditions.draft_length is None else conditions.draft_length: modes[mode]}
    lengths |= {number: predict[mode](conditions.with_draft_tokens(number)) for number in LONG_SPECULATIONS}
    length = _simplest(lengths)
    settings["num_assistant_tokens"] = length
    reasons = (
        _reason(modes, lengths[length]),
        *_about_vocabulary(settings, vocab_size),
        *_about_devices(modes, mode, devices),
    )
    return Advice(settings, lengths[length], reasons)


def _simplest(predictions: Mapping[_Choice, Prediction]) -> _Choice:
    """The first choice that is about as fast as the fastest."""
    fastest = max(each.tokens_per_s for each in predictions.values())
    return next(choice for choice, each in predictions.items() if each.tokens_per_s * MARGIN >= fastest)


def _reason(modes: Mapping[str, Prediction], best: Prediction) -> str:
    ar, sd, ssd = modes["ar"], modes["sd"], modes["ssd"]
    if best.mode == "ar":
        return (
            f"Drafting costs more than it gives: an SD round has {sd.tokens_per_round:.2f} tokens and takes "
            f"{sd.round_ms:.1f} ms, an SSD round {ssd.tokens_per_round:.2f} and {ssd.round_ms:.1f} ms, where AR takes "
            f"{ar.round_ms:.1f} ms for one. SSD is {_ratio(ssd, ar)} times AR, SD {_ratio(sd, ar)} times."
        )
    if best.mode == "sd":
        return (
            f"SD is {_ratio(best, ar)} times AR, and drafting ahead adds nothing to it: SSD is {_ratio(ssd, sd)} times "
            f"SD. Only {sd.wait_ms:.1f} of an SD round's {sd.round_ms:.1f} ms are not verification, and "
            f"{ssd.hit_rate:.0%} of the outcomes would be prepared for."
        )
    return (
        f"SSD is {_ratio(best, ar)} times AR and {_ratio(best, sd)} times SD. In an SD round the target waits for "
        f"{sd.wait_ms:.1f} of {sd.round_ms:.1f} ms, in an SSD round for {best.wait_ms:.1f} of {best.round_ms:.1f} ms: "
        f"{best.hit_rate:.0%} of the outcomes are prepared for, {best.steps} tokens deep. About {best.budget} outcomes "
        'pay here; cache_budget="auto" finds them round by round.'
    )


def _about_vocabulary(settings: dict[str, Any], vocab_size: int | None) -> list[str]:
    settings["draft_vocab_size"] = "auto"
    if vocab_size is None:
        return []
    from ..drafting.draft_vocab import AUTO_SHARE, MIN_AUTO_VOCAB_SIZE  # loads transformers, so only if it is asked

    if vocab_size < MIN_AUTO_VOCAB_SIZE:
        settings["draft_vocab_size"] = None
        return [f"The output projection onto {vocab_size} tokens costs little, so draft from all of them."]
    settings["draft_vocab_size"] = vocab_size // AUTO_SHARE
    return [
        f"The output projection onto {vocab_size} tokens dominates a small assistant's step, so draft from one in "
        f"{AUTO_SHARE} of them."
    ]


def _about_devices(modes: Mapping[str, Prediction], mode: str, devices: Devices) -> list[str]:
    best, thriftiest = modes[mode], max(modes.values(), key=devices.share)
    if devices.share(thriftiest) < devices.share(best) * MARGIN:
        return []
    return [
        f"Counted per device {_NAMES[thriftiest.mode]} gives most: {devices.share(thriftiest):.1f} tokens/s per device "
        f"on {devices.of(thriftiest.mode)}, against {devices.share(best):.1f} on {devices.of(best.mode)}. Take it "
        "where devices could serve other requests instead."
    ]


def _ratio(prediction: Prediction, other: Prediction) -> str:
    return f"{prediction.tokens_per_s / other.tokens_per_s:.2f}"
