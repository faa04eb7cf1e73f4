"""What a speculator is, seen from the verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .config import SSDConfig
from .noise import GumbelNoise
from .sampling import Processor
from .translation import Translation
from .types import Outcome, Speculation


class SpeculatorError(RuntimeError):
    """The speculator cannot go on. The verifier goes on without it."""


@dataclass(frozen=True)
class EncoderInputs:
    """What an assistant reads beside tokens, for one row. It reads it once.

    Args:
        inputs: Arguments of the assistant's own encoder: `input_features` or `input_ids`, and masks. Empty where it
            takes the target's states.
        states: What the target's encoder made of them, of shape `(1, num_states, hidden_size)`, for an assistant that
            attends to these.
        mask: 1 for each state that may be attended to, of shape `(1, num_states)`; `None` for all.
    """

    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in (*self.inputs.values(), self.states, self.mask) if each is not None)

    def on(self, device: torch.device | str) -> EncoderInputs:
        """Copies of the tensors on a device, which hold on to nothing else: they may be a row of a batch."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(device, copy=True)

        return EncoderInputs(
            {name: copy(tensor) for name, tensor in self.inputs.items()},
            None if self.states is None else copy(self.states),
            None if self.mask is None else copy(self.mask),
        )


@dataclass(frozen=True)
class DraftRequest:
    """What a speculator needs to draft for one row.

    Args:
        prompt_ids: Token ids of the prompt, left padding included: logits processors see the row as the target's do.
        num_padding: Number of leading padding tokens, which the assistant does not read.
        max_new_tokens: Tokens that the row may still get: drafting more is in vain.
        vocab_size: Number of token ids that the target knows.
        takes_trees: Whether the target verifies token trees; otherwise a speculation must be a chain.
        do_sample: Whether tokens are sampled.
        processors: Logits processors for the assistant, in order.
        seed: Seed of the row, of the noise or the draws.
        config: Settings of the call.
        num_rows: Rows that are verified together, so that all wait for the slowest.
        encoder: What the assistant's decoder attends to; `None` for a decoder-only pair.
        placeholders: Token ids that stand for parts of images, videos and sounds. The assistant does not read them.
        translation: Between the two tokenizers, where the assistant has one of its own. All token ids that are
            exchanged are the target's.
        feature_layers: Which of the target's states each outcome brings, 1 being what its first layer gives; empty for
            an assistant that reads tokens only.
    """

    prompt_ids: tuple[int, ...]
    num_padding: int
    max_new_tokens: int
    vocab_size: int
    takes_trees: bool
    do_sample: bool
    processors: Sequence[Processor]
    seed: int
    config: SSDConfig
    num_rows: int = 1
    encoder: EncoderInputs | None = None
    placeholders: frozenset[int] = frozenset()
    translation: Translation | None = None
    feature_layers: tuple[int, ...] = ()

    @property
    def read_ids(self) -> list[int]:
        """What the assistant reads of the prompt."""
        return [token for token in self.prompt_ids[self.num_padding :] if token not in self.placeholders]

    @property
    def unread_ids(self) -> list[int]:
        """What it does not read: padding and placeholders."""
        others = [token for token in self.prompt_ids[self.num_padding :] if token in self.placeholders]
        return [*self.prompt_ids[: self.num_padding], *others]

    @property
    def draws(self) -> bool:
        """Whether draft tokens are drawn, and sent with what they were drawn from. Otherwise the likeliest are taken,
        under the coupled rule with the noise that the target adds too.
        """
        return self.do_sample and self.config.rule != "coupled"

    @property
    def noise(self) -> GumbelNoise | None:
        """What the target adds to its scores."""
        return GumbelNoise(self.seed) if self.do_sample and self.config.rule == "coupled" else None


class Speculator(Protocol):
    """Answers each verification outcome with a speculation.

    A row is `start()`, then `resolve()` and `receive()` in turn, then `stop()`. `start`, `resolve` and `stop` return at
    once; only `receive` waits. Each of them raises [`SpeculatorError`] when the speculator is gone.

    Attributes:
        threads: CPU threads of the assistant, `None` where it shares the caller's.
        device: Where the assistant runs.
    """

    threads: int | None
    device: str

    def another(self) -> Speculator:
        """A speculator for one more row at the same time, with the same assistant."""
        ...

    def start(self, request: DraftRequest) -> None:
        """Begins a row; the assistant reads the prompt while the target does."""
        ...

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> None:
        """Tells the outcome of the latest verification, and how long that took in milliseconds.

        The prefill's outcome is `(0, first token)`; its time says nothing about rounds and is left out.
        """
        ...

    def receive(self) -> Speculation:
        """Waits for the speculation that follows the latest outcome."""
        ...

    def stop(self) -> None:
        """Ends the row. No speculation is received any more."""
        ...
