from __future__ import annotations

import random

import pytest

from hf_ssd.drafting.draft_tree import Node, become_bonus, likeliest_first, make_root


def random_tree(seed: int, num_nodes: int = 30) -> Node:
    """Of drafted nodes whose chances fall from parent to child."""
    generator = random.Random(seed)
    nodes = [Node(0, None, 5)]
    for token in range(1, num_nodes):
        parent = generator.choice(nodes)
        child = Node(token, parent, parent.position + 1, parent.chance * generator.random())
        child.num_drafted = parent.num_drafted + 1
        parent.children.append(child)
        nodes.append(child)
    return nodes[0]


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_nodes_are_a_tree_and_no_other_tree_is_likelier(seed: int) -> None:
    root = random_tree(seed)
    everything = sorted(root.descendants(), key=lambda node: -node.chance)
    for count in range(len(everything) + 1):
        chosen = likeliest_first(root, lambda node, num, count=count: num < count)
        assert [node.chance for node in chosen] == [node.chance for node in everything[:count]]
        for index, node in enumerate(chosen):
            assert node.parent is root or node.parent in chosen[:index]


@pytest.mark.parametrize("seed", range(5))
def test_with_a_node_what_follows_it_is_left_out(seed: int) -> None:
    root = random_tree(seed)
    left_out = max(root.descendants(), key=lambda node: len(list(node.descendants())))
    chosen = likeliest_first(root, lambda node, num: node is not left_out)
    gone = {id(node) for node in (left_out, *left_out.descendants())}
    assert {id(node) for node in chosen} == {id(node) for node in root.descendants()} - gone


def test_bonus_tokens_are_no_draft_tokens() -> None:
    root = random_tree(1)
    bonus = max(root.children, key=lambda node: node.chance)
    become_bonus(bonus)
    chosen = likeliest_first(root, lambda node, num: True)
    assert bonus not in chosen
    assert not set(map(id, bonus.descendants())) & set(map(id, chosen))


def test_after_a_bonus_token_draft_tokens_are_counted_anew() -> None:
    root = random_tree(2)
    node = max(root.descendants(), key=lambda node: len(list(node.descendants())) * (len(node.path()) > 1))
    depths = {id(each): len(each.path()) - len(node.path()) for each in (node, *node.descendants())}
    assert max(depths.values()) > 1
    become_bonus(node)
    assert all(each.num_drafted == depths[id(each)] for each in (node, *node.descendants()))
    assert not node.is_draft


def test_a_new_root_makes_chances_conditional() -> None:
    root = random_tree(3)
    node = max(root.children, key=lambda node: len(list(node.descendants())))
    before = {id(each): each.chance / node.chance for each in node.descendants()}
    make_root(node)
    assert (node.parent, node.chance, node.num_drafted) == (None, 1.0, 0)
    for each in node.descendants():
        assert each.chance == pytest.approx(before[id(each)])
        assert node not in each.path()
        assert each.path()[0].parent is node


def test_a_root_that_was_held_impossible_leaves_chances_that_are_chances() -> None:
    root = random_tree(4)
    node = max(root.children, key=lambda node: len(list(node.descendants())))
    node.chance = 0.0
    make_root(node)
    assert all(0 <= each.chance <= 1 for each in node.descendants())


def test_paths_and_descendants() -> None:
    root = random_tree(5)
    nodes = list(root.descendants())
    assert len({id(node) for node in nodes}) == 29
    for index, node in enumerate(nodes):
        assert node.path()[-1] is node
        assert node.position - root.position == len(node.path())
        assert node.parent is root or node.parent in nodes[:index]
    assert root.path() == []


def test_a_child_is_found_by_its_token_unless_it_is_being_verified() -> None:
    root = Node(0, None, 0)
    root.children = [Node(5, root, 1, is_sent=True), Node(6, root, 1)]
    assert root.child(6) is root.children[1]
    assert root.child(5) is root.child(7) is None
    assert root.sent_children == [root.children[0]]
