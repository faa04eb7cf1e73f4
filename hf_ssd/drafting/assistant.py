"""The assistant as the drafting engine sees it: hidden states for tokens in a tree, and logits for hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import tree_attention
from ..compat import CACHE_KEY
from ..decoders import attends_to_encoder, decoder_config, takes_positions
from ..protocol import EncoderInputs
from ..wrappers import input_device
from . import packed
from .encoder_reader import EncoderReader
from .int8 import Int8Linear, is_plain, quantize_linears
from .packed import PackedCache, Segment
from .tree_cache import CrossCache, SlabCache
from .tree_mask import TreeMask

logger = logging.get_logger(__name__)

MASKED_ATTENTION = ("eager", "sdpa")  # those of transformers' that obey any mask
MAX_CHAIN_TOKENS = 64  # beyond, scores of all tokens at once take more memory than they save time


@dataclass(frozen=True)
class Forward:
    """Asks for the hidden states of tokens; the fields are the arguments of [`AssistantModel.forward`]."""

    tokens: Sequence[int]
    cache: SlabCache
    positions: Sequence[int] | None = None
    mask: torch.Tensor | dict[str, torch.Tensor] | None = None
    num_hidden: int | None = None
    states: torch.Tensor | None = None


class AssistantModel:
    """Runs an assistant on chains and trees of tokens.

    Where the model is a plain "decoder, then linear projection", the two are run apart: hidden states are small and
    are kept, and only those that are asked about are projected, onto the full vocabulary or onto a part of it. Any
    other model (scaled or capped logits, say) is run whole, and its logits stand in for its hidden states. What the
    model can do is tried on a few tokens, not looked up by name.

    Args:
        model: A transformers model in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = decoder_config(model)
        self._reader = EncoderReader(model) if attends_to_encoder(model) else None
        self.device = input_device(model)
        self.dtype = model.dtype
        self.vocab_size: int = self.config.vocab_size
        lengths = (getattr(self.config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
        self.max_length: int | None = next((length for length in lengths if length is not None), None)
        self.mask = TreeMask(self.config, self.dtype, self.device)
        self._decoder, self._head = self._split()
        self._projection: nn.Module | None = self._head
        tree_attention.register()
        packed.register()
        # T5 has distances in the cache for positions, which on branches are others.
        has_positions = self._reader is None or takes_positions(model)
        self.takes_trees = has_positions and (
            self._check_trees(omits_prefix=True) or self._check_trees(omits_prefix=False)
        )

    @cached_property
    def packs_rows(self) -> bool:
        """Whether tokens of several rows may share a forward. Tried when there are several for the first time."""
        # Where windows or layers of several kinds need other masks, rows are run one by one.
        has_one_mask = self.mask.window is None and not self.mask.layer_types
        is_apart = self._reader is None and has_one_mask
        return self.takes_trees and self.mask.omits_prefix and is_apart and self._check_packing()

    def new_cache(self, encoder: EncoderInputs | None = None) -> SlabCache:
        """An empty cache.

        Args:
            encoder: What a row's tokens attend to beside each other, which is read here.
        """
        return SlabCache() if self._reader is None else self._reader.read(encoder)

    def runs_on(self, cache: SlabCache) -> bool:
        """Whether another row runs as well on a cache that is there as on a new one."""
        return True

    def forward(
        self,
        tokens: Sequence[int],
        cache: SlabCache,
        positions: Sequence[int] | None = None,
        mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        num_hidden: int | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs `tokens` and appends their keys and values to `cache`.

        Args:
            tokens: Token ids, a chain after what the cache holds unless `mask` says otherwise.
            cache: Extended in place.
            positions: Position of each token; by default those that follow the cache.
            mask: Additive attention mask as [`TreeMask`] makes it.
            num_hidden: How many of the last tokens to return hidden states for; all by default.
            states: What an assistant that reads more than tokens takes beside each of them, of shape
                `(num_tokens, hidden_size)`.

        Returns:
            Hidden states of shape `(num_hidden, hidden_size)`, to be given to `logits`.
        """
        num_hidden = len(tokens) if num_hidden is None else num_hidden
        num_cached = cache.get_seq_length()
        if mask is None and num_cached and len(tokens) <= MAX_CHAIN_TOKENS and self.mask.omits_prefix:
            # For a chain, too, that is cheaper than what the model would do by itself.
            mask = self.mask.chain(num_cached, len(tokens))
            positions = range(num_cached, num_cached + len(tokens))
        kwargs: dict[str, Any] = {CACHE_KEY: cache, "use_cache": True, "return_dict": True}
        kwargs["input_ids"] = torch.tensor([self._known(tokens)], dtype=torch.long, device=self.device)
        if positions is not None:
            kwargs["position_ids"] = torch.tensor([[*positions]], dtype=torch.long, device=self.device)
        if mask is not None:
            kwargs["attention_mask"] = mask
        if states is not None:
            kwargs["states"] = states[None]
        with self._attention(mask, num_cached + len(tokens)):
            return self._run(kwargs, cache)[-num_hidden:]

    def forward_all(self, forwards: Sequence[Forward]) -> list[torch.Tensor]:
        """Several forwards, each with a cache of its own: in one go where the model allows that.

        Returns:
            Hidden states for each, as from `forward`.
        """
        if len(forwards) == 1 or not self.packs_rows or any(not each.cache.get_seq_length() for each in forwards):
            return [
                self.forward(each.tokens, each.cache, each.positions, each.mask, each.num_hidden, each.states)
                for each in forwards
            ]
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for each in forwards:
            num_cached, num_tokens = each.cache.get_seq_length(), len(each.tokens)
            mask = self.mask.chain(num_cached, num_tokens) if each.mask is None else each.mask
            assert isinstance(mask, torch.Tensor)
            segments.append(Segment(num_tokens, each.cache, mask[0, 0]))
            tokens += self._known(each.tokens)
            positions += range(num_cached, num_cached + num_tokens) if each.positions is None else each.positions
        kwargs: dict[str, Any] = {CACHE_KEY: PackedCache(segments), "use_cache": True, "return_dict": True}
        kwargs["input_ids"] = torch.tensor([tokens], dtype=torch.long, device=self.device)
        kwargs["position_ids"] = torch.tensor([positions], dtype=torch.long, device=self.device)
        # Only there so that the model makes none itself.
        kwargs["attention_mask"] = torch.zeros((1, 1, len(tokens), 1), dtype=self.dtype, device=self.device)
        given = [each.states for each in forwards if each.states is not None]
        if given:
            kwargs["states"] = torch.cat(given)[None]
        with tree_attention.use(self.config, packed.NAME):
            states = self._run(kwargs)
        parts = states.split([segment.num_tokens for segment in segments])
        return [
            part if each.num_hidden is None else part[-each.num_hidden :]
            for part, each in zip(parts, forwards, strict=True)
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the assistant's whole vocabulary, float32, of shape `(num_rows, vocab_size)`."""
        return (self._projection(hidden) if self._projection is not None else hidden).float()

    def quantize(self) -> None:
        """Runs the linear layers in 8 bits from here on.

        Effects: the model's own layers are replaced, but for the output projection that `head` returns.

        Raises:
            ValueError: If this build of torch has no kernels for it.
        """
        quantize_linears(self.model if self._decoder is None else self._decoder)
        if self.head is not None:
            self._projection = Int8Linear(self.head)

    @property
    def is_quantized(self) -> bool:
        return isinstance(self._projection, Int8Linear)

    @property
    def head(self) -> nn.Linear | None:
        """The output projection, where it may be applied to a part of the vocabulary."""
        return self._head if self._head is not None and is_plain(self._head) else None

    def _split(self) -> tuple[nn.Module | None, nn.Linear | None]:
        decoder, head = self.model.base_model, self.model.get_output_embeddings()
        if self._reader is not None:
            decoder = self._reader.decoder
        if decoder is self.model or not isinstance(head, nn.Linear):
            return None, None
        input_ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        given = {"input_ids": input_ids, "use_cache": False, "return_dict": True}
        cache = self.new_cache()
        try:
            apart = head(self._invoke(decoder, given, cache).last_hidden_state)
            whole = self._invoke(self.model, given, cache).logits
        except Exception as error:  # whatever a model's own code may raise: it is run whole then
            logger.info(f"The assistant cannot be split into decoder and head ({error!r}); it is run whole.")
            return None, None
        return (decoder, head) if torch.equal(apart, whole) else (None, None)

    def _run(self, kwargs: dict[str, Any], cache: SlabCache | None = None) -> torch.Tensor:
        """A forward. Returns hidden states of all tokens, of shape `(num_tokens, hidden_size)`."""
        if self._decoder is not None:
            states: torch.Tensor = self._invoke(self._decoder, kwargs, cache).last_hidden_state[0]
        else:
            states = self._invoke(self.model, kwargs, cache).logits[0]
        return states

    def _invoke(self, module: nn.Module, kwargs: dict[str, Any], cache: SlabCache | None) -> Any:
        if self._reader is None:
            return module(**kwargs)
        assert isinstance(cache, CrossCache)
        with self._reader.at(kwargs.get("position_ids")):
            return module(**self._reader.arguments(kwargs, cache, of_decoder=module is not self.model))

    @torch.no_grad()
    def _check_trees(self, *, omits_prefix: bool) -> bool:
        """Whether two branches that grow together give what each gives alone.

        One leaves the trunk a token before its end, as after a rejection, and the end is run with both.
        """
        self.mask.omits_prefix = omits_prefix
        trunk, early, late = self._some_tokens(0, 8), self._some_tokens(8, 2), self._some_tokens(10, 2)
        first = [(8, ()), (7, (8,)), (8, (9,))]  # the last token of the trunk in slot 7, and the branches' first tokens
        second = [(7, (8, 10)), (8, (9, 11))]
        try:
            alone = [
                self.forward([*before, *branch], self.new_cache(), num_hidden=1)
                for before, branch in ((trunk[:7], early), (trunk, late))
            ]
            cache = self.new_cache()
            self.forward(trunk[:7], cache)
            mask = self.mask.build(num_trunk=8, num_slots=10, visible=first, positions=(7, 7, 8))
            self.forward([trunk[7], early[0], late[0]], cache, (7, 7, 8), mask)
            mask = self.mask.build(num_trunk=8, num_slots=12, visible=second, positions=(8, 9))
            together = self.forward([early[1], late[1]], cache, (8, 9), mask)
        except Exception as error:  # as above; ALiBi models and flash-attention raise here
            logger.info(f"The assistant does not take tree masks ({error!r}, {omits_prefix = }).")
            return False
        expected = torch.cat(alone).float()
        tolerance = (1e-3 if self.dtype == torch.float32 else 0.05) * expected.norm(dim=1)
        return bool(((together.float() - expected).norm(dim=1) <= tolerance).all())

    @torch.no_grad()
    def _check_packing(self) -> bool:
        """Whether tokens of two rows in one forward give what each gives alone."""
        rows = [self._some_tokens(0, 6), self._some_tokens(9, 4)]
        try:
            alone = [self.forward(row, self.new_cache(), num_hidden=2) for row in rows]
            forwards = [Forward(row[-2:], self.new_cache()) for row in rows]
            for row, each in zip(rows, forwards, strict=True):
                self.forward(row[:-2], each.cache)
            self.packs_rows = True
            together = self.forward_all(forwards)
        except Exception as error:  # as above
            logger.info(f"The assistant runs the rows of a batch one by one ({error!r}).")
            return False
        expected, found = torch.cat(alone).float(), torch.cat(together).float()
        tolerance = (1e-3 if self.dtype == torch.float32 else 0.05) * expected.norm(dim=1)
        return bool(((found - expected).norm(dim=1) <= tolerance).all())

    def _known(self, tokens: Sequence[int]) -> list[int]:
        # A token that only the target's longer vocabulary has stands for any other here: it costs acceptance, no more.
        return [token if token < self.vocab_size else 0 for token in tokens]

    def _some_tokens(self, first: int, count: int) -> list[int]:
        return [(7 * i + 1) % self.vocab_size for i in range(first, first + count)]

    @contextmanager
    def _attention(self, mask: torch.Tensor | dict[str, torch.Tensor] | None, num_slots: int) -> Iterator[None]:
        """Within it the model's attention is one that takes `mask`; the model may be the caller's own."""
        masks = [] if mask is None else list(mask.values()) if isinstance(mask, dict) else [mask]
        takes_masks = not masks or self.config._attn_implementation in MASKED_ATTENTION
        if takes_masks and all(each.shape[-1] == num_slots for each in masks):
            yield
            return
        with tree_attention.use(self.config):
            yield
