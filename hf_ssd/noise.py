"""Noise that both models can compute: a pure function of seed, position and token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF
# Gumbel noise from 32 bits lies between these.
_LEAST, _MOST = -2.9, 22.9


class GumbelNoise:
    r"""Gumbel noise \\(g_t(v)\\) for the tokens of one row.

    \\(\arg\max_v (\log p_t(v) + g_t(v))\\) is a draw from \\(p_t\\). Two models that share the noise draw the same
    token wherever their distributions are alike: the coupling behind drafter-invariant speculative decoding
    (arXiv 2408.07978).

    The noise comes from an integer hash in tensor operations, so it is the same on every device, up to how a device
    rounds a logarithm. There is no state: it does not matter who asks for what, or how often.

    Args:
        seed: Of the row, a whole number of at most 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        low, high = seed & _MASK, seed >> 32 & _MASK
        self._keys = (
            _mix(_mix(low) + high * 0x27D4EB2F & _MASK),
            _mix(_mix(high ^ 0x3C6EF372) + low * 0x165667B1 & _MASK),
        )

    def __call__(self, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The noise of tokens at positions of the row.

        Args:
            positions: Number of tokens before, padding not counted; int64.
            token_ids: int64, of a shape that goes with that of `positions`.

        Returns:
            Float32 tensor of the common shape.
        """
        first, second = (_mix(positions * 0x9E3779B9 + key & _MASK) for key in self._keys)
        bits = _mix(_mix(token_ids * 0x85EBCA6B + first & _MASK) ^ second)
        # Finest near 0, where the largest noise comes from.
        uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def add_to(
        self, scores: torch.Tensor, positions: Sequence[int], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores with the noise added, as far as that can matter for the largest.

        Args:
            scores: Log-probabilities up to a constant, of shape `(num_rows, num_tokens)`.
            positions: For each row the number of tokens before, padding not counted.
            token_ids: What the columns stand for; all token ids in order if `None`.

        Returns:
            A new tensor of the same shape, `-inf` where no noise could make the score the largest.
        """
        best = scores.max(dim=1, keepdim=True).values
        # Where there is no number, there must be none in the result.
        can_win = ~(scores < best + (_LEAST - _MOST)) & (scores != float("-inf"))
        rows, columns = can_win.nonzero(as_tuple=True)
        tokens = columns if token_ids is None else token_ids[columns]
        row_positions = torch.tensor(positions, dtype=torch.long, device=scores.device)
        noisy = torch.full_like(scores, float("-inf"))
        noisy[rows, columns] = scores[rows, columns] + self(row_positions[rows], tokens)
        return noisy


def derive_seed(seed: int, index: int) -> int:
    """A seed for the row of this index in a batch. The first row's is `seed` itself, so that alone it gets the same."""
    if index == 0:
        return seed
    first, second = GumbelNoise(seed)._keys
    low = _mix(first + index * 0x9E3779B9 & _MASK)
    return _mix(second + low * 0x85EBCA6B & _MASK) << 32 | low


def _mix(x):  # type: ignore[no-untyped-def]
    """A bijection of 32-bit numbers that leaves no trace of order, for `int` and int64 tensors ("lowbias32")."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)
