"""Noise that both models can compute: a pure function of seed, position and token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

_MASK = 0xFFFFFFFF
# "lowbias32": multipliers of a mixing of 32-bit numbers that leaves no trace of order.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
# Gumbel noise from 31 bits lies between these.
_LEAST, _MOST = -2.9, 22.3
# Where fewer tokens than one in so many can win, as after top-k, noise is made for these alone.
_SPARSE = 8


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
        self._keys = _keys_of(seed)

    def __call__(self, positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
        """The noise of tokens at positions of the row.

        Args:
            positions: Numbers of tokens before, padding not counted.
            token_ids: int64, of shape `(num_tokens,)`.

        Returns:
            Float32 tensor of shape `(len(positions), num_tokens)`.
        """
        first, second = self._position_keys(positions, token_ids.device)
        return _gumbel(_hash_tokens(token_ids), first[:, None], second[:, None])

    def add_to(
        self, scores: torch.Tensor, positions: Sequence[int], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores with the noise added, as far as that can matter for the largest.

        Args:
            scores: Log-probabilities up to a constant, of shape `(num_rows, num_tokens)`.
            positions: For each row the number of tokens before, padding not counted.
            token_ids: What the columns stand for; all token ids in order if `None`.

        Returns:
            A new tensor of the same shape. Some scores may be `-inf` that no noise could make the largest.
        """
        device = scores.device
        hashed = _hash_vocabulary(scores.shape[1], device) if token_ids is None else _hash_tokens(token_ids)
        first, second = self._position_keys(positions, device)
        # Written so that what is no number can win: there must be none in the result either.
        can_win = ~(scores < scores.max(dim=1, keepdim=True).values + (_LEAST - _MOST))
        if int(can_win.count_nonzero()) * _SPARSE > scores.numel():
            return scores + _gumbel(hashed, first[:, None], second[:, None])
        rows, columns = can_win.nonzero(as_tuple=True)
        noisy = torch.full_like(scores, float("-inf"))
        noisy[rows, columns] = scores[rows, columns] + _gumbel(hashed[columns], first[rows], second[rows])
        return noisy

    def _position_keys(self, positions: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (
            torch.tensor(
                [_signed(_mix(position * 0x9E3779B9 + key)) for position in positions], dtype=torch.int32, device="cpu"
            )
            for key in self._keys
        )
        return first.to(device), second.to(device)


def derive_seed(seed: int, index: int) -> int:
    """A seed for the row of this index in a batch. The first row's is `seed` itself, so that alone it gets the same."""
    if index == 0:
        return seed
    first, second = _keys_of(seed)
    low = _mix(first + index * 0x9E3779B9)
    return _mix(second + low * 0x85EBCA6B) << 32 | low


def _keys_of(seed: int) -> tuple[int, int]:
    low, high = seed & _MASK, seed >> 32 & _MASK
    return _mix(_mix(low) + high * 0x27D4EB2F), _mix(_mix(high ^ 0x3C6EF372) + low * 0x165667B1)


def _gumbel(hashed: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Noise from token hashes and the two keys of a position, all int32: a mixing with a key before and one within."""
    # int32 arithmetic wraps around; shifts drag the sign along, which the masks take away.
    bits = hashed ^ first
    bits ^= bits >> 16 & 0xFFFF
    bits *= _FIRST
    bits ^= second
    bits ^= bits >> 15 & 0x1FFFF
    bits *= _signed(_SECOND)
    bits ^= bits >> 16 & 0xFFFF
    # Finest near 0, where the largest noise comes from. Of the sign nothing is left.
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hash_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """int32, of the shape of `token_ids`."""
    return _signed(_mix(token_ids * 0x85EBCA6B)).to(torch.int32)


@cache
def _hash_vocabulary(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it is kept for calls of any mode
        hashed = _hash_tokens(torch.arange(size, device=device))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # and for other streams
    return hashed


def _mix(x):  # type: ignore[no-untyped-def]
    """The mixing, for `int` and int64 tensors. Only the lowest 32 bits of `x` count."""
    x = x & _MASK
    x = (x ^ (x >> 16)) * _FIRST & _MASK
    x = (x ^ (x >> 15)) * _SECOND & _MASK
    return x ^ (x >> 16)


def _signed(x):  # type: ignore[no-untyped-def]
    """The int32 with the bits of an unsigned 32-bit number, for `int` and int64 tensors."""
    return (x ^ 0x80000000) - 0x80000000
