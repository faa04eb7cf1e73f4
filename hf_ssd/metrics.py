"""Counters and rates of a call, computed from its rounds. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .types import Origin, RoundStats, Span, Switch


@dataclass(frozen=True)
class SSDStats:
    """What one call of `generate()` did. `None` stands for a figure that the call did not produce.

    Args:
        mode: The mode that was asked for: `"ssd"`, `"sd"`, `"ar"` or `"auto"`.
        rounds: One entry per verification. The prefill is not among them: it verifies an empty speculation.
        num_tokens: Tokens generated, over all rows.
        start_s: When the call began, in seconds of `time.monotonic()`, as the other two.
        first_token_s: When the first token was known.
        end_s: When the call ended.
        degraded: The cause, where the speculator failed and the call went on without it.
        target_threads: CPU threads that the target ran on.
        assistant_threads: CPU threads that the assistant ran on; `None` where it shares the caller's.
        assistant_device: The device that the assistant ran on.
        verifier_spans: What the verifier did. Empty unless a trace was asked for.
        speculator_spans: What the speculator did. Empty unless a trace was asked for.
        switches: Changes of plan within the call, with their reasons, in order.
    """

    mode: str
    rounds: tuple[RoundStats, ...] = ()
    num_tokens: int = 0
    start_s: float = 0.0
    first_token_s: float | None = None
    end_s: float = 0.0
    degraded: str | None = None
    target_threads: int | None = None
    assistant_threads: int | None = None
    assistant_device: str | None = None
    verifier_spans: tuple[Span, ...] = ()
    speculator_spans: tuple[Span, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    @property
    def tokens_per_round(self) -> float | None:
        """Mean number of tokens that a target forward gave."""
        return _mean(r.num_emitted for r in self.rounds)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """For each draft position, how often it was accepted when all before it were."""
        return acceptance_by_position(self.rounds)

    @property
    def acceptance(self) -> float | None:
        """Share of the positions with draft tokens, as far as verification reached, at which one was accepted."""
        reached = sum(r.num_reached for r in self.rounds)
        return sum(r.num_accepted for r in self.rounds) / reached if reached else None

    @property
    def num_hits(self) -> int:
        return sum(r.origin is Origin.CACHE for r in self.rounds)

    @property
    def num_misses(self) -> int:
        return sum(r.miss is not None for r in self.rounds)

    @property
    def hit_rate(self) -> float | None:
        """Share of outcomes that the speculation cache was prepared for. `None` where none was looked up."""
        ahead = [r for r in self.rounds if (r.mode or self.mode) == "ssd"]
        num_hits = sum(r.origin is Origin.CACHE for r in ahead)
        num_misses = sum(r.miss is not None for r in ahead)
        return num_hits / (num_hits + num_misses) if num_hits + num_misses else None

    @property
    def num_switches(self) -> int:
        """Changes of plan that were meant to stay: trials are left out."""
        return sum(not switch.is_trial for switch in self.switches)

    @property
    def num_trials(self) -> int:
        """Other plans that were tried. The way back from a trial is no trial."""
        return sum(switch.is_trial and not switch.is_return for switch in self.switches)

    @property
    def tokens_by_mode(self) -> dict[str, int]:
        """Tokens of the rounds, by the mode they were in."""
        tokens: dict[str, int] = {}
        for r in self.rounds:
            mode = r.mode or self.mode
            tokens[mode] = tokens.get(mode, 0) + r.num_emitted
        return tokens

    @property
    def depth_at_hit(self) -> float | None:
        """Mean number of draft tokens that were ready when the outcome hit."""
        return _mean(r.depth for r in self.rounds if r.origin is Origin.CACHE)

    @property
    def verify_ms(self) -> float | None:
        """Mean time of a round's verification, in milliseconds."""
        return _mean(r.verify_ms for r in self.rounds)

    @property
    def wait_ms(self) -> float | None:
        """Mean time per round that the target waited for the assistant, in milliseconds."""
        return _mean(r.wait_ms for r in self.rounds)

    @property
    def draft_ms(self) -> float | None:
        """Mean time per round that the assistant computed, in milliseconds."""
        return _mean(r.draft_ms for r in self.rounds)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second end to end, prefill included."""
        return self.num_tokens / self.duration_s if self.duration_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first token. Rows that ran one after the other make this a mean over them."""
        if self.first_token_s is None or self.num_tokens < 2 or self.end_s <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.end_s - self.first_token_s)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, in milliseconds."""
        return None if self.first_token_s is None else (self.first_token_s - self.start_s) * 1e3

    def to_dict(self) -> dict[str, Any]:
        """The figures, without the rounds and spans they were computed from; units are in the names."""
        return {
            "mode": self.mode,
            "num_tokens": self.num_tokens,
            "num_rounds": self.num_rounds,
            "tokens_per_round": self.tokens_per_round,
            "acceptance": self.acceptance,
            "acceptance_by_position": list(self.acceptance_by_position),
            "hit_rate": self.hit_rate,
            "num_hits": self.num_hits,
            "num_misses": self.num_misses,
            "depth_at_hit": self.depth_at_hit,
            "verify_ms": self.verify_ms,
            "wait_ms": self.wait_ms,
            "draft_ms": self.draft_ms,
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "ttft_ms": self.ttft_ms,
            "duration_s": self.duration_s,
            "target_threads": self.target_threads,
            "assistant_threads": self.assistant_threads,
            "assistant_device": self.assistant_device,
            "degraded": self.degraded,
            "tokens_by_mode": self.tokens_by_mode,
            "num_switches": self.num_switches,
            "num_trials": self.num_trials,
        }

    def __str__(self) -> str:
        def show(value: float | None, unit: str = "", digits: int = 1) -> str:
            return "-" if value is None else f"{value:.{digits}f}{unit}"

        text = (
            f"{self.mode}: {self.num_tokens} tokens, {show(self.tokens_per_s)} tokens/s, "
            f"{show(self.tokens_per_round, digits=2)} tokens per round, hit rate {show(self.hit_rate, digits=2)}, "
            f"verify {show(self.verify_ms, ' ms')}, wait {show(self.wait_ms, ' ms')}, first token "
            f"{show(self.ttft_ms, ' ms')}"
        )
        if len(self.tokens_by_mode) > 1:
            text += ", tokens by mode: " + ", ".join(f"{mode} {num}" for mode, num in self.tokens_by_mode.items())
        return f"{text} (degraded: {self.degraded})" if self.degraded else text


def acceptance_by_position(rounds: Sequence[RoundStats]) -> tuple[float, ...]:
    """For each draft position, how often it was accepted when all before it were, over `rounds`."""
    rates = []
    for position in range(max((r.num_reached for r in rounds), default=0)):
        reached = [r for r in rounds if r.num_reached > position]
        rates.append(sum(r.num_accepted > position for r in reached) / len(reached))
    return tuple(rates)


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None
