"""What a distillation came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .measuring import Agreement


@dataclass(frozen=True)
class Rounds:
    """What SSD made of the assistant, at one temperature.

    Args:
        num_prompts: Prompts of texts that were kept from training.
        num_rounds: Verifications.
        tokens_per_round: Tokens that one of them gave.
        acceptance: Share of the positions reached at which a draft token was accepted.
        hit_rate: Share of the outcomes that were prepared for.
        degraded: The cause, where SSD went on without the assistant, so that these figures are not its.
    """

    num_prompts: int
    num_rounds: int
    tokens_per_round: float | None
    acceptance: float | None
    hit_rate: float | None
    degraded: str | None = None


@dataclass(frozen=True)
class DistillResult:
    """An assistant, how it was made, and how good it is.

    Args:
        out: Its folder.
        kind: What it is, as in [`DistillSettings`].
        target: Name or folder of the target.
        model_type: Of both.
        dtype: Of the saved weights.
        layers: Decoder layers, of the assistant and the target.
        width: Hidden sizes, likewise.
        own_parameters: Parameters that were trained.
        shares_embedding: Whether the token embedding is the target's.
        shares_projection: Whether the output projection is.
        init_from: Folder of the assistant that training began with, if it was one.
        data: What was learnt from.
        held_out: What the prompts were taken from that it was measured on; `None` if texts were kept from training.
        num_texts: Texts for training, held-out ones not counted.
        num_tokens: Tokens to be learnt in them.
        num_seen: The same, each time that it was looked at; an estimate from the number of steps.
        num_steps: Steps of training.
        minutes: Time of each stage.
        before: Figures of the student before training, on the held-out texts.
        agreement: Figures of the saved assistant on them.
        deeper: The same for tokens that are drafted after one drafted token, after two and so on, where it guesses
            worse from one to the next.
        draft_vocab_size: How many tokens it may draft, if not all.
        rounds: By temperature, what SSD made of it.
    """

    out: str
    kind: str
    target: str
    model_type: str
    dtype: str
    layers: tuple[int, int]
    width: tuple[int, int]
    own_parameters: int
    shares_embedding: bool
    shares_projection: bool
    init_from: str | None
    data: tuple[str, ...]
    num_texts: int
    num_tokens: int
    num_seen: int
    num_steps: int
    minutes: Mapping[str, float]
    before: Agreement
    agreement: Agreement
    rounds: Mapping[float, Rounds]
    held_out: str | None = None
    deeper: tuple[Agreement, ...] = ()
    draft_vocab_size: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)
