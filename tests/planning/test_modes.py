from __future__ import annotations

import random

from hf_ssd.planning.modes import MODES, RETRY_EVERY, ModePolicy


def play(policy: ModePolicy, kind: object, speeds: dict[str, float], num_calls: int, noise: float = 0.05) -> list[str]:
    generator, chosen = random.Random(0), []
    for _ in range(num_calls):
        mode = policy.choose(kind)
        chosen.append(mode)
        policy.learn(kind, mode, 100, 100 / (speeds[mode] * generator.uniform(1 - noise, 1 + noise)))
    return chosen


def test_tries_all_and_takes_the_fastest() -> None:
    for fastest in MODES:
        speeds = {mode: 2.0 if mode == fastest else 1.0 for mode in MODES}
        chosen = play(ModePolicy(), 1, speeds, 200)
        assert sorted(chosen[:9]) == sorted(MODES * 3)
        assert chosen[9:].count(fastest) >= 191 - 200 // RETRY_EVERY - 1


def test_the_first_call_of_a_mode_does_not_count() -> None:
    """A process starts in it."""
    policy = ModePolicy()
    for mode in MODES:
        policy.learn(1, mode, 100, 1000.0 if mode == "ssd" else 1.0)
    assert play(policy, 1, {"ssd": 2.0, "sd": 1.0, "ar": 1.0}, 20)[-1] == "ssd"


def test_nor_do_short_texts() -> None:
    policy = ModePolicy()
    play(policy, 1, {"ssd": 2.0, "sd": 1.0, "ar": 1.0}, 12)
    for _ in range(15):
        policy.learn(1, "ssd", 2, 10.0)
    assert policy.choose(1) == "ssd"


def test_kinds_have_figures_of_their_own() -> None:
    policy = ModePolicy()
    assert play(policy, 1, {"ssd": 3.0, "sd": 2.0, "ar": 1.0}, 20)[-1] == "ssd"
    assert play(policy, 8, {"ssd": 1.0, "sd": 2.0, "ar": 3.0}, 20)[-1] == "ar"
    assert policy.choose(1) == "ssd"


def test_follows_a_change_and_says_so() -> None:
    policy = ModePolicy()
    play(policy, 1, {"ssd": 3.0, "sd": 2.0, "ar": 1.0}, 20)
    reasons = []
    for _ in range(10 * RETRY_EVERY):
        mode = policy.choose(1)
        reasons.append(policy.learn(1, mode, 100, 100 / {"ssd": 1.0, "sd": 2.0, "ar": 1.5}[mode]))
    assert policy.choose(1) == "sd"
    (reason,) = filter(None, reasons)
    assert reason.startswith("sd is faster than ssd now (tokens/s: ssd ")
