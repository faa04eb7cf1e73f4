"""Which of the target's token ids the assistant's stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..protocol import DraftRequest
from .assistant import AssistantModel
from .eagle3 import Eagle3Assistant


class TokenMap:
    """Between two vocabularies that are the same, up to padding.

    Args:
        assistant: The model that drafts.
        vocab_size: Number of token ids that the target knows.
    """

    def __init__(self, assistant: AssistantModel, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Of the assistant's token ids, those below have a meaning for the target.
        self.limit = min(vocab_size, assistant.vocab_size)

    def drafted(self, tokens: Sequence[int]) -> list[int]:
        """Those of the assistant's tokens that the target has too."""
        return [token for token in tokens if token < self.limit]

    def to_target(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids for tokens of the assistant that it has too."""
        return token_ids

    def to_assistant(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The assistant's ids for tokens of the target, as far as it has them; of shape `(num_found,)`."""
        return token_ids[token_ids < self.limit]

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """The assistant's logits in the order of the target's vocabulary, `-inf` where it has no token.

        Args:
            logits: Of shape `(num_rows, assistant's vocab_size)`.

        Returns:
            Tensor of shape `(num_rows, vocab_size)`.
        """
        missing = self.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]


class ListedTokenMap(TokenMap):
    """Between two vocabularies by tables: of the tokens that two tokenizers share, or of those that a head drafts.

    Args:
        assistant: The model that drafts.
        vocab_size: Number of token ids that the target knows.
        to_target: The target's id for each of the assistant's, -1 where it has none.
        to_assistant: The assistant's id for each of the target's, -1 where it has none.
    """

    def __init__(
        self, assistant: AssistantModel, vocab_size: int, to_target: torch.Tensor, to_assistant: torch.Tensor
    ) -> None:
        super().__init__(assistant, vocab_size)
        self.limit = len(to_target)
        self._to_target = to_target.to(assistant.device)
        self._to_assistant = to_assistant.to(assistant.device)
        self._columns = (self._to_target >= 0).nonzero().flatten()
        self._targets = self._to_target[self._columns]

    def drafted(self, tokens: Sequence[int]) -> list[int]:
        to_target = self._to_target.tolist()
        return [token for token in tokens if to_target[token] >= 0]

    def to_target(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._to_target[token_ids]

    def to_assistant(self, token_ids: torch.Tensor) -> torch.Tensor:
        found = self._to_assistant[token_ids]
        return found[found >= 0]

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        fitted = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return fitted.index_copy_(1, self._targets, logits[:, self._columns])


def make_token_map(assistant: AssistantModel, request: DraftRequest) -> TokenMap:
    """The map for a row."""
    if isinstance(assistant, Eagle3Assistant):
        drafted = assistant.drafted_tokens
        to_draft = drafted.new_full((request.vocab_size,), -1)
        to_draft[drafted] = torch.arange(len(drafted), device=drafted.device)
        return ListedTokenMap(assistant, request.vocab_size, drafted, to_draft)
    if request.translation is None:
        return TokenMap(assistant, request.vocab_size)
    translation = request.translation
    return ListedTokenMap(assistant, request.vocab_size, translation.drafted, translation.shared)
