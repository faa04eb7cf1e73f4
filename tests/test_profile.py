from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from hf_ssd.bench.profile import Profile, profile_of
from hf_ssd.metrics import SSDStats
from hf_ssd.types import Miss, Origin, RoundStats

VERIFY_BASE_MS, VERIFY_TOKEN_MS, OVERHEAD_MS = 30.0, 1.5, 0.5
STEP_MS, TOKEN_MS, PREFILL_MS = 12.0, 9.0, 80.0


def verify_ms(num_draft_tokens: int) -> float:
    return VERIFY_BASE_MS + VERIFY_TOKEN_MS * (num_draft_tokens + 1)


def hit(num_draft_tokens: int, num_accepted: int, steps: int = 3) -> RoundStats:
    return RoundStats(
        num_draft_tokens=num_draft_tokens,
        num_accepted=num_accepted,
        num_reached=min(num_accepted + 1, num_draft_tokens),
        num_emitted=num_accepted + 1,
        origin=Origin.CACHE,
        depth=num_draft_tokens,
        verify_ms=verify_ms(num_draft_tokens),
        wait_ms=1.0,
        draft_ms=steps * STEP_MS,
        num_draft_steps=steps,
    )


def miss(num_draft_tokens: int, num_accepted: int, steps: int = 3) -> RoundStats:
    return RoundStats(
        num_draft_tokens=num_draft_tokens,
        num_accepted=num_accepted,
        num_reached=min(num_accepted + 1, num_draft_tokens),
        num_emitted=num_accepted + 1,
        origin=Origin.JUST_IN_TIME,
        miss=Miss.TOKEN if steps else None,  # mode "sd", which looks nothing up
        depth=num_draft_tokens,
        verify_ms=verify_ms(num_draft_tokens),
        wait_ms=TOKEN_MS * num_draft_tokens,
        draft_ms=steps * STEP_MS + TOKEN_MS * num_draft_tokens,
        num_draft_steps=steps + num_draft_tokens,
    )


def call(mode: str, rounds: list[RoundStats]) -> SSDStats:
    decode_ms = sum(r.verify_ms + r.wait_ms + OVERHEAD_MS for r in rounds)
    return SSDStats(
        mode=mode,
        rounds=tuple(rounds),
        num_tokens=1 + sum(r.num_emitted for r in rounds),
        start_s=10.0,
        first_token_s=10.0 + PREFILL_MS / 1e3,
        end_s=10.0 + (PREFILL_MS + decode_ms) / 1e3,
    )


def random_rounds(seed: int, num_rounds: int, *, mode: str) -> list[RoundStats]:
    generator = random.Random(seed)
    rounds = []
    for _ in range(num_rounds):
        depth = generator.randint(1, 4)
        make = hit if mode == "ssd" and generator.random() < 0.7 else miss
        rounds.append(make(depth, generator.randint(0, depth), 3 if mode == "ssd" else 0))
    return rounds


@pytest.mark.parametrize("mode", ["ssd", "sd"])
def test_times_that_made_a_run_are_found_in_it(mode: str) -> None:
    profile = profile_of([call(mode, random_rounds(seed, 40, mode=mode)) for seed in range(3)])
    assert profile is not None
    assert (profile.mode, profile.num_calls, profile.num_rounds) == (mode, 3, 120)
    assert profile.verify_base_ms == pytest.approx(VERIFY_BASE_MS)
    assert profile.verify_token_ms == pytest.approx(VERIFY_TOKEN_MS)
    assert profile.verify_ms(4) == pytest.approx(verify_ms(3))
    assert profile.overhead_ms == pytest.approx(OVERHEAD_MS)
    assert profile.prefill_ms == pytest.approx(PREFILL_MS)
    assert profile.token_ms == pytest.approx(TOKEN_MS)
    assert profile.step_ms == (pytest.approx(STEP_MS) if mode == "ssd" else None)


def test_hits_and_misses_are_told_apart() -> None:
    rounds = [hit(2, 2), miss(2, 1), hit(2, 0), hit(3, 3), hit(1, 0)]
    profile = profile_of([call("ssd", rounds)])
    assert profile is not None
    assert profile.hit_rate == pytest.approx(4 / 5)
    assert profile.tokens_at_hit == pytest.approx((3 + 1 + 4 + 1) / 4)
    assert (profile.tokens_at_miss, profile.depths_at_miss, profile.wait_at_miss_ms) == (2, (0, 0, 1), 2 * TOKEN_MS)
    assert (profile.depth_at_hit, profile.wait_at_hit_ms) == (2, 1)
    assert (profile.steps_at_hit, profile.steps_at_miss) == (3, 2)


def test_acceptance_counts_the_speculations_that_reached_a_position() -> None:
    rounds = [hit(2, 2), hit(2, 1), hit(2, 0), hit(3, 3), hit(1, 0), hit(1, 1)]
    profile = profile_of([call("ssd", rounds)])
    assert profile is not None
    # The last round does not count: its speculation may have been cut to the tokens still wanted.
    assert profile.acceptance == pytest.approx((3 / 5, 2 / 4, 1.0))
    assert profile.num_drafted == (5, 4, 1)


def test_trees_hold_several_tokens_per_position() -> None:
    tree = replace(hit(2, 1), num_draft_tokens=6, num_reached=2)
    profile = profile_of([call("ssd", [tree, tree, hit(2, 1)])])
    assert profile is not None
    assert profile.width == pytest.approx(14 / 6)
    assert profile.acceptance == (1.0, 0.0)


def test_the_prefill_of_the_assistant_is_no_step() -> None:
    first = RoundStats(1, 0, 1, 1, Origin.CACHE, depth=1, verify_ms=33.0, draft_ms=500.0, num_draft_steps=1)
    profile = profile_of([call("ssd", [first, hit(1, 0)])])
    assert profile is not None
    assert profile.step_ms == STEP_MS


def test_what_a_run_does_not_show_is_none() -> None:
    """No hit: a step is not told from a token. Equal lengths: no slope. No misses: no time of a backup."""
    all_misses = profile_of([call("ssd", [miss(2, 0), miss(2, 1)])])
    all_hits = profile_of([call("ssd", [hit(2, 0), hit(2, 1)])])
    assert all_misses is not None
    assert all_hits is not None
    assert (all_misses.hit_rate, all_misses.step_ms, all_misses.token_ms) == (0.0, None, None)
    assert (all_misses.verify_base_ms, all_misses.verify_token_ms) == (verify_ms(2), 0.0)
    assert (all_hits.hit_rate, all_hits.token_ms, all_hits.wait_at_miss_ms) == (1.0, None, None)
    assert profile_of([call("sd", [miss(1, 0, steps=0)])]).hit_rate is None  # type: ignore[union-attr]


def test_calls_without_rounds_or_assistant_are_left_out() -> None:
    degraded = SSDStats("ssd", (hit(1, 0),), degraded="gone")
    assert profile_of([]) is None
    assert profile_of([SSDStats("ssd", num_tokens=1), degraded]) is None
    good = call("ssd", [hit(1, 0), hit(1, 1)])
    assert profile_of([good, degraded]) == profile_of([good])


def test_noise_never_makes_more_tokens_cheaper() -> None:
    fast = RoundStats(4, 0, 1, 1, Origin.CACHE, verify_ms=20.0)
    slow = RoundStats(1, 0, 1, 1, Origin.CACHE, verify_ms=30.0)
    profile = profile_of([call("ssd", [fast, slow])])
    assert profile is not None
    assert (profile.verify_base_ms, profile.verify_token_ms) == (25.0, 0.0)


def test_through_json_and_back() -> None:
    profile = profile_of([call("ssd", random_rounds(0, 20, mode="ssd"))])
    assert profile is not None
    values = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(values) == profile
    del values["step_ms"]
    with pytest.raises(ValueError, match=r"\['step_ms'\] are missing and \['steps'\] are unknown"):
        Profile.from_dict({**values, "steps": 1})
