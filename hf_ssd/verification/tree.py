"""The coupled rule on a token tree: follow the target's own choices down the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def follow_tree(
    choose: Callable[[int, tuple[int, ...]], int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Walks down from the root while the target's choice is among the children; the first that is not is the bonus.

    Args:
        choose: The target's token after a node, given the node's index, `-1` for the root, and the path to it. Only
            called for nodes on the path.
        tokens: Draft token ids. Siblings differ.
        parents: For each draft token the index of the one before it, `-1` for the root; smaller than its own.

    Returns:
        The indices of the accepted draft tokens in order, and the bonus token: together exactly the tokens that
        decoding one at a time would have given.
    """
    children = {(parent, token): index for index, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    node = -1
    path: tuple[int, ...] = ()
    while True:
        token = choose(node, path)
        child = children.get((node, token))
        if child is None:
            return path, token
        node, path = child, (*path, child)
