"""From the assistant's hidden states to draft tokens and bonus candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.utils import logging

from ..noise import derive_seed
from ..protocol import DraftRequest
from ..sampling import SaguaroLogitsProcessor, apply_processors, draw, looks_only_at_scores
from .assistant import AssistantModel
from .draft_vocab import MAX_CONTEXT_TOKENS, DraftVocabulary, OwnVocabulary, frequent_tokens, resolve_size
from .eagle3 import Eagle3Assistant
from .together import Projection, Work
from .token_map import make_token_map

logger = logging.get_logger(__name__)


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


def point_mass(token: int, device: torch.device) -> DraftDistribution:
    """Of a token that was not drawn."""
    return DraftDistribution(torch.tensor([token], device=device), torch.ones(1, device=device))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next, the assistant's probability of it, and what it was drawn from, if it was drawn."""

    token: int
    probability: float
    distribution: DraftDistribution | None = None


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
        self._draws, self._noise = request.draws, request.noise
        self._saguaro_coefficient = request.config.saguaro_coefficient if request.do_sample else 1.0
        self.processors = list(request.processors)
        # Before the others, so that prefixes have the length that the target's have.
        self._unread = request.unread_ids
        self._num_placeholders = len(self._unread) - request.num_padding
        self._vocabulary = vocabulary
        self._map = make_token_map(assistant, request)
        # A row that goes on after a pause begins anew, with the text so far: that must not be drafted with the draws
        # that have shaped it.
        seed = derive_seed(request.seed, len(request.prompt_ids))
        self._generator = torch.Generator(assistant.device).manual_seed(seed)
        self._likely = torch.empty(0, dtype=torch.long, device=assistant.device)

    def activate(self, context: Sequence[int], extra: Sequence[int] = ()) -> None:
        """Renews the draft vocabulary: recent context, what the last full projection found likely, and `extra`."""
        if self._vocabulary is None:
            return
        recent = torch.tensor([*context[-MAX_CONTEXT_TOKENS:], *extra], dtype=torch.long, device=self.assistant.device)
        self._vocabulary.activate(self._map.to_assistant(torch.cat([recent, self._likely])))

    @property
    def reads_prefixes(self) -> bool:
        """Whether any of the processors looks at the tokens before; if not, prefixes may be left empty."""
        return bool(self.processors) and not looks_only_at_scores(self.processors)

    def rank_bonus_tokens(
        self,
        hidden: torch.Tensor,
        prefixes: Sequence[Sequence[int]],
        positions: Sequence[int],
        excluded: Sequence[Sequence[int]],
        count: int,
        *,
        use_full_vocabulary: bool = True,
    ) -> Work[list[list[Candidate]]]:
        """The likeliest bonus tokens at some places.

        Args:
            hidden: Hidden states of shape `(num_places, hidden_size)`.
            prefixes: For each place the tokens before the bonus token.
            positions: For each place the number of these tokens.
            excluded: For each place the draft tokens after it. They cannot be the bonus token there: that is what
                follows when they are rejected.
            count: How many candidates to return for each place, at most.
            use_full_vocabulary: Whether to look at all tokens; otherwise only at the draft vocabulary, if there is one.

        Returns:
            For each place the candidates in falling order of probability, given that none of the excluded follows.
        """
        token_ids: torch.Tensor | None = None
        if use_full_vocabulary or self._vocabulary is None:
            scores = self._process(prefixes, self._map.fit((yield Projection(hidden))))
        else:
            token_ids, scores = self._draft_scores(hidden, prefixes)
        scores = self._with_noise(scores, positions, token_ids)
        for row, tokens in enumerate(excluded):
            for token in tokens:
                scores[row, token if token_ids is None else token_ids == token] = float("-inf")
        ranked = self._likeliest(scores, token_ids, count)
        self._likely = torch.tensor([c.token for row in ranked for c in row], device=self.assistant.device).long()
        return ranked

    def draft(
        self,
        hidden: torch.Tensor,
        prefixes: Sequence[Sequence[int]],
        positions: Sequence[int],
        width: int = 1,
        fan_out: Sequence[int] | None = None,
    ) -> list[list[Candidate]]:
        """The next draft tokens for each row: one that is drawn, or the `width` likeliest.

        Args:
            hidden: Hidden states of shape `(num_rows, hidden_size)`.
            prefixes: For each row the tokens before.
            positions: For each row the number of these tokens.
            width: How many to return where none are drawn.
            fan_out: For each row the bonus tokens that are prepared where its draft token may be rejected. Read by
                Saguaro sampling only.
        """
        token_ids, scores = self._draft_scores(hidden, prefixes)
        has_choice = torch.isfinite(scores).any(dim=1)
        if token_ids is not None and not bool(has_choice.all()):
            # Processors left nothing of the draft vocabulary: look at all tokens.
            token_ids, scores = None, self.scores(hidden, prefixes)
            has_choice = torch.isfinite(scores).any(dim=1)
        if not bool(has_choice.all()):
            # Nothing may follow here; any fixed token is as good, and a point mass is what it is drawn from.
            scores[~has_choice, 0] = 0.0
        if fan_out is not None and self._saguaro_coefficient < 1.0:
            scores = SaguaroLogitsProcessor(self._saguaro_coefficient, fan_out)(None, scores)  # type: ignore[arg-type]
        if not self._draws:
            return self._likeliest(self._with_noise(scores, positions, token_ids), token_ids, width)
        probs = scores.softmax(dim=1)
        choices = draw(probs, self._generator)
        chances = probs.gather(1, choices[:, None]).squeeze(1).tolist()
        tokens = (choices if token_ids is None else token_ids[choices]).tolist()
        return [
            [Candidate(token, chance, DraftDistribution(token_ids, row))]
            for token, chance, row in zip(tokens, chances, probs, strict=True)
        ]

    def _with_noise(
        self, scores: torch.Tensor, positions: Sequence[int], token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if self._noise is None:
            return scores
        return self._noise.add_to(scores, [self._num_placeholders + each for each in positions], token_ids)

    @staticmethod
    def _likeliest(scores: torch.Tensor, token_ids: torch.Tensor | None, count: int) -> list[list[Candidate]]:
        values, choices = scores.topk(min(count, scores.shape[1]), dim=1)
        probs = (values - scores.logsumexp(dim=1, keepdim=True)).exp().tolist()
        tokens = (choices if token_ids is None else token_ids[choices]).tolist()
        possible = (values > float("-inf")).sum(dim=1).tolist()
        return [
            [Candidate(token, prob) for token, prob in zip(row[:n], row_probs, strict=False)]
            for row, row_probs, n in zip(tokens, probs, possible, strict=True)
        ]

    def scores(self, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Scores of all tokens, after the processors, of shape `(num_rows, vocab_size)`; arguments as for `draft`."""
        return self._process(prefixes, self._map.fit(self.assistant.logits(hidden)))

    def _draft_scores(
        self, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if self._vocabulary is None:
            return None, self.scores(hidden, prefixes)
        token_ids, logits = self._map.to_target(self._vocabulary.tokens), self._vocabulary.logits(hidden)
        if looks_only_at_scores(self.processors):
            return token_ids, self._process(prefixes, logits)
        # The other processors find tokens by their column.
        full = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        full[:, token_ids] = logits
        scores = self._process(prefixes, full)
        return (token_ids, scores[:, token_ids])

    def _process(self, prefixes: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        if self.reads_prefixes:
            device = logits.device
            rows = [torch.tensor([*self._unread, *prefix], dtype=torch.long, device=device) for prefix in prefixes]
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


def make_vocabulary(assistant: AssistantModel, request: DraftRequest) -> DraftVocabulary | None:
    """The draft vocabulary that the settings ask for, or the assistant's own; `None` where all tokens are used."""
    if isinstance(assistant, Eagle3Assistant):
        return OwnVocabulary(assistant)
    token_map = make_token_map(assistant, request)
    size = resolve_size(request.config.draft_vocab_size, token_map.limit)
    if size is None or assistant.head is None:
        return None
    static = token_map.drafted(frequent_tokens(assistant.model.name_or_path, token_map.limit, token_map.limit))[:size]
    return DraftVocabulary(assistant.head, static, in_int8=assistant.is_quantized)
