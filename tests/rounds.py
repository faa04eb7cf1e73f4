"""Rounds with known figures."""

from __future__ import annotations

from hf_ssd.types import Miss, Origin, RoundStats


def make_round(*, hit: bool, ms: float = 10.0, accepted: int = 1, drafted: int = 2) -> RoundStats:
    return RoundStats(
        num_draft_tokens=drafted,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        origin=Origin.CACHE if hit else Origin.JUST_IN_TIME,
        miss=None if hit else Miss.TOKEN,
        verify_ms=0.8 * ms,
        wait_ms=0.2 * ms,
        draft_ms=0.5 * ms,
    )
