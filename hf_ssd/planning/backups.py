"""Which backup answers a miss: drafting just in time, which all rows wait for, or one that takes no time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..theory import critical_batch_size

Backup = Literal["jit", "ngram", "none"]
Answer = Literal["cache", "jit", "ngram"]  # that brings draft tokens

MISSES_IN_A_ROW = 3  # from then on a row's figures are those of rows that keep missing
MIN_SEEN = 4  # of each kind, before a choice is made by figures
RETRY_EVERY = 32  # misses, after which drafting just in time is tried again: it cannot be measured otherwise
LEAST_WEIGHT = 0.02  # of something new in a mean, so that old text is forgotten
MOST_WEIGHT = 0.3  # of what has not been seen for long: then it stands for all that was not seen


@dataclass
class _Mean:
    value: float = 0.0
    num_seen: int = 0

    def update(self, value: float, gap: int = 1) -> None:
        """Takes in a value, the first one in `gap` misses."""
        self.num_seen += 1
        weight = min(1.0 - (1.0 - LEAST_WEIGHT) ** gap, MOST_WEIGHT)
        self.value += max(1.0 / self.num_seen, weight) * (value - self.value)


@dataclass
class _Figures:
    """Hit rate, and the tokens of the round after an outcome was answered from the cache, just in time or at once."""

    hit_rate: _Mean = field(default_factory=_Mean)
    cache: _Mean = field(default_factory=_Mean)
    jit: _Mean = field(default_factory=_Mean)
    ngram: _Mean = field(default_factory=_Mean)
    num_misses: int = 0
    num_misses_at_jit: int = 0

    @property
    def is_known(self) -> bool:
        return min(self.jit.num_seen, self.ngram.num_seen) >= MIN_SEEN

    @property
    def tokens_ratio(self) -> float:
        """Tokens per round with drafting just in time over those with copying."""
        at_hits, miss_rate = self.hit_rate.value * self.cache.value, 1.0 - self.hit_rate.value
        return (at_hits + miss_rate * self.jit.value) / (at_hits + miss_rate * self.ngram.value)


class BackupPolicy:
    """Takes the backup with most tokens per second, by the critical batch size of what has been measured.

    Drafting just in time gives a row more tokens, but every row waits for it as soon as one has missed. So it wins up
    to some number of rows ([`critical_batch_size`]). Rows that have missed several times in a row have figures of
    their own: the assistant may be at a loss there, and what it drafts worth less than the time.

    What copying would have given is known without trying it. Drafting just in time has to be tried from time to time.
    """

    def __init__(self) -> None:
        self._usual, self._missing = _Figures(), _Figures()
        self._jit_ms, self._verify_ms = _Mean(), _Mean()

    def choose(self, num_rows: int, misses_in_a_row: int) -> Backup:
        """What answers a miss.

        Args:
            num_rows: Rows that wait for each other.
            misses_in_a_row: Of this row, before this one.
        """
        figures = self._figures(misses_in_a_row)
        for each in self._all_figures(misses_in_a_row):
            each.num_misses += 1
        critical = self.critical_batch_size(misses_in_a_row)
        is_due = figures.num_misses % RETRY_EVERY == 0
        return "jit" if critical is None or num_rows < critical or is_due else "ngram"

    def critical_batch_size(self, misses_in_a_row: int = 0) -> float | None:
        """From how many rows on copying wins; `None` until enough has been seen."""
        figures = self._figures(misses_in_a_row)
        figures = figures if figures.is_known else self._usual
        if not figures.is_known or not self._jit_ms.num_seen or not self._verify_ms.value:
            return None
        backup = self._jit_ms.value / self._verify_ms.value
        return critical_batch_size(figures.hit_rate.value, figures.tokens_ratio, backup)

    def looked_up(self, is_hit: bool, misses_in_a_row: int) -> None:
        """An outcome was prepared for, or not, after so many misses of its row."""
        for figures in self._all_figures(misses_in_a_row):
            figures.hit_rate.update(float(is_hit))

    def gave(self, source: Answer, num_tokens: int, misses_in_a_row: int) -> None:
        """An answer after so many misses led to so many tokens, or would have."""
        for figures in self._all_figures(misses_in_a_row):
            gap = 1
            if source == "jit":
                gap, figures.num_misses_at_jit = figures.num_misses - figures.num_misses_at_jit, figures.num_misses
            getattr(figures, source).update(num_tokens, max(gap, 1))

    def jit_took(self, duration_ms: float) -> None:
        """Drafting just in time took so long."""
        self._jit_ms.update(duration_ms)

    def verification_took(self, duration_ms: float) -> None:
        """The target's forward and rule took so long."""
        self._verify_ms.update(duration_ms)

    def _figures(self, misses_in_a_row: int) -> _Figures:
        return self._missing if misses_in_a_row + 1 >= MISSES_IN_A_ROW else self._usual

    def _all_figures(self, misses_in_a_row: int) -> list[_Figures]:
        figures = self._figures(misses_in_a_row)
        return [self._usual] if figures is self._usual else [self._usual, figures]
