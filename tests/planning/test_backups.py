"""The choice of what answers a miss."""

from __future__ import annotations

import math

import pytest

from hf_ssd.planning.backups import MISSES_IN_A_ROW, RETRY_EVERY, BackupPolicy
from hf_ssd.theory import critical_batch_size


def taught(*, jit: int = 3, ngram: int = 1, jit_ms: float = 50.0) -> BackupPolicy:
    """A policy that has seen rounds of 100 ms, of which eight in ten were hits."""
    policy = BackupPolicy()
    for _ in range(20):
        policy.gave("cache", 3, 0)
        policy.gave("jit", jit, 0)
        policy.gave("ngram", ngram, 0)
        policy.jit_took(jit_ms)
        policy.verification_took(100.0)
    for _ in range(10):
        for turn in range(10):
            policy.looked_up(turn < 8, 0)
    return policy


def test_nothing_is_known_at_first() -> None:
    policy = BackupPolicy()
    assert policy.critical_batch_size() is None
    assert policy.choose(100, 0) == "jit"


def test_the_critical_batch_size_decides() -> None:
    policy = taught()
    critical = policy.critical_batch_size()
    hit_rate = 0.8
    ratio = 3.0 / (hit_rate * 3.0 + (1 - hit_rate) * 1.0)
    assert critical == pytest.approx(critical_batch_size(hit_rate, ratio, 0.5), rel=0.15)
    assert 1 < critical < 8
    assert [policy.choose(rows, 0) for rows in (1, math.floor(critical), math.ceil(critical), 64)] == [
        "jit", "jit", "ngram", "ngram",
    ]  # fmt: skip


@pytest.mark.parametrize(("changes", "chosen"), [({"jit": 1}, "ngram"), ({"jit_ms": 1.0}, "jit")])
def test_what_gives_more_for_nothing_wins_at_any_size(changes: dict, chosen: str) -> None:
    policy = taught(**changes)
    assert {policy.choose(rows, 0) for rows in (1, 4, 64)} == {chosen}


def test_the_choice_follows_the_times() -> None:
    policy = taught()
    assert policy.choose(8, 0) == "ngram"
    for _ in range(300):
        policy.jit_took(5.0)
    assert policy.choose(8, 0) == "jit"


def test_rows_that_keep_missing_are_judged_by_their_own_figures() -> None:
    policy = taught()
    late = MISSES_IN_A_ROW - 1
    assert policy.choose(1, late) == "jit"  # nothing else is known of them
    for _ in range(10):
        policy.looked_up(False, late)
        policy.gave("jit", 1, late)
        policy.gave("ngram", 1, late)
    assert policy.choose(1, late) == "ngram"
    assert policy.choose(1, 0) == "jit"


def test_it_comes_back_to_the_assistant_when_the_text_does() -> None:
    policy = taught(jit=1)
    assert policy.choose(1, 0) == "ngram"
    num_misses = 0
    while num_misses < 10 * RETRY_EVERY:
        num_misses += 1
        if policy.choose(1, 0) == "jit":
            policy.gave("jit", 4, 0)
            if policy.choose(1, 0) == "jit":
                break
    assert num_misses <= 4 * RETRY_EVERY


def test_drafting_just_in_time_is_tried_again_from_time_to_time() -> None:
    policy = taught()
    chosen = [policy.choose(64, 0) for _ in range(3 * RETRY_EVERY)]
    assert chosen.count("jit") == 3
