"""Verification rules: pure functions, tensors in, [`Verdict`] out."""

from .greedy import verify_greedy
from .token import verify_token

__all__ = ["verify_greedy", "verify_token"]
