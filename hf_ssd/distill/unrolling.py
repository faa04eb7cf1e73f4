"""A head's drafts in training: it goes on from its own states, as it will have to (EAGLE-3's training-time test)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from ..compat import CACHE_KEY


def unrolled_logits(
    head: nn.Module,
    config: PreTrainedConfig,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    depth: int,
) -> list[torch.Tensor]:
    """What a head says when its features are one token old, two, and so on, all places of a text at once.

    At depth 1 slot `j` takes the target's features of token `j` and token `j + 1`. At depth `d` it takes the head's
    own state from depth `d - 1` and token `j + d`, and attends to what the chain that began there would: the slots of
    depth 1 up to `j`, and its own at every depth since. The tokens are those of the text, since a draft goes on only
    from tokens that are right.

    Args:
        head: An [`Eagle3Head`], perhaps in the wrapper that accelerate put it in.
        config: Of its layer.
        input_ids: Texts padded on the right, of shape `(batch_size, sequence_length)`.
        features: The target's, of shape `(batch_size, sequence_length, feature_size)`, in the head's precision.
        positions: After which tokens the next one is asked about: bool, of the shape of `input_ids`.
        depth: How many tokens are drafted, at least 1.

    Returns:
        For each depth the logits over the draft vocabulary, of shape `(num_positions, draft_vocab_size)`; of the
        positions in order, but for those before which there is no room for the chain ([`has_room`]).
    """
    num_slots = input_ids.shape[1] - 1
    slots = torch.arange(num_slots, device=input_ids.device)
    unseen = torch.full((num_slots, num_slots), float("-inf"), dtype=features.dtype, device=input_ids.device)
    masks, cache = [unseen.triu(1)], DynamicCache(config=config)
    own_slots = unseen.masked_fill(torch.eye(num_slots, dtype=torch.bool, device=input_ids.device), 0.0)
    given: dict[str, Any] = {"features": features[:, :-1]}
    logits = []
    for step in range(1, depth + 1):
        output = head(
            input_ids=_shifted(input_ids, step, num_slots),
            position_ids=(slots + step)[None],
            attention_mask=torch.cat(masks, dim=1)[None, None],
            logits_at=_shifted(positions, step, num_slots),
            **given,
            **{CACHE_KEY: cache},
        )
        logits.append(output.logits)
        given = {"hidden_states": output.hidden_states}
        masks.append(own_slots)
    return logits


def has_room(positions: torch.Tensor, depth: int) -> torch.Tensor:
    """Which positions, in order, have a chain of a depth before them: bool, of shape `(num_positions,)`.

    ```python
    >>> has_room(torch.tensor([[True, True, False, True]]), 2).tolist()
    [False, False, True]

    ```
    """
    return positions.nonzero()[:, 1] >= depth


def _shifted(values: torch.Tensor, step: int, num_slots: int) -> torch.Tensor:
    """In slot `j` what is at `j + step`, and nothing beyond the end."""
    values = values[:, step : step + num_slots]
    return pad(values, (0, num_slots - values.shape[1]))
