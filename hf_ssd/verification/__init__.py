"""Verification rules: pure functions of what both models said."""

from .greedy import verify_greedy
from .token import verify_token
from .tree import follow_tree

__all__ = ["follow_tree", "verify_greedy", "verify_token"]
