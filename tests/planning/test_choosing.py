"""Rounds are played by a machine whose speeds are known; the chooser has to find them out."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from hf_ssd.metrics import SSDStats
from hf_ssd.planning.choosing import MAX_INTERVAL, MIN_TRIAL_ROUNDS, SETTLING_ROUNDS, PlanChooser, PlanMemory
from hf_ssd.types import Plan, Switch

SSD, SD, AR = Plan("ssd"), Plan("sd"), Plan("ar")
AUTO = (SSD, AR, SD)
# Tokens and milliseconds of a round, by mode, in a text that is easy to draft for and in one that is not.
EASY = {"ssd": ((3, 6), 30.0), "sd": ((3, 6), 60.0), "ar": ((1, 1), 25.0)}
HARD = {"ssd": ((1, 1), 45.0), "sd": ((1, 1), 50.0), "ar": ((1, 1), 25.0)}


class Machine:
    """Plays rounds in whatever plan the chooser is in."""

    def __init__(self, chooser: PlanChooser, seed: int = 0) -> None:
        self.chooser = chooser
        self.generator = random.Random(seed)
        self.switches: list[tuple[int, Switch]] = []
        self.num_tokens = 0
        self.ms = 0.0
        self.tokens_in: dict[Plan, int] = {}

    def play(
        self,
        num_tokens: int,
        speeds: dict[str, tuple],
        likelihood: float | None = None,
        key: Callable = lambda plan: plan.mode,
    ) -> Machine:
        end = self.num_tokens + num_tokens
        while self.num_tokens < end:
            plan = self.chooser.plan
            (least, most), ms = speeds[key(plan)]
            tokens = self.generator.randint(least, most)
            ms *= self.generator.uniform(0.95, 1.05)
            self.num_tokens += tokens
            self.ms += ms
            self.tokens_in[plan] = self.tokens_in.get(plan, 0) + tokens
            switch = self.chooser.after_round(tokens, ms, likelihood if plan.mode == "ar" else None)
            if switch is not None:
                self.switches.append((self.num_tokens, switch))
        return self

    @property
    def homes(self) -> list[Plan]:
        return [switch.after for _, switch in self.switches if not switch.is_trial]


@pytest.mark.parametrize(("speeds", "best"), [(EASY, SSD), (HARD, AR)])
def test_finds_the_fastest_and_keeps_to_it(speeds: dict, best: Plan) -> None:
    for seed in range(20):
        machine = Machine(PlanChooser(AUTO), seed).play(2000, speeds)
        assert machine.tokens_in[best] > 0.9 * machine.num_tokens
        assert len(machine.homes) <= 1
        # What trying the others cost.
        (least, most), ms = speeds[best.mode]
        assert machine.ms < 1.06 * machine.num_tokens * ms / ((least + most) / 2)


def test_an_assistant_of_another_call_is_not_gone_on_with() -> None:
    plans = [Plan("ssd", number) for number in range(3)]
    busy = {plans[1]}
    chooser = PlanChooser(plans, is_available=lambda plan: plan not in busy)
    assert chooser.drop(0).after == plans[2]
    assert chooser.drop(2).after == AR
    busy.clear()
    Machine(chooser).play(200, {"ssd": EASY["ssd"], "ar": EASY["ar"]})
    assert chooser.plan == plans[1]


def test_begins_with_an_assistant_that_is_not_waited_for_and_still_knows_the_better_one() -> None:
    plans, memory = [Plan("ssd", 0), Plan("ssd", 1), AR], PlanMemory(home=Plan("ssd", 1))
    chooser = PlanChooser(plans, memory, is_available=lambda plan: plan != plans[1])
    assert chooser.plan == plans[0]
    chooser.remember()
    assert memory.home == plans[1]
    assert PlanChooser(plans, memory, is_available=lambda plan: plan == AR).plan == plans[1]  # waits, as others do


def test_sd_is_taken_where_drafting_ahead_only_disturbs() -> None:
    speeds = {"ssd": ((2, 4), 60.0), "sd": ((2, 4), 40.0), "ar": ((1, 1), 25.0)}
    machine = Machine(PlanChooser(AUTO)).play(1500, speeds)
    assert machine.chooser.plan == SD
    assert machine.homes[-1] == SD


def test_leaves_soon_when_the_text_becomes_hard_and_comes_back_when_it_is_easy() -> None:
    for seed in range(20):
        machine = Machine(PlanChooser(AUTO), seed).play(400, EASY)
        assert machine.chooser.plan == SSD
        machine.play(400, HARD, likelihood=0.2)
        left = next(tokens for tokens, switch in machine.switches if switch.after == AR and not switch.is_trial)
        assert 400 < left < 440
        assert machine.chooser.plan == AR
        began = machine.num_tokens
        machine.play(300, EASY, likelihood=0.8)
        back = next(tokens for tokens, switch in machine.switches if tokens > began and switch.after == SSD)
        assert back < began + 60
        assert machine.chooser.plan == SSD
        assert any("more predictable" in switch.reason for _, switch in machine.switches)


def test_trials_that_are_in_vain_become_rare_and_stay_short() -> None:
    machine = Machine(PlanChooser(AUTO)).play(6000, HARD, likelihood=0.2)
    trials = [tokens for tokens, switch in machine.switches if switch.is_trial and switch.after == SSD]
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 1024
    assert machine.tokens_in[SSD] < 0.03 * machine.num_tokens


def test_what_no_longer_pays_is_not_tried_for_ever_more_rarely() -> None:
    machine = Machine(PlanChooser(AUTO)).play(30_000, HARD, likelihood=0.2)
    trials = [tokens for tokens, switch in machine.switches if switch.is_trial and switch.after == SSD]
    assert trials[-1] - trials[-2] < 1.1 * MAX_INTERVAL


def test_equal_modes_do_not_alternate() -> None:
    equal = dict.fromkeys(("ssd", "sd", "ar"), ((1, 3), 30.0))
    for seed in range(10):
        machine = Machine(PlanChooser(AUTO), seed).play(4000, equal, likelihood=0.5)
        assert len(machine.homes) <= 12


def test_noise_in_the_first_rounds_after_a_switch_is_not_counted() -> None:
    chooser = PlanChooser(AUTO)
    for _ in range(SETTLING_ROUNDS["ssd"]):
        assert chooser.after_round(1, 10_000.0) is None
    machine = Machine(chooser).play(600, EASY)
    assert machine.chooser.plan == SSD
    assert not machine.homes


def test_memory_saves_the_next_call_the_search() -> None:
    memory = PlanMemory()
    first = Machine(PlanChooser(AUTO, memory)).play(600, HARD, likelihood=0.2)
    first.chooser.remember()
    second = Machine(PlanChooser(AUTO, memory), seed=1)
    assert second.chooser.plan == AR
    second.play(60, HARD, likelihood=0.2)
    assert second.tokens_in == {AR: second.num_tokens}


def test_of_two_assistants_the_faster_serves() -> None:
    plans = (Plan("ssd", 0), Plan("ssd", 1))
    speeds = {0: ((1, 3), 40.0), 1: ((2, 5), 40.0)}
    machine = Machine(PlanChooser(plans)).play(1500, speeds, key=lambda plan: plan.assistant)
    assert machine.homes == [plans[1]]
    assert machine.tokens_in[plans[1]] > 0.85 * machine.num_tokens


def test_an_assistant_that_is_lost_is_not_asked_again() -> None:
    chooser = PlanChooser((Plan("ssd", 0), Plan("ssd", 1), AR))
    switch = chooser.drop(0)
    assert switch == Switch(Plan("ssd", 0), Plan("ssd", 1), "its assistant is lost")
    assert chooser.drop(1).after == AR
    assert chooser.drop(1) is None


def test_the_only_assistant_lost_leaves_plain_decoding() -> None:
    chooser = PlanChooser([SSD])
    assert chooser.drop(0).after == AR


def test_an_assistant_that_another_call_has_is_not_waited_for() -> None:
    asked = []
    chooser = PlanChooser(AUTO, is_available=lambda plan: asked.append(plan) or plan.mode == "ar")
    machine = Machine(chooser).play(1000, HARD, likelihood=0.2)
    assert machine.tokens_in.keys() == {SSD, AR}
    assert [switch.after for _, switch in machine.switches if switch.after != AR] == []
    assert SSD in asked


def test_the_way_back_is_told_from_a_trial() -> None:
    machine = Machine(PlanChooser(AUTO)).play(2000, HARD, likelihood=0.2)
    trials = [switch for _, switch in machine.switches if switch.is_trial]
    assert [switch.is_return for switch in trials[1:]] == [number % 2 == 1 for number in range(len(trials) - 1)]
    stats = SSDStats("auto", switches=tuple(switch for _, switch in machine.switches))
    # The first one ended with AR as the new home.
    assert stats.num_trials == stats.to_dict()["num_trials"] == 1 + len(trials) // 2
    assert stats.num_switches == 1


def test_a_trial_takes_no_more_rounds_than_it_needs() -> None:
    machine = Machine(PlanChooser(AUTO)).play(600, HARD, likelihood=0.2)
    starts = [tokens for tokens, switch in machine.switches if switch.is_trial and switch.after == SSD]
    ends = [tokens for tokens, switch in machine.switches if switch.is_trial and switch.before == SSD][-len(starts) :]
    assert {end - start for start, end in zip(starts, ends, strict=True)} == {
        SETTLING_ROUNDS["ssd"] + MIN_TRIAL_ROUNDS["ssd"]
    }
