"""A call's policy against a machine whose speeds are known, and whose first rounds after a change say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rounds import make_round

from hf_ssd import SSDConfig
from hf_ssd.planning import CallPolicy, PlanMemory
from hf_ssd.planning.choosing import SETTLING_ROUNDS
from hf_ssd.types import Plan, Switch

SSD, AR = Plan("ssd"), Plan("ar")
NEVER = 1e-3  # milliseconds per token that nothing can meet
EASY, HARD = 0.75, 0.0  # of the draft tokens that are accepted


class Machine:
    """Plays rounds in whatever plan the policy is in. A round takes longer with rows and with draft tokens."""

    def __init__(self, policy: CallPolicy) -> None:
        self.policy = policy
        self.switches: list[Switch] = []
        self.tokens_in: dict[str, int] = {}
        self.num_here = 0
        self.begin_row()

    def begin_row(self) -> None:
        self.policy.begin_row()
        self.num_here = 0

    def play(self, num_rounds: int, acceptance: float, num_rows: int = 1) -> list[Switch]:
        switches = []
        for _ in range(num_rounds):
            plan = self.policy.plan
            num_drafted = 0 if plan.mode == "ar" else plan.max_draft_tokens or 8
            ms = 15.0 + 10.0 * num_rows + {"ar": 0.0, "ssd": 10.0, "sd": 30.0}[plan.mode] + num_drafted
            if self.num_here < SETTLING_ROUNDS[plan.mode]:
                ms *= 4.0
            accepted = round(acceptance * num_drafted)
            stats = replace(make_round(hit=True, accepted=accepted, drafted=num_drafted), mode=plan.mode)
            switches += self.policy.after_round([stats] * num_rows, ms, 0.5 if plan.mode == "ar" else None)
            self.tokens_in[plan.mode] = self.tokens_in.get(plan.mode, 0) + accepted + 1
            self.num_here = self.num_here + 1 if self.policy.plan == plan else 0
        self.switches += switches
        return switches


@pytest.mark.parametrize("mode", ["auto", "ssd"])
def test_a_latency_target_that_nothing_can_meet_does_not_lock_drafting_out(mode: str) -> None:
    machine = Machine(CallPolicy(SSDConfig(mode=mode, sla_ms_per_token=NEVER)))
    machine.play(1500, EASY)
    assert machine.tokens_in["ssd"] > 0.9 * sum(machine.tokens_in.values())
    assert all(switch.before != switch.after for switch in machine.switches)


def test_in_plain_rounds_no_limit_is_lowered() -> None:
    machine = Machine(CallPolicy(SSDConfig(mode="auto", sla_ms_per_token=NEVER)))
    machine.play(400, HARD)
    assert machine.policy.plan == AR
    limits = [switch for switch in machine.play(1000, HARD) if "are allowed" in switch.reason]
    assert limits == []


@pytest.mark.parametrize("mode", ["auto", "ssd"])
@pytest.mark.parametrize("sla_ms", [20.0, NEVER])
def test_drafting_comes_back_after_a_stop(mode: str, sla_ms: float) -> None:
    machine = Machine(CallPolicy(SSDConfig(mode=mode, sla_ms_per_token=sla_ms)))
    machine.play(400, HARD)
    assert machine.tokens_in["ar"] > 200
    machine.play(1200, EASY)
    before = dict(machine.tokens_in)
    machine.play(100, EASY)
    assert machine.policy.plan.mode == "ssd"
    assert machine.tokens_in["ar"] < before["ar"] + 20


def test_where_drafting_only_costs_a_stop_lasts() -> None:
    machine = Machine(CallPolicy(SSDConfig(sla_ms_per_token=20.0)))
    machine.play(3000, HARD)
    assert machine.tokens_in["ssd"] < 0.15 * sum(machine.tokens_in.values())


@pytest.mark.parametrize("config", [SSDConfig(mode="auto"), SSDConfig(mode="auto", sla_ms_per_token=NEVER)])
def test_rounds_after_a_beginning_and_after_any_change_are_not_counted(config: SSDConfig) -> None:
    memory = PlanMemory()
    policy = CallPolicy(config, memory=memory)
    machine = Machine(policy)
    for _ in range(40):
        machine.play(10, EASY)
        machine.begin_row()
    policy.remember()
    assert memory.home == SSD
    assert memory.tracks[SSD].cost.ms_per_token <= 43.0 / 7  # what it is without a limit
    assert memory.tracks[AR].cost.ms_per_token == 25.0


class TestRowsThatEnd:
    def test_what_rounds_of_more_rows_took_is_no_standard(self) -> None:
        memory = PlanMemory()
        policy = CallPolicy(SSDConfig(mode="auto"), memory=memory)
        machine = Machine(policy)
        machine.play(200, EASY, num_rows=16)
        assert policy.plan == SSD
        machine.play(8, 0.25, num_rows=1)
        assert policy.plan == SSD
        assert not any("latest rounds" in switch.reason for switch in machine.switches)
        policy.remember()
        # Of the rows that the next call has too.
        assert memory.tracks[AR].cost.ms_per_token == 175.0
        assert memory.tracks[SSD].cost.ms_per_token == pytest.approx(193.0 / 7)

    def test_a_trial_ends_with_them(self) -> None:
        machine = Machine(CallPolicy(SSDConfig(mode="auto")))
        while not machine.switches:
            machine.play(1, EASY, num_rows=2)
        assert machine.policy.plan == AR
        (switch,) = machine.play(1, EASY, num_rows=1)
        assert (switch.after, switch.is_return) == (SSD, True)
        assert machine.policy.plan == SSD
        machine.play(200, EASY)
        assert machine.policy.plan == SSD

    def test_a_latency_target_is_about_tokens_of_a_row(self) -> None:
        machine = Machine(CallPolicy(SSDConfig(sla_ms_per_token=10.0)))
        machine.play(40, EASY, num_rows=1)  # 43 ms for 7 tokens
        assert machine.switches == []
        machine.play(40, EASY, num_rows=4)  # 73 ms
        assert "10.4 ms per token, where 10 are allowed" in machine.switches[0].reason
