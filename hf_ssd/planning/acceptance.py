"""The acceptance of each draft position: a belief that measurements replace."""

from __future__ import annotations


class AcceptanceEstimate:
    """Estimates, for each draft position, the chance to be accepted when all before it were.

    The estimate is the mean of a Beta distribution: it starts at `expected`, worth `weight` observations, and follows
    the measured rate as rounds accumulate; old ones fade, since text changes. A position that has been seen little
    leans on the one before it.

    Args:
        expected: Acceptance believed at the start, between 0 and 1.
        weight: How many observations that belief is worth.
        memory: What share of its weight an observation keeps from one round to the next.
    """

    def __init__(self, expected: float, weight: float = 4.0, memory: float = 0.99) -> None:
        self.expected = expected
        self.weight = weight
        self.memory = memory
        self._num_reached: list[float] = []
        self._num_accepted: list[float] = []

    def update(self, num_reached: int, num_accepted: int) -> None:
        """Takes in a round in which `num_reached` positions were tested and all but at most the last accepted."""
        num_new = max(num_reached - len(self._num_reached), 0)
        self._num_reached = [self.memory * count for count in self._num_reached] + [0.0] * num_new
        self._num_accepted = [self.memory * count for count in self._num_accepted] + [0.0] * num_new
        for position in range(num_reached):
            self._num_reached[position] += 1
            self._num_accepted[position] += position < num_accepted

    def __call__(self, num_draft_tokens: int) -> tuple[float, ...]:
        """The estimates for the first `num_draft_tokens` positions, each strictly between 0 and 1."""
        estimates: list[float] = []
        belief = self.expected
        for position in range(num_draft_tokens):
            reached = accepted = 0.0
            if position < len(self._num_reached):
                reached, accepted = self._num_reached[position], self._num_accepted[position]
            belief = (accepted + self.weight * belief) / (reached + self.weight)
            estimates.append(belief)
        return tuple(estimates)
