"""Records rounds of speculative decoding with all that a fan-out decides by, to try fan-outs on afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import SSDConfig
from ..decoding import RowDecoder
from ..drafting import AssistantModel
from ..drafting.proposer import Proposer
from ..kv_cache import keep_branch
from ..orchestration import draft_request
from ..protocol import DraftRequest
from ..recorder import Recorder
from ..row import Link, Row
from ..sampling import draw
from ..types import Outcome, Speculation
from .arms import Inputs

NUM_DRAFT_TOKENS = 4  # K of the recorded rounds
NUM_CANDIDATES = 64  # bonus tokens kept per position: more than any budget gives to one


@dataclass(frozen=True)
class Position:
    """A place where acceptance may stop: after k = 0..K draft tokens.

    Args:
        candidates: The likeliest bonus tokens there by the assistant's word, in falling order. The draft token that
            would have been rejected is not among them.
        probs: The assistant's probability of each, after all logits processors.
        draft_prob: Its probability of the draft token that follows; `None` after the last one.
    """

    candidates: tuple[int, ...]
    probs: tuple[float, ...]
    draft_prob: float | None = None


@dataclass(frozen=True)
class RecordedRound:
    """One round: what was known while it was being verified, and what came of it.

    Args:
        positions: For k = 0..K accepted draft tokens.
        num_accepted: How many were.
        bonus_token: The token that the target added.
    """

    positions: tuple[Position, ...]
    num_accepted: int
    bonus_token: int


class ChainDrafter:
    """A speculator that drafts chains of K tokens in the caller's thread and takes down every round.

    Args:
        assistant: The assistant.
        num_draft_tokens: K; fewer where fewer are wanted.

    Attributes:
        rounds: What was recorded. Rounds without draft tokens are not: there is nothing to split a budget over.
    """

    threads: int | None = None

    def __init__(self, assistant: AssistantModel, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        self.device = str(assistant.device)
        self.rounds: list[RecordedRound] = []
        self._num_draft_tokens = num_draft_tokens
        self._assistant = assistant

    def another(self) -> ChainDrafter:
        return ChainDrafter(self._assistant, self._num_draft_tokens)

    def start(self, request: DraftRequest) -> None:
        self._request = request
        self._generator = torch.Generator(self._assistant.device).manual_seed(request.seed)
        self._proposer = Proposer(self._assistant, request, None)
        self._tokens = list(request.prompt_ids[request.num_padding :])
        self._num_wanted = request.max_new_tokens
        self._cache = self._assistant.new_cache()
        self._draft: list[int] = []
        self._positions: list[Position] = []

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> None:
        num_accepted = outcome.node  # of a chain
        if self._draft:
            self.rounds.append(RecordedRound(tuple(self._positions), num_accepted, outcome.bonus_token))
        keep_branch(self._cache, min(len(self._tokens) + num_accepted, self._cache.get_seq_length()), ())
        self._tokens += [*self._draft[:num_accepted], outcome.bonus_token]
        self._num_wanted -= num_accepted + 1

    @torch.inference_mode()
    def receive(self) -> Speculation:
        self._draft, self._positions = [], []
        # The target adds a token to what is drafted, so the last token wanted is never drafted.
        length = min(self._num_draft_tokens, self._num_wanted - 1)
        if length < 1:
            return Speculation()
        distributions = []
        for _ in range(length):
            probs = self._next_probs()
            token = int(draw(probs[None], self._generator) if self._request.draws else probs.argmax())
            self._positions.append(_position(probs, token))
            self._draft.append(token)
            distributions.append(probs)
        self._positions.append(_position(self._next_probs(), None))
        drawn = torch.stack(distributions) if self._request.draws else None
        return Speculation.chain(tuple(self._draft), draft_probs=drawn)

    def stop(self) -> None:
        self._draft = []

    def _next_probs(self) -> torch.Tensor:
        """The assistant's distribution after everything so far, of shape `(vocab_size,)`."""
        row = self._tokens + self._draft
        hidden = self._assistant.forward(row[self._cache.get_seq_length() :], self._cache, num_hidden=1)
        return self._proposer.scores(hidden, [row])[0].softmax(dim=-1)


def record_rounds(
    target: PreTrainedModel,
    drafter: ChainDrafter,
    inputs: Inputs,
    generation_kwargs: Mapping[str, Any],
    max_new_tokens: int,
    seed: int = 0,
) -> None:
    """Generates once and leaves the rounds in `drafter.rounds`.

    Args:
        target: The target, as transformers made it.
        drafter: Drafts and records.
        inputs: Tokenized prompt, one row.
        generation_kwargs: Arguments of generate().
        max_new_tokens: Most tokens to generate.
        seed: Seed of the draws.
    """
    config = SSDConfig(mode="sd", draft_tree_size=None, verification="token")

    def decode(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> torch.Tensor:
        generation_config = prepared.pop("generation_config")
        names = ("logits_processor", "stopping_criteria")
        arguments = {name: prepared.pop(name) for name in names}
        unused = ("synced_gpus", "streamer", "tokenizer", "assistant_model")
        model_kwargs = {name: value for name, value in prepared.items() if name not in unused}
        recorder = Recorder("sd")
        row = Row(
            input_ids,
            num_padding=0,
            generation_config=generation_config,
            recorder=recorder,
            rule=config.rule,
            seed=seed,
            **arguments,
        )
        decoder = RowDecoder(model, row, model_kwargs=model_kwargs, recorder=recorder)
        decoder.run(Link(drafter, recorder), draft_request(model, row, config, takes_trees=False))
        return row.input_ids

    torch.manual_seed(seed)
    target.generate(**inputs, **generation_kwargs, max_new_tokens=max_new_tokens, custom_generate=decode)


def _position(probs: torch.Tensor, draft_token: int | None) -> Position:
    """The candidates of a position by a distribution of shape `(vocab_size,)`."""
    draft_prob = None if draft_token is None else float(probs[draft_token])
    values, tokens = probs.topk(min(NUM_CANDIDATES + 1, len(probs)))
    ranked = [
        (token, value)
        for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        if token != draft_token and value > 0
    ][:NUM_CANDIDATES]
    return Position(tuple(token for token, _ in ranked), tuple(value for _, value in ranked), draft_prob)
