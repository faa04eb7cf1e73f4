"""What answers a miss of one row, and what else would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning import Answer, Backup, BackupPolicy, Event
from ..protocol import DraftRequest
from .draft_tree import Node
from .ngram import MAX_LENGTH


@dataclass(frozen=True)
class Copy:
    """Tokens that followed somewhere else, where the text before was alike.

    Args:
        tokens: Token ids, in order.
        length: Tokens before them that are the same there and here.
        event: What has to happen for the text to go on with them.
    """

    tokens: Sequence[int] = ()
    length: int = 0
    event: Event = Event.COPIED


class RowBackup:
    """Chooses the backup of one row, and tells the policy how the row fares.

    Args:
        request: The row.
        policy: That of all rows with the assistant; without one `"auto"` is `"jit"`.
    """

    def __init__(self, request: DraftRequest, policy: BackupPolicy | None) -> None:
        self._setting = request.config.backup
        self._num_rows = request.num_rows
        self._is_automatic = policy is not None and self._setting == "auto"
        self._policy = policy or BackupPolicy()
        self._misses_in_a_row = 0
        self._answered: tuple[Answer, int] | None = None  # with what, after how many misses
        self._copied: list[tuple[list[int], int, int]] = []  # what is left of copies, tokens right so far, misses

    def resolved(self, tokens: Sequence[int], is_hit: bool, verify_ms: float | None) -> None:
        """An outcome is known.

        Args:
            tokens: That the round gave.
            is_hit: Whether the outcome was prepared for.
            verify_ms: Time of the verification, `None` for a prefill.
        """
        if verify_ms is not None:
            self._policy.verification_took(verify_ms)
        if self._answered is not None:
            source, misses = self._answered
            self._policy.gave(source, len(tokens), misses)
        self._check_copies(tokens)
        self._policy.looked_up(is_hit, self._misses_in_a_row)
        self._answered = ("cache", self._misses_in_a_row) if is_hit else None
        self._misses_in_a_row = 0 if is_hit else self._misses_in_a_row + 1

    def choose(self, copy: Sequence[int]) -> Backup:
        """What answers the miss that was just resolved.

        Args:
            copy: What copying would send, no more.
        """
        misses = self._misses_in_a_row - 1
        backup: Backup = "jit" if self._setting == "auto" else self._setting
        if self._is_automatic:
            backup = self._policy.choose(self._num_rows, misses)
        if backup != "ngram":
            self._copied.append((list(copy), 0, misses))
        self._answered = (backup, misses) if backup != "none" else None
        return backup

    def jit_took(self, duration_ms: float) -> None:
        """Drafting just in time took so long."""
        self._policy.jit_took(duration_ms)

    def _check_copies(self, tokens: Sequence[int]) -> None:
        """Finds out how far copies have been right."""
        pending, self._copied = self._copied, []
        for copy, num_right, misses in pending:
            matched = _num_equal(copy, tokens)
            if matched == len(tokens) < len(copy):
                self._copied.append((copy[matched:], num_right + matched, misses))
            else:
                self._policy.gave("ngram", num_right + matched + 1, misses)


def borrow(root: Node, row: Sequence[int], max_tokens: int) -> Copy:
    """What the assistant drafted where the text before is most like the row's end: the cache's own branches.

    Args:
        root: Of the draft tree for the outcome that turned out otherwise.
        row: Tokens of the row up to and with the new bonus token.
        max_tokens: Most tokens to take.
    """
    best: tuple[int, float] = (0, 0.0)
    found: Node | None = None
    for node in (root, *root.descendants()):
        if node.token != row[-1] or not any(child.is_draft or child.is_sent for child in node.children):
            continue
        key = (_match_length(node, row), node.chance)
        if key > best:
            best, found = key, node
    tokens: list[int] = []
    while found is not None and len(tokens) < max_tokens:
        found = max(found.children, key=lambda child: child.chance, default=None)
        if found is not None:
            tokens.append(found.token)
    return Copy(tokens, best[0], Event.BORROWED)


def _match_length(node: Node | None, row: Sequence[int]) -> int:
    length = 0
    while node is not None and length < min(MAX_LENGTH, len(row)) and node.token == row[-1 - length]:
        node, length = node.parent, length + 1
    return length


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(some), len(others)))
