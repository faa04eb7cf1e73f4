"""From the assistant's hidden states to draft tokens and bonus candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.utils import logging

from ..protocol import DraftRequest
from ..sampling import apply_processors, draw, looks_only_at_scores
from .assistant import AssistantModel
from .draft_vocab import MAX_CONTEXT_TOKENS, DraftVocabulary, frequent_tokens, resolve_size

logger = logging.get_logger(__name__)

NUM_LIKELY_TOKENS = 16  # of each full projection that join the draft vocabulary


@dataclass(frozen=True)
class DraftDistribution:
    """What a draft token was drawn from: `probs` over `token_ids`, or over the whole vocabulary if that is `None`."""

    token_ids: torch.Tensor | None
    probs: torch.Tensor

    def to_dense(self, vocab_size: int) -> torch.Tensor:
        """The distribution over all token ids, of shape `(vocab_size,)`."""
        if self.token_ids is None:
            return self.probs
        return self.probs.new_zeros(vocab_size).index_copy_(0, self.token_ids, self.probs)


class Proposer:
    """Chooses tokens for one row, after the call's logits processors, on the draft vocabulary where there is one.

    Args:
        assistant: The model whose hidden states are read.
        request: The row: processors, sampling and seed.
        vocabulary: The draft vocabulary, or `None` for all tokens.
    """

    def __init__(self, assistant: AssistantModel, request: DraftRequest, vocabulary: DraftVocabulary | None) -> None:
        self.assistant = assistant
        self.vocab_size = request.vocab_size
        self.do_sample = request.do_sample
        self.processors = list(request.processors)
        self._padding = list(request.prompt_ids[: request.num_padding])
        self._vocabulary = vocabulary
        self._generator = torch.Generator(assistant.device).manual_seed(request.seed)
        self._likely = torch.empty(0, dtype=torch.long, device=assistant.device)

    def activate(self, context: Sequence[int], extra: Sequence[int] = ()) -> None:
        """Renews the draft vocabulary: recent context, what the last full projection found likely, and `extra`."""
        if self._vocabulary is None:
            return
        recent = torch.tensor([*context[-MAX_CONTEXT_TOKENS:], *extra], dtype=torch.long, device=self.assistant.device)
        limit = min(self.vocab_size, self.assistant.vocab_size)
        tokens = torch.cat([recent, self._likely])
        self._vocabulary.activate(tokens[tokens < limit])

    def rank_bonus_tokens(
        self,
        hidden: torch.Tensor,
        prefixes: Sequence[Sequence[int]],
        excluded: Sequence[int | None],
        counts: Sequence[int],
        *,
        use_full_vocabulary: bool = True,
    ) -> list[list[int]]:
        """The likeliest bonus tokens at some positions.

        Args:
            hidden: Hidden states of shape `(num_positions, hidden_size)`.
            prefixes: For each position the tokens before the bonus token.
            excluded: For each position the draft token after it, if any. It cannot be the bonus token there: that is
                what follows when it is rejected.
            counts: For each position how many candidates to return, at most.
            use_full_vocabulary: Whether to look at all tokens; otherwise only at the draft vocabulary, if there is one.
        """
        token_ids, scores = (
            (None, self._full_scores(hidden, prefixes)) if use_full_vocabulary else self._draft_scores(hidden, prefixes)
        )
        for row, token in enumerate(excluded):
            if token is not None:
                scores[row, token if token_ids is None else token_ids == token] = float("-inf")
        values, choices = scores.topk(min(max(*counts, NUM_LIKELY_TOKENS), scores.shape[1]), dim=1)
        tokens = choices if token_ids is None else token_ids[choices]
        self._likely = tokens.flatten()
        possible = (values > float("-inf")).sum(dim=1).tolist()
        return [row[: min(*limits)] for row, *limits in zip(tokens.tolist(), counts, possible, strict=True)]

    def draft(
        self, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[DraftDistribution | None]]:
        """The next draft token for each row, drawn or the likeliest, and what it was drawn from."""
        token_ids, scores = self._draft_scores(hidden, prefixes)
        has_choice = torch.isfinite(scores).any(dim=1)
        if token_ids is not None and not bool(has_choice.all()):
            # Processors left nothing of the draft vocabulary: look at all tokens.
            token_ids, scores = None, self._full_scores(hidden, prefixes)
            has_choice = torch.isfinite(scores).any(dim=1)
        if not self.do_sample:
            choices = scores.argmax(dim=1)
            return self._to_tokens(choices, token_ids), [None] * len(choices)
        probs = scores.softmax(dim=1)
        if not bool(has_choice.all()):
            # Nothing may follow here; any fixed token is as good, and a point mass is what it is drawn from.
            probs[~has_choice] = torch.nn.functional.one_hot(torch.tensor(0), probs.shape[1]).to(probs)
        choices = draw(probs, self._generator)
        return self._to_tokens(choices, token_ids), [DraftDistribution(token_ids, row) for row in probs]

    def _full_scores(self, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._process(prefixes, self._fit(self.assistant.logits(hidden)))

    def _draft_scores(
        self, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if self._vocabulary is None:
            return None, self._full_scores(hidden, prefixes)
        token_ids, logits = self._vocabulary.tokens, self._vocabulary.logits(hidden)
        if looks_only_at_scores(self.processors):
            return token_ids, self._process(prefixes, logits)
        # The other processors find tokens by their column.
        full = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        full[:, token_ids] = logits
        scores = self._process(prefixes, full)
        return (token_ids, scores[:, token_ids])

    def _process(self, prefixes: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        if self.processors and not looks_only_at_scores(self.processors):
            device = logits.device
            rows = [torch.tensor([*self._padding, *prefix], dtype=torch.long, device=device) for prefix in prefixes]
        while self.processors:
            try:
                return apply_processors(self.processors, rows, logits.clone())
            except Exception as error:  # a caller's own code; verification applies it anyway
                dropped = self._drop_failing(rows, logits)
                logger.warning_once(
                    f"A logits processor failed on draft tokens and is left out when drafting: {dropped} "
                    f"({error!r}). The "
                    "output is not affected, only the speed."
                )
        return logits

    def _drop_failing(self, rows: Sequence[torch.Tensor], logits: torch.Tensor) -> str:
        for i, processor in enumerate(self.processors):
            try:
                apply_processors([processor], rows, logits.clone())
            except Exception:
                return type(self.processors.pop(i)).__name__
        return type(self.processors.pop()).__name__

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Cuts or pads the assistant's logits to the target's vocabulary."""
        missing = self.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]

    @staticmethod
    def _to_tokens(choices: torch.Tensor, token_ids: torch.Tensor | None) -> list[int]:
        tokens: list[int] = (choices if token_ids is None else token_ids[choices]).tolist()
        return tokens


def make_vocabulary(assistant: AssistantModel, request: DraftRequest) -> DraftVocabulary | None:
    """The draft vocabulary that the settings ask for, or `None` where all tokens are used."""
    limit = min(request.vocab_size, assistant.vocab_size)
    size = resolve_size(request.config.draft_vocab_size, limit)
    if size is None or assistant.head is None:
        return None
    return DraftVocabulary(assistant.head, frequent_tokens(assistant.model.name_or_path, size, limit))
