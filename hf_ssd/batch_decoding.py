"""Several rows decoded together, each at its own pace."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import CACHE_KEY, output_cache
from .eagle3 import FeatureWatch
from .kv_cache import (
    checked_cache,
    compact_rows,
    has_windows,
    keeps_everything,
    open_windows,
    roll_back,
    select_rows,
    start_recording,
    stop_recording,
)
from .protocol import DraftRequest
from .recorder import Recorder
from .row import Conductor, Decision, Link, Row, no_grad, round_stats
from .target_trees import counts_slots
from .tree_attention import own_attention
from .types import Speculation

# What a copy of the cache costs, in reads of it: each entry is read and written once, and lies in another place then.
COPY_READS = 3


class BatchDecoder:
    """Decodes several rows, with one forward of the target per round for all of them.

    Rows accept different numbers of tokens, and speculations differ in length. The cache has the same number of slots
    for every row, and a mask says which of them hold tokens of the row:

    ```
    row 0:  . . The cat sat on the mat        three draft tokens, all kept
    row 1:  A dog ran . . and it              one draft token was kept, two were not: holes
    row 2:  . Once upon a . . . time          none
    ```

    What is not kept becomes a *hole*, which attention does not see. Where all rows have one at the end the slots are
    dropped. Others are read in every round; once that has cost as much as a copy would, rows are moved together.
    Windows count slots, so with them rows are moved together after every round in which they came apart.

    Args:
        model: The target.
        rows: The rows.
        model_kwargs: Keyword arguments of the target's forward for all rows. Changed in place.
        recorder: Takes down what happens.
    """

    def __init__(
        self, model: PreTrainedModel, rows: Sequence[Row], *, model_kwargs: dict[str, Any], recorder: Recorder
    ) -> None:
        self.model = model
        self.rows = list(rows)
        self.model_kwargs = model_kwargs
        self.recorder = recorder
        self._watch = FeatureWatch(model)
        self._no_grad = no_grad(rows[0].config.return_dict_in_generate, model_kwargs)
        self._hole_reads = 0
        cache = model_kwargs.get(CACHE_KEY)
        self._has_windows = has_windows(cache)
        if self._has_windows:
            # Rows reach back differently far, so what lies before the window of one may be in that of another.
            open_windows(cache)

    def run(self, links: Sequence[Link], requests: Sequence[DraftRequest], conductor: Conductor | None = None) -> None:
        """Decodes until a stopping criterion holds for every row; the results are in the rows.

        Args:
            links: To the speculator of each row.
            requests: What these need.
            conductor: Decides after each round how the rows go on, where that may change.
        """
        self._conductor = conductor
        # Rows that are not done, in the order of the cache.
        self._active = list(zip(self.rows, links, strict=True))
        try:
            for link, request in zip(links, requests, strict=True):
                link.start(request)
            self._prefill()
            if conductor is not None:
                conductor.prefilled()
            while self._active:
                self._round()
        finally:
            for link in links:
                link.stop()
            cache = self.model_kwargs.get(CACHE_KEY)
            if cache is not None:
                stop_recording(cache)

    def _prefill(self) -> None:
        self._watch_layers()
        input_ids = torch.cat([row.input_ids for row, _ in self._active])
        mask = self.model_kwargs.get("attention_mask")
        self._mask = torch.ones_like(input_ids) if mask is None else mask
        with self.recorder.span("prefill", tokens=input_ids.shape[1]):
            with self._features.watch(), self._no_grad():
                outputs = self.model._prefill(input_ids, self.rows[0].config, self.model_kwargs)
            self._cache = checked_cache(output_cache(outputs), self.model)
            start_recording(self._cache)
            decisions = [
                row.decide(outputs.logits[index : index + 1, -1:], Speculation())
                for index, (row, _) in enumerate(self._active)
            ]
        self._send(decisions, [slice(-row.num_tokens, None) for row, _ in self._active])
        with self.recorder.span("emit"):
            for (row, _), decision in zip(self._active, decisions, strict=True):
                row.emit(decision)
            self._drop_rows_that_are_done()

    def _round(self) -> None:
        with self.recorder.span("wait") as wait:
            received = [link.receive() for _, link in self._active]
        self._watch_layers()
        speculations = [each.cut(row.num_wanted) for each, (row, _) in zip(received, self._active, strict=True)]
        with self.recorder.span("verify", tokens=sum(len(each) + 1 for each in speculations)) as verify:
            logits = self._forward(speculations)
            decisions = [
                row.decide(logits[index : index + 1, : len(speculation) + 1], speculation)
                for index, ((row, _), speculation) in enumerate(zip(self._active, speculations, strict=True))
            ]
        # Before anything else, so that the assistant works while the rest is done here.
        self._send(decisions, [[0, *(index + 1 for index in each.path)] for each in decisions], verify.ms)
        with self.recorder.span("emit"):
            num_kept, stats = [], []
            for index, (row, link) in enumerate(self._active):
                num_kept.append(row.emit(decisions[index]))
                stats.append(
                    round_stats(
                        row.index,
                        received[index],
                        speculations[index],
                        decisions[index],
                        num_kept[-1],
                        verify.ms,
                        wait.ms,
                        link.mode,
                    )
                )
                self.recorder.round(stats[-1])
            self._keep(num_kept)
            self._drop_rows_that_are_done()
        if self._conductor is not None and self._active:
            self._conductor.after_round(self._active, decisions, stats)

    def _watch_layers(self) -> None:
        layers = frozenset[int]().union(*(link.watched_layers for _, link in self._active))
        self._features = self._watch.of(layers)

    def _send(
        self,
        decisions: Sequence[Decision],
        slots: Sequence[Sequence[int] | slice],
        verify_ms: float | None = None,
    ) -> None:
        """Tells the outcomes; `slots` says which of the forward's tokens belong to each row now."""
        for index, ((row, link), decision) in enumerate(zip(self._active, decisions, strict=True)):
            link.send(row, decision, verify_ms, self._features.getter(index, slots[index]))

    def _forward(self, speculations: Sequence[Speculation]) -> torch.Tensor:
        """Runs the last token of every row and its draft tokens, the rows filled up to the same number of tokens.

        Effects: the cache has slots for all of them, which the mask gets in `_keep`.

        Returns:
            Logits of shape `(num_active, 1 + most draft tokens, vocab_size)`.
        """
        width = 1 + max(map(len, speculations))
        ids, positions, is_token = (
            torch.zeros((len(speculations), width), dtype=torch.long, device="cpu") for _ in range(3)
        )
        for index, ((row, _), speculation) in enumerate(zip(self._active, speculations, strict=True)):
            length = 1 + len(speculation)
            ids[index, :length] = torch.tensor([int(row.input_ids[0, -1]), *speculation.tokens], device="cpu")
            # What fills a row up stands where its last token does: no position is beyond what the model knows.
            positions[index] = row.num_tokens - 1 + torch.arange(width, device="cpu").clamp(max=length - 1)
            is_token[index, :length] = 1
        device = self._mask.device
        mask = torch.cat([self._mask, is_token.to(device, self._mask.dtype)], dim=1)
        others = {key: value for key, value in self.model_kwargs.items() if key not in _OF_THE_TOKENS}
        inputs = self.model.prepare_inputs_for_generation(
            ids.to(device),
            next_sequence_length=width,
            is_first_iteration=False,
            attention_mask=mask,
            position_ids=positions.to(device),
            **{**others, CACHE_KEY: self._cache},
        )
        inputs.pop("logits_to_keep", None)
        with self.model._optimize_model_for_decode(), self._features.watch(), self._no_grad():
            outputs = self.model(**inputs, return_dict=True)
        self._cache = checked_cache(output_cache(outputs), self.model)
        logits: torch.Tensor = outputs.logits
        return logits

    def _keep(self, num_kept: Sequence[int]) -> None:
        """Keeps the first `num_kept` of each row's new slots, and makes holes of the others."""
        most = max(num_kept)
        kept = torch.arange(most, device=self._mask.device) < torch.tensor(num_kept, device=self._mask.device)[:, None]
        with self._no_grad():
            num_new = self._cache.get_seq_length() - self._mask.shape[1]
            roll_back(self._cache, num_new - most)
            self._mask = torch.cat([self._mask, kept.to(self._mask.dtype)], dim=1)
            num_slots = self._mask.shape[1]
            self._hole_reads += num_slots - int(self._mask.sum(dim=1).max())
            is_due = min(num_kept) < most if self._has_windows else self._hole_reads > COPY_READS * num_slots
            if is_due:
                self._mask = compact_rows(self._cache, self._mask)
                self._hole_reads = 0

    def _drop_rows_that_are_done(self) -> None:
        left = [index for index, (row, _) in enumerate(self._active) if not row.is_done]
        if len(left) == len(self._active):
            return
        for index, (_, link) in enumerate(self._active):
            if index not in left:
                link.stop()
        self._active = [self._active[index] for index in left]
        if left:
            with self._no_grad():
                self._mask = select_rows(self._cache, self._mask, left)


_OF_THE_TOKENS = ("attention_mask", "position_ids", CACHE_KEY)


def decodes_together(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether the rows of a call can share a forward: masks, positions and cache are such that rows may have holes.

    Zeros of the mask must come first in each row, as padding on the left does: positions are counted from there.
    """
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE_KEY)
    positions = model_kwargs.get("position_ids")
    text_config = model.config.get_text_config(decoder=True)
    has_other_tensors = any(
        isinstance(value, torch.Tensor) and value.ndim > 0
        for key, value in model_kwargs.items()
        if key not in _OF_THE_TOKENS
    )
    return (
        not model.config.is_encoder_decoder
        and (mask is None or (mask.ndim == 2 and bool((mask.long().diff(dim=1) >= 0).all())))
        and (positions is None or positions.ndim == 2)
        and not has_other_tensors
        and (keeps_everything(cache) or (has_windows(cache) and not hasattr(text_config, "attention_chunk_size")))
        and not counts_slots(model)
        and own_attention(text_config) in ("eager", "sdpa")
        and "position_ids" in inspect.signature(model.forward).parameters
    )
