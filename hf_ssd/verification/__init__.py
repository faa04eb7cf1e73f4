"""Verification rules: pure functions of what both models said."""

from .block import verify_block
from .coupled import verify_coupled
from .token import verify_token
from .tree import follow_tree

__all__ = ["follow_tree", "verify_block", "verify_coupled", "verify_token"]
