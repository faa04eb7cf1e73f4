from __future__ import annotations

import pytest
import torch

from hf_ssd import SSDConfig
from hf_ssd.drafting.draft_tree import Node
from hf_ssd.drafting.outcomes import OutcomeRanker
from hf_ssd.drafting.proposer import Candidate
from hf_ssd.planning import AcceptanceEstimate, Calibration, Event


def sent_tree() -> tuple[Node, list[Node]]:
    """```
    root ┬ 1 (.6) ── 2 (.5)
         └ 3 (.3)
    ```
    of which all but the leaves 2 and 3 have been run."""
    root = Node(0, None, 9, hidden=torch.zeros(1))
    one = Node(1, root, 10, 0.6, is_sent=True, num_drafted=1, hidden=torch.zeros(1))
    two = Node(2, one, 11, 0.5, is_sent=True, num_drafted=2)
    three = Node(3, root, 10, 0.3, is_sent=True, num_drafted=1)
    root.children, one.children = [one, three], [two]
    return root, [one, two, three]


def ranker(**settings: object) -> OutcomeRanker:
    return OutcomeRanker(SSDConfig(**settings), Calibration(), AcceptanceEstimate(0.7))


def test_due_are_those_with_a_hidden_state_and_a_chance_to_be_last() -> None:
    root, sent = sent_tree()
    assert ranker().due(root, sent) == [root, sent[0]]
    sent[1].hidden = torch.zeros(1)
    assert ranker().due(root, sent) == [root, *sent[:2]]
    root.is_ranked = True
    sent[0].chance = 0.505  # nearly always followed by its child
    assert ranker().due(root, sent) == [sent[1]]


def test_a_planned_node_is_due_however_rare() -> None:
    root, sent = sent_tree()
    sent[0].chance = 0.505
    sent[0].num_planned = 2
    assert sent[0] in ranker().due(root, sent)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_budget": 7},
        {"fan_out": "geometric"},
        {"fan_out": "geometric", "cache_budget": 5},
        {"fan_out": "uniform"},
    ],
)
def test_a_plan_spends_the_budget(settings: dict) -> None:
    root, sent = sent_tree()
    ranker(**settings).plan(root, sent)
    assert sum(node.num_planned for node in (root, *sent)) == settings.get("cache_budget", 8)


def test_a_list_goes_by_depth() -> None:
    root, sent = sent_tree()
    ranker(fan_out=[5, 3, 2]).plan(root, sent)
    assert [node.num_planned for node in (root, *sent)] == [5, 3, 2, 3]


def test_without_a_budget_chances_decide() -> None:
    root, sent = sent_tree()
    ranker().plan(root, sent)
    assert all(node.num_planned is None for node in (root, *sent))


def test_the_likelier_stop_gets_no_fewer() -> None:
    """Stopping has a chance of .1 at the root, .1 at 1, .5 at 2 and .3 at 3."""
    root, sent = sent_tree()
    ranker(cache_budget=9).plan(root, sent)
    assert sent[1].num_planned > sent[2].num_planned > root.num_planned == sent[0].num_planned


def test_per_instance_goes_by_each_nodes_own_candidates() -> None:
    """A node that is sure of its bonus token needs one, a node that is unsure several."""
    root, sent = sent_tree()
    ranks = ranker(cache_budget=6)
    sure = [Candidate(4, 0.97), *(Candidate(5 + i, 0.001) for i in range(9))]
    unsure = [Candidate(4 + i, 0.1) for i in range(10)]
    ranks.plan(root, sent, {root: sure, sent[0]: unsure})
    typical = [node.num_planned for node in sent[1:]]
    assert root.num_planned + sent[0].num_planned + sum(typical) == 6
    ranks.plan(root, sent, {root: unsure, sent[0]: unsure, sent[1]: sure, sent[2]: unsure})
    assert sent[1].num_planned == 1
    assert sent[2].num_planned == 5 - root.num_planned - sent[0].num_planned
    assert ranks.num_candidates([root]) == 16
    assert ranker(cache_budget=30).num_candidates([root]) == 30
    assert ranker(cache_budget=30, fan_out="uniform").num_candidates([root]) == 16


def test_by_length_the_acceptance_of_each_length_counts() -> None:
    """Whatever the nodes' chances are: with .7 everywhere, .3 for none accepted, .21 for one and .49 for two."""
    root, sent = sent_tree()
    ranker(fan_out="geometric", cache_budget=100, power_law_exponent=1e-9).plan(root, sent)
    assert [node.num_planned for node in (root, *sent)] == [30, 5, 49, 16]  # the 21 as .1 to .3


def test_a_chance_is_that_to_stop_times_that_of_the_token() -> None:
    root, sent = sent_tree()
    ranks = ranker()
    new = ranks.add(sent[0], [Candidate(7, 0.8), Candidate(8, 0.1)])
    assert [node.token for node in new] == [7, 8]
    for node, probability in zip(new, (0.8, 0.1), strict=True):
        assert node.chance == pytest.approx(0.1 * Calibration()(Event.REPLACED, probability))
        assert (node.event, node.parent, node.position, node.confidence) == (Event.REPLACED, sent[0], 11, probability)
        assert not node.is_draft
        assert not node.is_planned
    new = ranks.add(sent[1], [Candidate(7, 0.8)])
    assert new[0].event is Event.APPENDED  # nothing was drafted after it
    assert new[0].chance == pytest.approx(0.5 * Calibration()(Event.APPENDED, 0.8))
    assert root.is_ranked is False
    assert sent[0].is_ranked


def test_what_was_prepared_already_stays_and_its_chances_are_renewed() -> None:
    _, sent = sent_tree()
    left = Node(7, sent[0], 11, 0.02)
    below = Node(4, left, 12, 0.01, num_drafted=1)
    left.children, sent[0].children = [below], [*sent[0].children, left]
    new = ranker().add(sent[0], [Candidate(8, 0.6), Candidate(7, 0.3)])
    assert [node.token for node in new] == [8]
    assert left in sent[0].children
    assert left.chance == pytest.approx(0.1 * Calibration()(Event.REPLACED, 0.3))
    assert below.chance == pytest.approx(left.chance / 2)
    assert left.event is Event.REPLACED


def test_a_budget_is_a_budget() -> None:
    """Leftovers that are not among the planned candidates are given up."""
    _, sent = sent_tree()
    left = Node(7, sent[0], 11, 0.02)
    sent[0].children.append(left)
    sent[0].num_planned = 2
    new = ranker().add(sent[0], [Candidate(token, 0.2) for token in (8, 9, 7)])
    assert [node.token for node in new] == [8, 9]
    assert all(node.is_planned for node in new)
    assert [child.token for child in sent[0].children] == [2, 8, 9]


def test_none_planned_is_none() -> None:
    _, sent = sent_tree()
    sent[0].num_planned = 0
    assert ranker().add(sent[0], [Candidate(8, 0.9)]) == []
    assert [child.token for child in sent[0].children] == [2]


def test_as_many_candidates_are_looked_at_as_are_planned() -> None:
    root, sent = sent_tree()
    assert ranker().num_candidates([root, sent[0]]) == 16
    sent[0].num_planned = 40
    assert ranker().num_candidates([root, sent[0]]) == 40
