"""Rounds played out event by event: the naive rival of the speed model."""

from __future__ import annotations

import random

from hf_ssd.bench.conditions import Conditions
from hf_ssd.theory import worthwhile_draft_length


def sd_race(conditions: Conditions, num_rounds: int, seed: int = 0) -> float:
    """Tokens per second of SD, with draft lengths that follow the run's own speed."""
    generator = random.Random(seed)
    now, tokens = 0.0, 0
    for _ in range(num_rounds):
        length = conditions.draft_length or worthwhile_draft_length(
            conditions.acceptance, conditions.token_ms, now / tokens if tokens else conditions.target_ms
        )
        ready = now + length * conditions.token_ms
        target_free = now + conditions.overhead_ms
        now = max(ready, target_free) + conditions.verify_ms(length + 1)
        tokens += accepted(generator, conditions, length) + 1
    return tokens / now * 1e3


class SSDRace:
    """SSD on a clock for each side. Draft lengths and steps follow what the run itself has measured so far."""

    def __init__(self, conditions: Conditions, batch_size: int = 1, seed: int = 0) -> None:
        self.conditions = conditions
        self.generator = random.Random(seed)
        self.lengths = [1] * batch_size  # of the speculations that are being verified
        self.sent_at = 0.0  # by the assistant
        self.target_free = 0.0
        self.num_rounds = self.num_hits = self.num_tokens = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.sent_at * 1e3

    @property
    def hit_rate(self) -> float:
        return self.num_hits / (self.num_rounds * len(self.lengths)) if self.num_rounds else 0.5

    def run(self, num_rounds: int) -> SSDRace:
        for _ in range(num_rounds):
            self.round()
        return self

    def round(self) -> None:
        conditions, batch_size = self.conditions, len(self.lengths)
        verify_ms = conditions.verify_ms(sum(self.lengths) + batch_size)
        known_at = max(self.sent_at, self.target_free) + verify_ms
        steps, assistant_free = self.draft_ahead(verify_ms, known_at)
        answered_at = max(known_at, assistant_free)
        lengths = [self.following(length, steps) for length in self.lengths]
        if None in lengths:
            backup = self.backup_length()
            answered_at += backup * conditions.draft_ms(batch_size)
            lengths = [backup if length is None else length for length in lengths]
        self.lengths = [length for length in lengths if length is not None]
        self.sent_at, self.target_free = answered_at, known_at + conditions.overhead_ms
        self.num_rounds += 1

    def draft_ahead(self, verify_ms: float, known_at: float) -> tuple[int, float]:
        """Steps that were started before the outcome was known, and when the last one ended."""
        step_ms = self.conditions.tree_step_ms(len(self.lengths), self.conditions.budget)
        now, steps, chance = self.sent_at, 0, 1.0
        while now < known_at and steps < len(self.conditions.acceptance):
            chance *= self.conditions.acceptance[steps]
            overrun = now - self.sent_at + step_ms - verify_ms
            if steps and self.hit_rate * chance * self.ms_per_token() <= overrun:
                break
            now += step_ms
            steps += 1
        return steps, now

    def following(self, length: int, steps: int) -> int | None:
        """The length of the next speculation of a row; `None` after a miss."""
        number = accepted(self.generator, self.conditions, length)
        self.num_tokens += number + 1
        if self.generator.random() >= self.conditions.hit_rate(self.conditions.budget):
            return None
        self.num_hits += 1
        return steps

    def backup_length(self) -> int:
        conditions = self.conditions
        if conditions.draft_length is not None:
            return conditions.draft_length
        token_ms = conditions.draft_ms(len(self.lengths))
        return worthwhile_draft_length(conditions.acceptance, token_ms, self.ms_per_token())

    def ms_per_token(self) -> float:
        if not self.sent_at:
            return self.conditions.target_ms
        return self.sent_at / self.num_tokens * len(self.lengths)


def accepted(generator: random.Random, conditions: Conditions, length: int) -> int:
    for position in range(length):
        if generator.random() >= conditions.acceptance[position]:
            return position
    return length
