"""The verifier's side: prefill, then rounds of speculation, verification and emission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .compat import CACHE_KEY, extend_model_kwargs, output_cache
from .config import Rule
from .kv_cache import keep_branch, roll_back, start_recording, stop_recording
from .noise import GumbelNoise, derive_seed
from .protocol import DraftRequest, Speculator, SpeculatorError
from .recorder import Recorder
from .sampling import check_scores, looks_only_at_scores
from .target_trees import Masks, attention_for, keeps_everything, masks_of, tree_inputs
from .types import Outcome, RoundStats, Speculation, Verdict
from .verification import follow_tree, verify_block, verify_coupled, verify_token

logger = logging.get_logger(__name__)

VERIFIER = 2**32 - 1  # no row of a batch


class RowDecoder:
    """Decodes one row of a batch.

    Args:
        model: The target.
        input_ids: Prompt of shape `(1, prompt_length)`.
        generation_config: As `generate()` prepared it.
        logits_processor: As `generate()` prepared it.
        stopping_criteria: As `generate()` prepared it.
        model_kwargs: Keyword arguments of the target's forward, for this row. Changed in place.
        streamer: Gets each token as soon as it is final, one at a time as from plain `generate()`.
        recorder: Takes down what happens.
        rule: How sampled tokens are verified.
        seed: Seed of the row's samples.
        row: Index of the row in its batch, which processors and criteria with a memory of the batch go by.
        num_rows: Size of that batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        model_kwargs: dict[str, Any],
        recorder: Recorder,
        rule: Rule = "coupled",
        seed: int = 0,
        streamer: BaseStreamer | None = None,
        row: int = 0,
        num_rows: int = 1,
    ) -> None:
        self.model = model
        self.input_ids = input_ids
        self.config = generation_config
        self.processors = logits_processor
        self.criteria = stopping_criteria
        self.model_kwargs = model_kwargs
        self.recorder = recorder
        self.streamer = streamer
        self.row, self.num_rows = row, num_rows
        self.seed = seed
        self.num_padding = _count_padding(model_kwargs.get("attention_mask"), input_ids)
        self.rule = rule
        is_coupled = generation_config.do_sample and rule == "coupled"
        self._noise = GumbelNoise(seed) if is_coupled else None
        # Not the assistant's draws once more.
        self._generator = torch.Generator(input_ids.device).manual_seed(derive_seed(seed, VERIFIER))
        self.is_done = False
        # A twentieth faster on a small model. Its tensors would be a nuisance to a caller, so only where none is handed
        # out.
        is_private = not (
            generation_config.return_dict_in_generate or getattr(model_kwargs.get(CACHE_KEY), "_is_user_defined", False)
        )
        self._no_grad = torch.inference_mode if is_private else torch.no_grad
        wants = generation_config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if wants and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wants and generation_config.output_logits else None
        self.attentions: tuple[Any, ...] | None = () if wants and generation_config.output_attentions else None
        self.hidden_states: tuple[Any, ...] | None = () if wants and generation_config.output_hidden_states else None

    @property
    def _draws(self) -> bool:
        """Whether tokens are drawn once the drafts are known. Otherwise the target's choices are fixed before."""
        return self.config.do_sample and self.rule != "coupled"

    @cached_property
    def _eos_ids(self) -> frozenset[int]:
        eos = self.config._eos_token_tensor
        return frozenset() if eos is None else frozenset(eos.flatten().tolist())

    @cached_property
    def _masks(self) -> Masks:
        """The masks that the target gets for a speculation."""
        mask = self.model_kwargs.get("attention_mask")
        is_plain = (mask is None or mask.ndim == 2) and self.attentions is None
        if not is_plain or not keeps_everything(self.model_kwargs.get(CACHE_KEY)):
            return Masks.OWN
        return masks_of(self.model)

    @property
    def takes_trees(self) -> bool:
        """Whether a speculation may be a tree: nothing is drawn, or needs entries in the order of a chain."""
        return not self._draws and self.hidden_states is None and self._masks is not Masks.OWN

    def run(
        self, speculator: Speculator | None, request: DraftRequest | None, on_degrade: Callable[[], None] = lambda: None
    ) -> None:
        """Decodes until a stopping criterion holds; the result is in `input_ids` and the attributes beside it.

        Args:
            speculator: Drafts; without one every round gives one token.
            request: What the speculator needs; given with it.
            on_degrade: Called if the speculator fails, before the row goes on without it.
        """
        self._speculator, self._on_degrade = speculator, on_degrade
        try:
            if self._speculator is not None and request is not None:
                # The assistant reads the prompt while the target does.
                self._ask(lambda: self._speculator.start(request))  # type: ignore[union-attr]
            self._prefill()
            while not self.is_done:
                self._round()
        finally:
            if self._speculator is not None:
                self._ask(self._speculator.stop)
            cache = self.model_kwargs.get(CACHE_KEY)
            if cache is not None:
                stop_recording(cache)

    def _prefill(self) -> None:
        with self.recorder.span("prefill", tokens=self.input_ids.shape[1]):
            with self._no_grad():
                outputs = self.model._prefill(self.input_ids, self.config, self.model_kwargs)
            cache = output_cache(outputs)
            if cache is None or not cache.is_croppable:
                raise ValueError(
                    f"The cache of {type(self.model).__name__} ({type(cache).__name__}) cannot be rolled back, which "
                    "drafting needs. "
                    'Leave `cache_implementation` unset, or use `ssd_config={"mode": "ar"}`.'
                )
            start_recording(cache)
            verdict, scores, logits = self._decide(outputs.logits[:, -1:], Speculation())
        tokens = [int(verdict.bonus_tokens)]
        self._send(0, tokens)
        with self.recorder.span("emit"):
            num_emitted = self._emit(tokens, scores, logits)
            self._keep_outputs(outputs, num_emitted, is_prefill=True)
            self._advance(outputs, num_emitted)

    def _round(self) -> None:
        with self.recorder.span("wait") as wait:
            received = self._receive()
        # What could not be emitted any more is dropped.
        speculation = received.cut(max(self.config.max_length - self.input_ids.shape[1] - 1, 0))
        with self.recorder.span("verify", tokens=len(speculation) + 1) as verify:
            outputs = self._forward(speculation)
            logits = outputs.logits[:, -len(speculation) - 1 :]
            if speculation.is_chain:
                verdict, scores, logits = self._decide(logits, speculation)
                path = tuple(range(int(verdict.num_accepted)))
                bonus_token = int(verdict.bonus_tokens)
            else:
                path, bonus_token, scores, logits = self._decide_tree(logits, speculation)
            tokens = [*(speculation.tokens[index] for index in path), bonus_token]
        # Before anything else, so that the assistant works while the rest is done here.
        node = path[-1] + 1 if path else 0
        self._send(node, tokens, verify.ms)
        with self.recorder.span("emit"):
            num_emitted = self._emit(tokens, scores, logits)
            cache = output_cache(outputs)
            assert cache is not None
            with self._no_grad():
                if speculation.is_chain:
                    roll_back(cache, len(speculation) + 1 - num_emitted)
                else:
                    num_before = cache.get_seq_length() - len(speculation) - 1
                    slots = [0, *(index + 1 for index in path)][:num_emitted]
                    keep_branch(cache, num_before, [num_before + slot for slot in slots])
            self._keep_outputs(outputs, num_emitted)
            self._advance(outputs, num_emitted)
        self.recorder.rounds.append(
            RoundStats(
                num_draft_tokens=len(speculation),
                num_accepted=len(path),
                num_reached=len(path) + (node - 1 in speculation.parents),
                num_emitted=num_emitted,
                origin=received.origin,
                miss=received.miss,
                depth=received.depth,
                verify_ms=verify.ms,
                wait_ms=wait.ms,
                draft_ms=received.draft_ms,
                num_draft_steps=received.num_draft_steps,
            )
        )

    # The speculator, which may fail

    def _ask(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except SpeculatorError as error:
            if self.recorder.degraded is None:
                logger.warning(f"Generation goes on without the assistant, more slowly: {error}")
                self.recorder.degraded = str(error)
            self._speculator = None
            self._on_degrade()
            return None

    def _send(self, node: int, tokens: Sequence[int], verify_ms: float | None = None) -> None:
        """Tells the outcome, unless these tokens certainly end the row and the answer would be for nothing."""
        is_full = self.input_ids.shape[1] + len(tokens) >= self.config.max_length
        is_end = is_full or not self._eos_ids.isdisjoint(tokens)
        if self._speculator is not None and not is_end:
            outcome = Outcome(node, tokens[-1])
            self._ask(lambda: self._speculator.resolve(outcome, verify_ms))  # type: ignore[union-attr]

    def _receive(self) -> Speculation:
        if self._speculator is None:
            return Speculation()
        speculation: Speculation = self._ask(self._speculator.receive) or Speculation()
        self.recorder.speculator_spans += speculation.spans
        return speculation

    # The target

    def _forward(self, speculation: Speculation) -> Any:
        draft = self.input_ids.new_tensor([speculation.tokens])
        candidate_ids = torch.cat([self.input_ids, draft], dim=1)
        inputs = self.model.prepare_inputs_for_generation(
            candidate_ids,
            next_sequence_length=len(speculation) + 1,
            is_first_iteration=False,
            **extend_model_kwargs(self.model_kwargs, len(speculation), candidate_ids.shape[1]),
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = len(speculation) + 1
        masks = self._masks
        if masks is Masks.TAIL or not speculation.is_chain:
            inputs = tree_inputs(inputs, speculation, masks, self.model.dtype)
        with self.model._optimize_model_for_decode(), self._no_grad(), attention_for(self.model, inputs):
            return self.model(**inputs, return_dict=True)

    def _decide(self, raw_logits: torch.Tensor, speculation: Speculation) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
        """Verifies; returns the verdict, and scores and raw logits of shape `(1, num_draft_tokens + 1, vocab_size)`."""
        logits, scores = self._logits_and_scores(raw_logits)
        draft = self.input_ids.new_tensor([speculation.tokens]).view(1, len(speculation))
        if not self._draws:
            scores, choice_scores = self._process(scores, draft)
            verdict = verify_coupled(choice_scores, draft)
        else:
            draft_probs = speculation.draft_probs
            ends = [i for i, token in enumerate(speculation.tokens) if token in self._eos_ids]
            if ends:
                # After the end of the text there is nothing to be right about.
                draft = draft[:, : ends[0] + 1]
                draft_probs = None if draft_probs is None else draft_probs[: ends[0] + 1]
            scores, _ = self._process(scores, draft)
            probs = scores[:, : draft.shape[1] + 1].softmax(dim=-1)
            # Rows that are no distribution come after a token that cannot be accepted, or else are found below.
            probs = probs.nan_to_num_(nan=1.0)
            q = None if draft_probs is None or not draft.shape[1] else draft_probs[None].to(probs.device)
            verify = verify_block if self.rule == "block" else verify_token
            verdict = verify(probs, q, draft, self._generator)
        if self.config.do_sample:
            accepted = slice(int(verdict.num_accepted) + 1)
            check_scores(raw_logits[0, accepted], scores[0, accepted], self.input_ids.shape[1])
        return verdict, scores, logits

    def _decide_tree(
        self, raw_logits: torch.Tensor, speculation: Speculation
    ) -> tuple[tuple[int, ...], int, torch.Tensor, torch.Tensor]:
        """Follows the target's choices down a tree.

        Returns:
            Indices of the accepted draft tokens, the bonus token, and scores and raw logits of shape
            `(1, num_accepted + 1, vocab_size)`.
        """
        logits, scores = self._logits_and_scores(raw_logits)
        is_together = looks_only_at_scores(self.processors)
        depths = (0, *speculation.depths)
        if is_together:
            scores, choice_scores = self._process(scores, self.input_ids.new_empty((1, 0)), depths)
            choices = choice_scores[0].argmax(dim=-1).tolist()
        else:
            choices = scores[0].argmax(dim=-1).tolist()

        def choose(node: int, path: tuple[int, ...]) -> int:
            tokens = [speculation.tokens[index] for index in path]
            # After its end the text needs no processors: they might not know what to say.
            if not is_together and self._eos_ids.isdisjoint(tokens):
                prefix = torch.cat([self.input_ids, self.input_ids.new_tensor([tokens])], dim=1)
                scores[:, node + 1] = self._for_row(self.processors, prefix, scores[:, node + 1].clone())
                choices[node + 1] = int(self._with_noise(scores[:, node + 1], [len(path)]).argmax())
            return int(choices[node + 1])

        path, bonus_token = follow_tree(choose, speculation.tokens, speculation.parents)
        rows = [0, *(index + 1 for index in path)]
        if self.config.do_sample:
            check_scores(raw_logits[0, rows], scores[0, rows], self.input_ids.shape[1])
        return path, bonus_token, scores[:, rows], logits[:, rows]

    def _logits_and_scores(self, raw_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits in float32, and what processors may work on in place."""
        logits = raw_logits.to(dtype=torch.float32, device=self.input_ids.device, copy=True)
        return logits, logits.clone() if self.logits is not None and self.processors else logits

    def _process(
        self, scores: torch.Tensor, draft: torch.Tensor, depths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores after all processors, and those that the target's choice is the largest of.

        Args:
            scores: Logits of shape `(1, num_nodes, vocab_size)`.
            draft: The tokens between them, for a chain.
            depths: For each node the number of draft tokens up to it; that of a chain by default.
        """
        if looks_only_at_scores(self.processors):
            if self.processors:
                no_prefix = self.input_ids.new_empty((scores.shape[1], 0))
                scores = self.processors(no_prefix, scores[0])[None]
            depths = range(scores.shape[1]) if depths is None else depths
            return scores, self._with_noise(scores[0], depths)[None]
        processed = scores.clone()
        choice_scores = scores.clone() if self._noise is not None else processed
        for i in range(draft.shape[1] + 1):
            prefix = torch.cat([self.input_ids, draft[:, :i]], dim=1)
            processed[:, i] = self._for_row(self.processors, prefix, scores[:, i])
            if self._noise is not None:
                choice_scores[:, i] = self._with_noise(processed[:, i], [i])
            if i == draft.shape[1]:
                break
            # Where the draft token is certainly rejected or ends the text, nothing after it counts. So processors need
            # not know what to say about it: a grammar may raise on a prefix that breaks it, or goes on after its end.
            token = draft[0, i]
            if self._draws:
                is_last = processed[0, i, token] == float("-inf")
            else:
                is_last = choice_scores[0, i].argmax() != token
            if bool(is_last) or int(token) in self._eos_ids:
                break
        return processed, choice_scores

    def _with_noise(self, scores: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """Scores of shape `(num_nodes, vocab_size)`, with the noise of the token after each node."""
        if self._noise is None:
            return scores
        position = self.input_ids.shape[1] - self.num_padding
        return self._noise.add_to(scores, [position + depth for depth in depths])

    def _for_row(self, processors: LogitsProcessorList, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Some go by the row's index in the batch, such as `prefix_allowed_tokens_fn`; show them a whole batch.
        batch = processors(prefix.expand(self.num_rows, -1), scores.repeat(self.num_rows, 1))
        return batch[self.row : self.row + 1]

    # The output

    def _emit(self, tokens: Sequence[int], scores: torch.Tensor, logits: torch.Tensor) -> int:
        """Appends tokens one by one, as plain decoding would, until one stops it. Returns how many that were."""
        for i, token in enumerate(tokens):
            new = self.input_ids.new_tensor([token])
            self.input_ids = torch.cat([self.input_ids, new[None]], dim=1)
            self.recorder.token()
            if self.scores is not None:
                self.scores += (scores[:, i],)
            if self.logits is not None:
                self.logits += (logits[:, i],)
            ids = self.input_ids.expand(self.num_rows, -1)
            self.is_done = bool(self.criteria(ids, self.scores)[self.row])
            if self.streamer is not None:
                self.streamer.put(new.cpu())
            if self.is_done:
                return i + 1
        return len(tokens)

    def _keep_outputs(self, outputs: Any, num_emitted: int, is_prefill: bool = False) -> None:
        """Collects hidden states and attentions, one entry per token as from plain decoding."""
        if self.hidden_states is not None:
            states = outputs.hidden_states
            self.hidden_states += (states,) if is_prefill else tuple(
                tuple(layer[:, i : i + 1] for layer in states) for i in range(num_emitted)
            )  # fmt: skip
        if self.attentions is not None:
            weights = outputs.attentions
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
            outputs, self.model_kwargs, is_encoder_decoder=False, num_new_tokens=num_emitted
        )


def _count_padding(mask: torch.Tensor | None, input_ids: torch.Tensor) -> int:
    """Number of leading padding tokens of a row."""
    if mask is None or mask.ndim != 2 or mask.shape[1] != input_ids.shape[1]:
        return 0
    return int((mask[0].cumsum(0) == 0).sum())
