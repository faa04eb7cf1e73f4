"""The verifier's side: prefill, then rounds of speculation, verification and emission."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import CACHE_KEY, extend_model_kwargs, output_cache
from .decoders import argument
from .eagle3 import FeatureWatch
from .kv_cache import checked_cache, keep_branch, keeps_everything, roll_back, start_recording, stop_recording
from .protocol import DraftRequest
from .recorder import Recorder
from .row import Conductor, Link, Row, no_grad, round_stats
from .streaming import RoundStreamer
from .target_trees import Masks, attention_for, masks_of, tree_inputs
from .types import Speculation


class RowDecoder:
    """Decodes one row.

    Args:
        model: The target.
        row: The row.
        model_kwargs: Keyword arguments of the target's forward, for this row. Changed in place.
        recorder: Takes down what happens.
    """

    def __init__(self, model: PreTrainedModel, row: Row, *, model_kwargs: dict[str, Any], recorder: Recorder) -> None:
        self.model = model
        self.row = row
        self.model_kwargs = model_kwargs
        self.recorder = recorder
        config = row.config
        self._watch = FeatureWatch(model)
        self._no_grad = no_grad(config.return_dict_in_generate, model_kwargs)
        wants = config.return_dict_in_generate
        self.attentions: tuple[Any, ...] | None = () if wants and config.output_attentions else None
        self.hidden_states: tuple[Any, ...] | None = () if wants and config.output_hidden_states else None
        has_encoder = model.config.is_encoder_decoder
        self.cross_attentions: tuple[Any, ...] | None = () if has_encoder and self.attentions is not None else None

    @cached_property
    def _masks(self) -> Masks:
        """The masks that the target gets for a speculation."""
        mask = self.model_kwargs.get(argument(self.model, "attention_mask"))
        is_plain = (mask is None or mask.ndim == 2) and self.attentions is None
        if not is_plain or not keeps_everything(self.model_kwargs.get(CACHE_KEY)):
            return Masks.OWN
        return masks_of(self.model)

    @property
    def takes_trees(self) -> bool:
        """Whether a speculation may be a tree: nothing is drawn, or needs entries in the order of a chain."""
        return not self.row.draws and self.hidden_states is None and self._masks is not Masks.OWN

    def run(self, link: Link, request: DraftRequest, conductor: Conductor | None = None) -> None:
        """Decodes until a stopping criterion holds; the result is in the row and the attributes here.

        Args:
            link: To the speculator.
            request: What that needs.
            conductor: Decides after each round how the row goes on, where that may change.
        """
        self._link, self._conductor = link, conductor
        self._is_drafting = link.is_drafting or conductor is not None
        try:
            link.start(request)
            self._prefill()
            if conductor is not None:
                conductor.prefilled()
            while not self.row.is_done:
                self._round()
        finally:
            link.stop()
            cache = self.model_kwargs.get(CACHE_KEY)
            if cache is not None:
                stop_recording(cache)

    def _prefill(self) -> None:
        self._features = self._watch.of(self._link.watched_layers)
        with self.recorder.span("prefill", tokens=self.row.input_ids.shape[1]):
            with self._features.watch(), self._no_grad():
                outputs = self.model._prefill(self.row.input_ids, self.row.config, self.model_kwargs)
            if self._is_drafting:
                start_recording(checked_cache(output_cache(outputs), self.model))
            decision = self.row.decide(outputs.logits[:, -1:], Speculation())
        self._link.send(self.row, decision, features=self._features.getter(0, slice(-self.row.num_tokens, None)))
        with self.recorder.span("emit"):
            num_emitted = self.row.emit(decision)
            self._keep_outputs(outputs, num_emitted, is_prefill=True)
            self._advance(outputs, num_emitted)

    def _round(self) -> None:
        with self.recorder.span("wait") as wait:
            received = self._link.receive()
        self._features = self._watch.of(self._link.watched_layers)
        # What could not be emitted any more is dropped.
        speculation = received.cut(self.row.num_wanted)
        with self.recorder.span("verify", tokens=len(speculation) + 1) as verify:
            outputs = self._forward(speculation)
            decision = self.row.decide(outputs.logits[:, -len(speculation) - 1 :], speculation)
        # Before anything else, so that the assistant works while the rest is done here.
        features = self._features.getter(0, [0, *(index + 1 for index in decision.path)])
        self._link.send(self.row, decision, verify.ms, features)
        with self.recorder.span("emit"):
            num_emitted = self.row.emit(decision)
            cache = output_cache(outputs)
            assert cache is not None
            with self._no_grad():
                if not self._is_drafting:
                    pass  # nothing is ever taken back
                elif speculation.is_chain:
                    roll_back(cache, len(speculation) + 1 - num_emitted)
                else:
                    num_before = cache.get_seq_length() - len(speculation) - 1
                    slots = [0, *(index + 1 for index in decision.path)][:num_emitted]
                    keep_branch(cache, num_before, [num_before + slot for slot in slots])
            self._keep_outputs(outputs, num_emitted)
            self._advance(outputs, num_emitted)
        stats = round_stats(
            self.row.index, received, speculation, decision, num_emitted, verify.ms, wait.ms, self._link.mode
        )
        self.recorder.round(stats)
        if isinstance(self.row.streamer, RoundStreamer):
            self.row.streamer.put_round(stats)
        if self._conductor is not None and not self.row.is_done:
            self._conductor.after_round([(self.row, self._link)], [decision], [stats])

    def _forward(self, speculation: Speculation) -> Any:
        draft = self.row.input_ids.new_tensor([speculation.tokens])
        candidate_ids = torch.cat([self.row.input_ids, draft], dim=1)
        inputs = self.model.prepare_inputs_for_generation(
            candidate_ids,
            next_sequence_length=len(speculation) + 1,
            is_first_iteration=False,
            **extend_model_kwargs(
                self.model_kwargs, len(speculation), candidate_ids.shape[1], self.model.config.is_encoder_decoder
            ),
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = len(speculation) + 1
        masks = self._masks
        if masks is Masks.TAIL or not speculation.is_chain:
            inputs = tree_inputs(self.model, inputs, speculation, masks)
        attention = attention_for(self.model, inputs)
        with self.model._optimize_model_for_decode(), self._features.watch(), self._no_grad(), attention as inputs:
            return self.model(**inputs, return_dict=True)

    def _keep_outputs(self, outputs: Any, num_emitted: int, is_prefill: bool = False) -> None:
        """Collects hidden states and attentions, one entry per token as from plain decoding."""
        if self.hidden_states is not None:
            states = outputs.get(argument(self.model, "hidden_states"))
            self.hidden_states += (states,) if is_prefill else tuple(
                tuple(layer[:, i : i + 1] for layer in states) for i in range(num_emitted)
            )  # fmt: skip
        if self.cross_attentions is not None:
            weights = outputs.cross_attentions
            self.cross_attentions += (weights,) if is_prefill else tuple(
                tuple(layer[:, :, i : i + 1] for layer in weights) for i in range(num_emitted)
            )  # fmt: skip
        if self.attentions is not None:
            weights = outputs.get(argument(self.model, "attentions"))
            if is_prefill or not weights or weights[0] is None:  # as under sdpa, which has none to give
                self.attentions += (weights,) * num_emitted
                return
            num_later = weights[0].shape[2] - 1  # draft tokens that the first one does not see
            self.attentions += tuple(
                tuple(layer[:, :, i : i + 1, : layer.shape[3] - num_later + i] for layer in weights)
                for i in range(num_emitted)
            )

    def _advance(self, outputs: Any, num_emitted: int) -> None:
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs,
            self.model_kwargs,
            is_encoder_decoder=self.model.config.is_encoder_decoder,
            num_new_tokens=num_emitted,
        )
