"""Calibration: how often the target does what the assistant holds likely."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise


class Event(Enum):
    """What the assistant's probability of a token may have to predict. Each has its own law."""

    ACCEPTED = "accepted"  # the token was drafted, and the target accepts it
    REPLACED = "replaced"  # what was drafted there is rejected, and this is the bonus token
    APPENDED = "appended"  # nothing was drafted there, and this is the bonus token
    COPIED = "copied"  # the token followed earlier in the text, and the target accepts it; by the strength of the match
    BORROWED = "borrowed"  # the same for what the assistant drafted after the token in another branch
    OBJECTED = "objected"  # the same where the assistant would rather have something else


# Finer where it matters: near certainty a small step in probability is a large one in the tokens that follow.
EDGES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
TILT = 0.02


class Calibration:
    """Turns the assistant's probability of a token into the chance that the target agrees.

    Probabilities fall into bins. Each bin holds the mean of a Beta distribution that starts at the assistant's own word
    and follows what was seen; old observations fade, since text changes. What the bins say is made to rise with the
    probability (isotonic regression: chance must not put a token before a likelier one) and interpolated.

    Args:
        expected: Acceptance believed at the start. What the assistant says of the tokens that it drafts is drawn
            towards it.
        weight: How many observations the start is worth.
        memory: What share of its weight an observation of a bin keeps when the next one comes.
    """

    def __init__(self, expected: float = 0.7, weight: float = 8.0, memory: float = 0.998) -> None:
        self.weight = weight
        self.memory = memory
        bounds = (0.0, *EDGES, 1.0)
        self._centers = [(low + high) / 2 for low, high in pairwise(bounds)]
        self._curves: dict[Event, list[float]] = {}  # fitted when asked for
        self._seen = {event: [0.0] * len(self._centers) for event in Event}
        self._happened = {event: [0.0] * len(self._centers) for event in Event}
        self._prior = {event: list(self._centers) for event in Event}
        # Draft tokens that the assistant holds likely are right about as often as expected; the others hardly ever are,
        # since they only come when both models disagree with its first choice.
        self._prior[Event.ACCEPTED] = [
            center + center * (expected - center) / 2 if center > 0.3 else center / 2 for center in self._centers
        ]

        self._prior[Event.COPIED] = [center * 0.6 for center in self._centers]
        self._prior[Event.BORROWED] = [center * 0.6 for center in self._centers]
        self._prior[Event.OBJECTED] = [center * 0.15 for center in self._centers]

    def update(self, event: Event, probability: float, happened: bool) -> None:
        """Takes in whether the target agreed on a token that the assistant gave `probability`."""
        bin_ = bisect_right(EDGES, probability)
        self._seen[event][bin_] = self.memory * self._seen[event][bin_] + 1
        self._happened[event][bin_] = self.memory * self._happened[event][bin_] + happened
        self._curves.pop(event, None)

    def __call__(self, event: Event, probability: float) -> float:
        """The chance of `event` for a token that the assistant gives `probability`."""
        rates = self._curves.get(event)
        if rates is None:
            rates = self._curves[event] = self._fit(event)
        above = bisect_right(self._centers, probability)
        low, low_rate = (self._centers[above - 1], rates[above - 1]) if above else (0.0, 0.0)
        high, high_rate = (self._centers[above], rates[above]) if above < len(rates) else (1.0, rates[-1])
        share = (probability - low) / (high - low)
        # Where bins were pooled the assistant still has a word.
        return (low_rate + share * (high_rate - low_rate)) * (1 - TILT + TILT * probability)

    def _fit(self, event: Event) -> list[float]:
        """The rate of each bin, made to rise by pooling adjacent bins that do not."""
        pools: list[tuple[float, float, int]] = []  # rate, weight, bins
        for happened, seen, prior in zip(self._happened[event], self._seen[event], self._prior[event], strict=True):
            # What was only believed at the start gives way to what was seen next to it.
            rate, weight, size = (happened + self.weight * prior) / (seen + self.weight), seen + 0.1, 1
            while pools and pools[-1][0] >= rate:
                other, other_weight, other_size = pools.pop()
                rate = (rate * weight + other * other_weight) / (weight + other_weight)
                weight, size = weight + other_weight, size + other_size
            pools.append((rate, weight, size))
        return [rate for rate, _, size in pools for _ in range(size)]

    def chances(self, event: Event, probabilities: Sequence[float]) -> list[float]:
        """The chance of `event` for each of several tokens."""
        return [self(event, probability) for probability in probabilities]
