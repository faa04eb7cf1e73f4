from __future__ import annotations

from rounds import make_round

from hf_ssd import SSDConfig
from hf_ssd.planning.ladders import BudgetPolicy, Ladder, LatencyPolicy


def test_the_latency_target_takes_drafts_away_until_it_is_met() -> None:
    """A target that is as slow per draft token as a busy machine makes it."""
    policy, limits = LatencyPolicy(30.0, most=16), []
    for _ in range(200):
        limit = policy.limit if policy.limit is not None else 16
        if policy.after_round(1.0, 20.0 + 4.0 * limit) is not None:
            limits.append(policy.limit)
    assert limits == [8, 4, 2]
    assert policy.limit == 2


def test_it_is_lifted_where_fewer_drafts_make_tokens_slower() -> None:
    policy, reasons = LatencyPolicy(5.0, most=16), []
    for _ in range(400):
        limit = policy.limit if policy.limit is not None else 16
        reason = policy.after_round(1.0 + limit / 4, 30.0)
        if reason is not None:
            reasons.append((policy.limit, reason))
    assert [limit for limit, _ in reasons[:2]] == [8, None]
    assert "less did not help" in reasons[1][1]
    assert policy.limit is None
    assert len(reasons) <= 8  # not again and again


def test_drafts_come_back_when_tokens_are_fast() -> None:
    policy = LatencyPolicy(30.0, most=4)
    for _ in range(64):
        policy.after_round(1.0, 100.0 if policy.limit is None else 28.0)
    assert policy.limit == 2
    for _ in range(200):
        policy.after_round(1.0, 10.0)
    assert policy.limit is None


def test_no_level_below_the_last() -> None:
    ladder = Ladder([None, 0], num_rounds=2)
    assert ladder.try_next()
    assert not ladder.try_next()
    assert ladder.level == 0


def test_the_last_limit_is_to_draft_nothing() -> None:
    policy = LatencyPolicy(1.0, most=1)
    for _ in range(40):
        policy.after_round(1.0, 20.0 if policy.limit is None else 15.0)
    assert policy.limit == 0


def test_from_the_last_limit_it_goes_up_again_as_far_as_that_helps() -> None:
    policy = LatencyPolicy(4.0, most=16)
    for _ in range(200):  # drafts are in vain
        policy.after_round(1.0, 20.0 + (16 if policy.limit is None else policy.limit))
    assert policy.limit == 0
    limits = []
    for _ in range(250):  # the first four are right now, and more of them cost more than they bring
        limit = 16 if policy.limit is None else policy.limit
        if policy.after_round(1.0 + min(limit, 4), 20.0 + limit) is not None:
            limits.append(policy.limit)
    assert limits[:5] == [1, 2, 4, 8, 4]


class TestBudget:
    def play(self, policy: BudgetPolicy, num_rounds: int, hits: int, ms: float = 10.0) -> list[int | None]:
        """Rounds of which `hits` in ten hit."""
        budgets = []
        for number in range(num_rounds):
            if policy.after_round([make_round(hit=number % 10 < hits)], ms) is not None:
                budgets.append(policy.budget)
        return budgets

    def test_below_the_floor_it_goes_to_the_likeliest_outcomes_then_shrinks(self) -> None:
        policy = BudgetPolicy(SSDConfig(mode="auto", cache_budget=16, fan_out="uniform"))
        assert policy.budget is None
        assert self.play(policy, 400, hits=2)[:3] == [16, 8, 4]

    def test_it_only_shrinks_where_the_likeliest_have_it_already(self) -> None:
        policy = BudgetPolicy(SSDConfig(mode="auto", cache_budget=16))
        assert self.play(policy, 200, hits=2)[:2] == [8, 4]

    def test_the_target_brings_it_back(self) -> None:
        policy = BudgetPolicy(SSDConfig(mode="auto", cache_budget=8, fan_out="geometric"))
        self.play(policy, 64, hits=2)
        assert policy.budget is not None
        self.play(policy, 600, hits=9)
        assert policy.budget is None

    def test_between_floor_and_target_nothing_changes(self) -> None:
        policy = BudgetPolicy(SSDConfig(mode="auto", cache_budget=8))
        assert self.play(policy, 400, hits=6) == []

    def test_an_automatic_budget_is_the_planners(self) -> None:
        assert self.play(BudgetPolicy(SSDConfig(mode="auto")), 400, hits=1) == []

    def test_a_list_is_its_own_budget(self) -> None:
        policy = BudgetPolicy(SSDConfig(mode="auto", fan_out=[4, 2, 1]))
        assert self.play(policy, 100, hits=1)[0] == 7
