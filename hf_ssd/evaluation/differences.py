"""Where texts leave those they are compared with. Pure functions of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FirstDifference:
    """Where a text leaves its reference.

    Args:
        index: Which text.
        position: The first token that differs, counted from the end of the prompt.
        gap: Gap between the two highest logits that the reference's token was chosen from; `None` if not known.
    """

    index: int
    position: int
    gap: float | None = None


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, also where one text ends before; `None` if they are the same."""
    shared = min(len(tokens), len(reference))
    position = next((i for i in range(shared) if tokens[i] != reference[i]), shared)
    return None if position == len(tokens) == len(reference) else position


def find_first_differences(
    texts: Sequence[Sequence[int]],
    references: Sequence[Sequence[int]],
    reference_gaps: Sequence[Sequence[float]] | None = None,
) -> tuple[FirstDifference, ...]:
    """Where each text that is not its reference leaves it.

    Args:
        texts: Token ids, prompts excluded.
        references: Token ids of the references, in the same order.
        reference_gaps: For each reference the gap between the two highest logits at each of its tokens. A list may be
            shorter, or empty, where they are not known.
    """
    found = []
    for index, (tokens, reference) in enumerate(zip(texts, references, strict=True)):
        position = first_difference(tokens, reference)
        if position is not None:
            gaps = reference_gaps[index] if reference_gaps is not None else ()
            found.append(FirstDifference(index, position, gaps[position] if position < len(gaps) else None))
    return tuple(found)
