"""The draft vocabulary: the tokens that continuations are chosen from (NanoSpec, FR-Spec style).

On a small assistant the output projection dominates a draft step. Continuations are mostly frequent tokens or tokens of
the context, so they are chosen from an active set; bonus tokens are often rare, so outcomes use the full vocabulary.
Draft probabilities are 0 outside the set, which verification knows, so nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers.utils import cached_file, logging

from .eagle3 import Eagle3Assistant
from .int8 import Int8Linear

logger = logging.get_logger(__name__)

FREQUENT_TOKENS_FILE = "frequent_tokens.json"
MIN_AUTO_VOCAB_SIZE = 32_768  # below, the projection is no large part of a step
AUTO_SHARE = 4  # a quarter of the tokens, as in FR-Spec: fewer cost more acceptance than their step is faster
MAX_CONTEXT_TOKENS = 1024


def resolve_size(setting: int | Literal["auto"] | None, vocab_size: int) -> int | None:
    """The size of the static set, or `None` where the full vocabulary is used."""
    if setting == "auto":
        return vocab_size // AUTO_SHARE if vocab_size >= MIN_AUTO_VOCAB_SIZE else None
    return setting if setting is not None and setting < vocab_size else None


def frequent_tokens(name_or_path: str, size: int, vocab_size: int) -> list[int]:
    """The `size` token ids expected most often.

    They come from `frequent_tokens.json` in the assistant's folder, most frequent first, where there is one. Otherwise
    they are the lowest ids, which byte-pair tokenizers give to their most frequent merges.
    """
    listed: list[int] = []
    try:
        file = cached_file(name_or_path, FREQUENT_TOKENS_FILE, local_files_only=True)
        tokens = json.loads(Path(file).read_text())
        # Each once: a draft token's probability is that of one column.
        listed = list(dict.fromkeys(token for token in tokens if type(token) is int and 0 <= token < vocab_size))
    except (OSError, TypeError, ValueError) as error:
        logger.info(f"No frequent tokens from `{name_or_path}`: {error}")
    known = set(listed)
    return (listed + [token for token in range(vocab_size) if token not in known])[:size]


class DraftVocabulary:
    """Projects hidden states onto an active set of tokens.

    The rows of the static set are gathered once, those of the round's set each round.

    Args:
        head: The assistant's output projection.
        static_tokens: Token ids that are always in the set.
        in_int8: Whether to hold the rows of the static set in 8 bits.
    """

    def __init__(self, head: nn.Linear, static_tokens: Sequence[int], *, in_int8: bool = False) -> None:
        self._head = head
        device = head.weight.device
        self._static = torch.tensor(static_tokens, dtype=torch.long, device=device)
        self._is_static = torch.zeros(head.weight.shape[0], dtype=torch.bool, device=device)
        self._is_static[self._static] = True
        rows = self._linear(self._static)
        self._project_static: nn.Module = Int8Linear(rows) if in_int8 else rows
        self._project_round: nn.Module | None = None
        self.tokens = self._static

    def activate(self, tokens: torch.Tensor) -> None:
        """Makes the set the static tokens and `tokens`, ids of any shape, repeats allowed."""
        tokens = torch.unique(tokens)
        tokens = tokens[~self._is_static[tokens]]
        self._project_round = self._linear(tokens) if tokens.numel() else None
        self.tokens = torch.cat([self._static, tokens])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits of shape `(num_rows, len(self.tokens))`, in the order of `tokens`."""
        logits = self._project_static(hidden)
        if self._project_round is not None:
            logits = torch.cat([logits, self._project_round(hidden)], dim=-1)
        return logits.float()

    def _linear(self, tokens: torch.Tensor) -> nn.Linear:
        """The part of the projection that `tokens` need."""
        rows = nn.Linear(self._head.in_features, len(tokens), bias=False, device="meta")
        rows.weight = nn.Parameter(self._head.weight[tokens], requires_grad=False)
        if self._head.bias is not None:
            rows.bias = nn.Parameter(self._head.bias[tokens], requires_grad=False)
        return rows


class OwnVocabulary(DraftVocabulary):
    """The draft vocabulary that an EAGLE-3 head was trained on. It is always all of it.

    Args:
        assistant: The head.
    """

    def __init__(self, assistant: Eagle3Assistant) -> None:
        self._assistant = assistant
        self.tokens = torch.arange(len(assistant.drafted_tokens), device=assistant.device)

    def activate(self, tokens: torch.Tensor) -> None:
        pass

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._assistant.logits(hidden)
