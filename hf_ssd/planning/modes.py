"""Which mode a call should run in, by what calls before it have shown."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

ConcreteMode = Literal["ssd", "sd", "ar"]

MODES: tuple[ConcreteMode, ...] = ("ssd", "ar", "sd")
NUM_TRIES = 2  # of each mode that count; the first call of each, in which processes start, does not
NUM_TRIAL_CALLS = len(MODES) * (NUM_TRIES + 1)
RETRY_EVERY = 32  # calls, after which another mode is tried again: texts and machines change
MIN_TOKENS = 8  # of a call; shorter ones say more about the prompt than about decoding
WEIGHT = 0.3  # of a new call in the running mean


@dataclass
class _Figures:
    num_calls: int = 0
    tokens_per_s: float | None = None
    last_call: int = 0


@dataclass
class _Kind:
    num_calls: int = 0
    modes: dict[ConcreteMode, _Figures] = field(default_factory=lambda: {mode: _Figures() for mode in MODES})

    @property
    def fastest(self) -> ConcreteMode | None:
        known = [mode for mode in MODES if self.modes[mode].tokens_per_s is not None]
        return max(known, key=lambda mode: self.modes[mode].tokens_per_s or 0.0, default=None)


class ModePolicy:
    """Tries every mode on a few calls, then takes the fastest, and tries another from time to time.

    Calls are told apart by kind, for example the number of rows: each kind has figures of its own.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def choose(self, kind: Hashable) -> ConcreteMode:
        """The mode for the next call of a kind."""
        figures = self._kinds.setdefault(kind, _Kind())
        least_tried = min(MODES, key=lambda mode: figures.modes[mode].num_calls)
        if figures.modes[least_tried].num_calls <= NUM_TRIES:
            return least_tried
        if figures.num_calls % RETRY_EVERY == 0:
            return min(MODES, key=lambda mode: figures.modes[mode].last_call)
        return figures.fastest or "ssd"

    def learn(self, kind: Hashable, mode: ConcreteMode, num_tokens: int, duration_s: float) -> str | None:
        """Takes in how a call went.

        Returns:
            What changed, in words, if another mode is the fastest now.
        """
        figures = self._kinds.setdefault(kind, _Kind())
        before, of_mode = figures.fastest, figures.modes[mode]
        figures.num_calls += 1
        of_mode.num_calls += 1
        of_mode.last_call = figures.num_calls
        if of_mode.num_calls == 1 or num_tokens < MIN_TOKENS or duration_s <= 0:
            return None
        speed = num_tokens / duration_s
        known = of_mode.tokens_per_s
        of_mode.tokens_per_s = speed if known is None else known + WEIGHT * (speed - known)
        after = figures.fastest
        if before == after or before is None:
            return None
        speeds = ", ".join(
            f"{name} {each.tokens_per_s:.1f}" for name, each in figures.modes.items() if each.tokens_per_s
        )
        return f"{after} is faster than {before} now (tokens/s: {speeds})"
