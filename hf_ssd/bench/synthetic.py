"""Models of real shapes with random weights that agree as often as they are told to.

Random weights predict nothing, so both models get an oracle: the next token is a hash of the latest token and its
position, and the last hidden state is moved towards that token's row of the output projection. The assistant's oracle
errs with a set probability, by another hash. All layers and the projection run as in a real model; the oracle adds
some twenty operations on a few numbers. No two tokens are ever nearly equal, so texts can be compared in any dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaModel

from ..compat import CACHE_KEY

GAIN = 40.0  # logits by which the oracle's token leads; random weights spread by about one
SECOND_GAIN = 28.0
FREQUENT_SHARE = 8  # the oracle's tokens are among the lowest ids, as frequent tokens are, and so in a draft vocabulary
_ERRS, _KNOWS, _WRONG = 1, 2, 3  # which question a hash answers


@dataclass(frozen=True)
class Shape:
    """What decides how long a Llama takes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 128_256
    tie_word_embeddings: bool = False


SHAPES = {
    "8b": Shape(4096, 14_336, 32, 32, 8),  # Llama 3.1 8B
    "3b": Shape(3072, 8192, 28, 24, 8, tie_word_embeddings=True),  # Llama 3.2 3B
    "1b": Shape(2048, 8192, 16, 32, 8, tie_word_embeddings=True),  # Llama 3.2 1B
    "tiny-target": Shape(256, 512, 8, 4, 2, vocab_size=512),
    "tiny": Shape(128, 256, 2, 4, 2, vocab_size=512),
}


class SyntheticConfig(LlamaConfig):
    """A Llama's config, and what its oracle knows.

    Args:
        agreement: Chance that the oracle's first choice is right. 1 makes a target.
        second_choice: Chance that the second is, where the first is wrong: what a speculation cache hits by.
    """

    model_type = "hf_ssd_synthetic"
    agreement: float = 1.0
    second_choice: float = 0.75


class SyntheticModel(LlamaModel):
    """A Llama's decoder whose last hidden states point to the oracle's tokens."""

    config_class = SyntheticConfig

    def point_to(self, head: torch.nn.Linear) -> None:
        """Tells the output projection. In a tuple, so that it is not taken for a module of this one too."""
        self._head = (head,)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is None:
            cache = kwargs.get(CACHE_KEY)
            first = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(first, first + input_ids.shape[1], device=input_ids.device)[None]
        outputs = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        first_choice, second_choice = self._choices(input_ids, position_ids)
        outputs.last_hidden_state = (
            outputs.last_hidden_state + self._towards(first_choice, GAIN) + self._towards(second_choice, SECOND_GAIN)
        )
        return outputs

    def _choices(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = self.config.vocab_size // FREQUENT_SHARE
        right = _hash(tokens, positions) % num_tokens
        wrong = (right + 1 + _hash(tokens, positions, _WRONG) % (num_tokens - 1)) % num_tokens
        errs = _uniform(tokens, positions, _ERRS) >= self.config.agreement
        knows = _uniform(tokens, positions, _KNOWS) < self.config.second_choice
        return torch.where(errs, wrong, right), torch.where(errs & knows, right, wrong)

    def _towards(self, tokens: torch.Tensor, gain: float) -> torch.Tensor:
        """What adds `gain` to the tokens' logits, and next to nothing to others: random rows are nearly orthogonal."""
        rows = torch.nn.functional.embedding(tokens, self._head[0].weight)
        return rows * (gain / rows.float().square().sum(dim=-1, keepdim=True)).to(rows.dtype)


class SyntheticForCausalLM(LlamaForCausalLM):
    """A Llama with a [`SyntheticModel`] for a decoder."""

    config_class = SyntheticConfig

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.model.__class__ = SyntheticModel  # the same weights; building a second decoder would take as long again
        self.model.point_to(self.lm_head)

    @classmethod
    def of(
        cls,
        shape: Shape,
        *,
        agreement: float = 1.0,
        second_choice: float = 0.75,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> SyntheticForCausalLM:
        """A model with random weights, made on `device`. The global random state is left alone."""
        config = SyntheticConfig(
            **vars(shape), max_position_embeddings=32_768, bos_token_id=None, eos_token_id=None, pad_token_id=0
        )
        config.agreement, config.second_choice = agreement, second_choice
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.random.fork_rng(), torch.device(device):
                torch.manual_seed(seed)
                model = cls(config).eval()
        finally:
            torch.set_default_dtype(before)
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model


def _hash(tokens: torch.Tensor, positions: torch.Tensor, question: int = 0) -> torch.Tensor:
    """31 well-mixed bits of token, position and question, int64."""
    mixed = (tokens * 0x9E3779B1 + positions * 0x85EBCA6B + question * 0xC2B2AE35) & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) >> 1


def _uniform(tokens: torch.Tensor, positions: torch.Tensor, question: int) -> torch.Tensor:
    return _hash(tokens, positions, question).float() / 2**31
