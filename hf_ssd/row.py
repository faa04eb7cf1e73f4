"""One row of a call: which of its draft tokens are kept, what is emitted, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .compat import CACHE_KEY
from .config import Rule
from .eagle3 import FeatureBacklog, FeatureGetter
from .noise import GumbelNoise, derive_seed
from .protocol import DraftRequest, Speculator, SpeculatorError
from .recorder import Recorder
from .sampling import find_fault, looks_only_at_scores
from .types import ConcreteMode, Outcome, Plan, RoundStats, Speculation
from .verification import follow_tree, verify_block, verify_coupled, verify_token

logger = logging.get_logger(__name__)

VERIFIER = 2**32 - 1  # no row of a batch
NO_TOKEN = -1  # where a logits processor failed

Fault = tuple[int, Exception]


@dataclass(frozen=True)
class Decision:
    """What the target makes of a speculation.

    Args:
        path: Indices of the draft tokens that are kept, in order.
        tokens: The kept tokens and the bonus token.
        scores: After all logits processors, of shape `(1, len(tokens), vocab_size)` or longer.
        logits: The same before.
        fault: Which of the tokens there is none for after all, and why: only an error if the row comes so far.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: torch.Tensor
    logits: torch.Tensor
    fault: Fault | None = None

    @property
    def node(self) -> int:
        """The last draft token that is kept, counted from 1, as in [`Outcome`]."""
        return self.path[-1] + 1 if self.path else 0


class Row:
    """One row of a batch, without the models.

    Args:
        input_ids: Prompt of shape `(1, prompt_length)`, left padding included.
        num_padding: Number of leading padding tokens.
        generation_config: As `generate()` prepared it.
        logits_processor: As `generate()` prepared it.
        stopping_criteria: As `generate()` prepared it.
        recorder: Counts the tokens.
        rule: How sampled tokens are verified.
        seed: Seed of the row's samples.
        streamer: Gets each token as soon as it is final, one at a time as from plain `generate()`.
        index: Index of the row in its batch, which processors and criteria with a memory of the batch go by.
        num_rows: Size of that batch.

    Attributes:
        input_ids: Grows by what is emitted.
        is_done: Whether a stopping criterion holds.
        scores: Collected for the output, where they are asked for.
        logits: The same.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        *,
        num_padding: int,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        recorder: Recorder,
        rule: Rule = "coupled",
        seed: int = 0,
        streamer: BaseStreamer | None = None,
        index: int = 0,
        num_rows: int = 1,
    ) -> None:
        self.input_ids = input_ids
        self.num_padding = num_padding
        self.config = generation_config
        self.processors = logits_processor
        self.criteria = stopping_criteria
        self.recorder = recorder
        self.rule = rule
        self.seed = seed
        self.streamer = streamer
        self.index, self.num_rows = index, num_rows
        self.is_done = False
        is_coupled = generation_config.do_sample and rule == "coupled"
        self._noise = GumbelNoise(seed) if is_coupled else None
        # Not the assistant's draws once more.
        self._generator = torch.Generator(input_ids.device).manual_seed(derive_seed(seed, VERIFIER))
        wants = generation_config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if wants and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wants and generation_config.output_logits else None

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn once the drafts are known. Otherwise the target's choices are fixed before."""
        return self.config.do_sample and self.rule != "coupled"

    @property
    def num_wanted(self) -> int:
        """Draft tokens that may still be emitted, the bonus token after them left out."""
        return max(self.config.max_length - self.input_ids.shape[1] - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, padding not counted."""
        return self.input_ids.shape[1] - self.num_padding

    @cached_property
    def _eos_ids(self) -> frozenset[int]:
        eos = self.config._eos_token_tensor
        return frozenset() if eos is None else frozenset(eos.flatten().tolist())

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens certainly end the row."""
        return self.input_ids.shape[1] + len(tokens) >= self.config.max_length or not self._eos_ids.isdisjoint(tokens)

    def decide(self, raw_logits: torch.Tensor, speculation: Speculation) -> Decision:
        """Verifies.

        Args:
            raw_logits: The target's, after the last token and after each draft token, of shape
                `(1, num_draft_tokens + 1, vocab_size)`.
            speculation: The draft tokens.
        """
        return (self._decide_chain if speculation.is_chain else self._decide_tree)(raw_logits, speculation)

    def _decide_chain(self, raw_logits: torch.Tensor, speculation: Speculation) -> Decision:
        logits, scores = self._logits_and_scores(raw_logits)
        draft = self.input_ids.new_tensor([speculation.tokens]).view(1, len(speculation))
        if self.draws:
            # After the end of the text there is nothing to be right about.
            ends = [index for index, token in enumerate(speculation.tokens) if token in self._eos_ids]
            draft = draft[:, : ends[0] + 1] if ends else draft
        scores, choice_scores, fault = self._process(scores, draft)
        if fault is not None:
            draft = draft[:, : fault[0]]
        length = draft.shape[1]
        if not self.draws:
            verdict = verify_coupled(choice_scores[:, : length + 1], draft)
        else:
            # Rows that are no distribution come after a token that cannot be accepted, or else are found below.
            probs = scores[:, : length + 1].softmax(dim=-1).nan_to_num_(nan=1.0)
            q = speculation.draft_probs
            q = None if q is None or not length else q[None, :length].to(probs.device)
            verify = verify_block if self.rule == "block" else verify_token
            verdict = verify(probs, q, draft, self._generator)
        path = tuple(range(int(verdict.num_accepted)))
        tokens = (*speculation.tokens[: len(path)], int(verdict.bonus_tokens))
        accepted = slice(len(tokens))
        return Decision(path, tokens, scores, logits, self._first(fault, raw_logits[0, accepted], scores[0, accepted]))

    def _decide_tree(self, raw_logits: torch.Tensor, speculation: Speculation) -> Decision:
        """Follows the target's choices down a tree."""
        logits, scores = self._logits_and_scores(raw_logits)
        is_together = looks_only_at_scores(self.processors)
        depths = (0, *speculation.depths)
        if is_together:
            scores, choice_scores, _ = self._process(scores, self.input_ids.new_empty((1, 0)), depths)
            choices = choice_scores[0].argmax(dim=-1).tolist()
        else:
            choices = scores[0].argmax(dim=-1).tolist()
        faults: list[Fault] = []

        def choose(node: int, path: tuple[int, ...]) -> int:
            tokens = [speculation.tokens[index] for index in path]
            # After its end the text needs no processors: they might not know what to say.
            if not is_together and self._eos_ids.isdisjoint(tokens):
                prefix = torch.cat([self.input_ids, self.input_ids.new_tensor([tokens])], dim=1)
                try:
                    scores[:, node + 1] = self._for_row(self.processors, prefix, scores[:, node + 1].clone())
                except Exception as error:  # a caller's own code, perhaps about a text that ends before
                    if not path:
                        raise
                    faults.append((len(path), error))
                    return NO_TOKEN
                choices[node + 1] = int(self._with_noise(scores[:, node + 1], [len(path)]).argmax())
            return int(choices[node + 1])

        path, bonus_token = follow_tree(choose, speculation.tokens, speculation.parents)
        rows = [0, *(index + 1 for index in path)]
        tokens = (*(speculation.tokens[index] for index in path), bonus_token)
        fault = self._first(faults[0] if faults else None, raw_logits[0, rows], scores[0, rows])
        return Decision(path, tokens, scores[:, rows], logits[:, rows], fault)

    def _first(self, fault: Fault | None, raw_logits: torch.Tensor, scores: torch.Tensor) -> Fault | None:
        """That fault, or an earlier one in what is sampled from."""
        found = find_fault(raw_logits, scores, self.num_tokens) if self.config.do_sample else None
        return min((each for each in (found, fault) if each is not None), key=lambda each: each[0], default=None)

    def _logits_and_scores(self, raw_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits in float32, and what processors may work on in place."""
        logits = raw_logits.to(dtype=torch.float32, device=self.input_ids.device, copy=True)
        return logits, logits.clone() if self.logits is not None and self.processors else logits

    def _process(
        self, scores: torch.Tensor, draft: torch.Tensor, depths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Fault | None]:
        """The scores after all processors, those that the target's choice is the largest of, and where it failed.

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
            return scores, self._with_noise(scores[0], depths)[None], None
        processed = scores.clone()
        choice_scores = scores.clone() if self._noise is not None else processed
        for i in range(draft.shape[1] + 1):
            prefix = torch.cat([self.input_ids, draft[:, :i]], dim=1)
            try:
                processed[:, i] = self._for_row(self.processors, prefix, scores[:, i])
            except Exception as error:  # a caller's own code, perhaps about a text that ends before
                if i == 0:
                    raise
                return processed, choice_scores, (i, error)
            if self._noise is not None:
                choice_scores[:, i] = self._with_noise(processed[:, i], [i])
            if i == draft.shape[1]:
                break
            # Where the draft token is certainly rejected or ends the text, nothing after it counts. So processors need
            # not know what to say about it: a grammar may raise on a prefix that breaks it, or goes on after its end.
            token = draft[0, i]
            if self.draws:
                is_last = processed[0, i, token] == float("-inf")
            else:
                is_last = choice_scores[0, i].argmax() != token
            if bool(is_last) or int(token) in self._eos_ids:
                break
        return processed, choice_scores, None

    def _with_noise(self, scores: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """Scores of shape `(num_nodes, vocab_size)`, with the noise of the token after each node."""
        if self._noise is None:
            return scores
        return self._noise.add_to(scores, [self.num_tokens + depth for depth in depths])

    def _for_row(self, processors: LogitsProcessorList, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Some go by the row's index in the batch, such as `prefix_allowed_tokens_fn`; show them a whole batch.
        batch = processors(prefix.expand(self.num_rows, -1), scores.repeat(self.num_rows, 1))
        return batch[self.index : self.index + 1]

    def emit(self, decision: Decision) -> int:
        """Appends tokens one by one, as plain decoding would, until one stops it. Returns how many that were.

        Raises:
            ValueError: If sampling comes to scores that no token can be sampled from.
        """
        for i, token in enumerate(decision.tokens):
            if decision.fault is not None and decision.fault[0] == i:
                raise decision.fault[1]
            new = self.input_ids.new_tensor([token])
            self.input_ids = torch.cat([self.input_ids, new[None]], dim=1)
            self.recorder.token()
            if self.scores is not None:
                self.scores += (decision.scores[:, i],)
            if self.logits is not None:
                self.logits += (decision.logits[:, i],)
            ids = self.input_ids.expand(self.num_rows, -1)
            self.is_done = bool(self.criteria(ids, self.scores)[self.index])
            if self.streamer is not None:
                self.streamer.put(new.cpu())
            if self.is_done:
                return i + 1
        return len(decision.tokens)


class Link:
    """A row's way to its speculator, which may fail: the row then goes on without it.

    Args:
        speculator: Drafts; without one every speculation is empty.
        recorder: Takes down why it failed, and what it did.
        on_degrade: Called when it has failed, with the number of its assistant.
        plan: Of the row's rounds, where that changes.
        feature_layers: Which of the target's states each assistant reads, where plans may name it.

    Attributes:
        mode: Of the plan; `None` without one.
    """

    def __init__(
        self,
        speculator: Speculator | None,
        recorder: Recorder,
        on_degrade: Callable[[int], None] = lambda assistant: None,
        plan: Plan | None = None,
        feature_layers: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._speculator = speculator
        self._recorder = recorder
        self._on_degrade = on_degrade
        self._assistant = 0 if plan is None else plan.assistant
        self.mode: ConcreteMode | None = None if plan is None else plan.mode
        self._feature_layers: tuple[int, ...] = ()
        self._backlogs = {number: FeatureBacklog(ids) for number, ids in enumerate(feature_layers) if ids}
        self._is_fresh = False  # begun where the row is, and told no outcome since

    @property
    def is_drafting(self) -> bool:
        """Whether there is a speculator, which has not failed."""
        return self._speculator is not None

    @property
    def watched_layers(self) -> frozenset[int]:
        """Which of the target's states the speculator wants to know, or another one if it is asked later."""
        own = self._feature_layers if self.is_drafting else ()
        return frozenset(own).union(*(each.layer_ids for each in self._backlogs.values()))

    def start(self, request: DraftRequest) -> None:
        """Begins the row: the assistant reads the prompt while the target does."""
        self._feature_layers = request.feature_layers
        self._ask(lambda speculator: speculator.start(request))

    def switch(self, plan: Plan, speculator: Speculator | None, request: DraftRequest | None) -> None:
        """Goes on with another speculator, or none, from where the row is now. The one before has been stopped.

        Args:
            plan: Of the rounds from here on.
            speculator: Drafts from here on; it may be the one from before. `None` decodes plainly.
            request: What that needs. Its prompt is all that the row has so far.
        """
        self.mode, self._assistant = plan.mode, plan.assistant
        self._speculator, self._is_fresh = speculator, speculator is not None
        self._feature_layers = () if request is None else request.feature_layers
        if request is not None:
            self._ask(lambda speculator: speculator.start(request))

    def send(
        self,
        row: Row,
        decision: Decision,
        verify_ms: float | None = None,
        features: FeatureGetter | None = None,
    ) -> None:
        """Tells the outcome, unless the answer would be for nothing.

        Args:
            row: The row.
            decision: Its latest.
            verify_ms: How long that took, in milliseconds.
            features: Gives what a speculator reads of the target's layers.
        """
        is_fresh, self._is_fresh = self._is_fresh, False
        if decision.fault is not None or row.ends_with(decision.tokens):
            return

        def tell(speculator: Speculator) -> None:
            try:
                given = None if features is None else self._told_features(features, is_fresh)
            except LookupError as error:
                raise SpeculatorError(str(error)) from error
            speculator.resolve(Outcome(decision.node, decision.tokens[-1], given), verify_ms)

        self._ask(tell)
        if features is not None:
            self._keep_features(features)

    def _told_features(self, features: FeatureGetter, is_fresh: bool) -> torch.Tensor | None:
        """What the speculator is told: after a switch all that it has missed too."""
        if not self._feature_layers:
            return None
        given = features(self._feature_layers)
        backlog = self._backlogs.get(self._assistant)
        return given if backlog is None or not is_fresh else torch.cat([backlog.all(), given])

    def _keep_features(self, features: FeatureGetter) -> None:
        """Keeps what heads may have to be told later."""
        for number, backlog in list(self._backlogs.items()):
            try:
                backlog.add(features(backlog.layer_ids))
            except LookupError:  # the head will fail if it is asked
                del self._backlogs[number]
                continue
            if self.is_drafting and self._assistant == number:
                backlog.told()

    def receive(self) -> Speculation:
        """The speculation that follows the latest outcome; an empty one where there is no speculator, or no outcome.

        The round after a switch verifies nothing: the target reads a token while the assistant reads the row.
        """
        if self._is_fresh:
            return Speculation()
        speculation: Speculation | None = self._ask(lambda speculator: speculator.receive())
        if speculation is None:
            return Speculation()
        self._recorder.speculator_spans += speculation.spans
        return speculation

    def stop(self) -> None:
        """Ends the row."""
        self._ask(lambda speculator: speculator.stop())

    def _ask(self, action: Callable[[Speculator], Any]) -> Any:
        if self._speculator is None:
            return None
        try:
            return action(self._speculator)
        except SpeculatorError as error:
            if self._recorder.degraded is None:
                logger.warning(f"Generation goes on without the assistant, more slowly: {error}")
                self._recorder.degraded = str(error)
            self._speculator = None
            self._backlogs.pop(self._assistant, None)  # it will not be asked again
            self._on_degrade(self._assistant)
            return None


class Conductor(Protocol):
    """Changes how rows go on, between two rounds."""

    def prefilled(self) -> None:
        """The prompt has been read: the first round begins."""
        ...

    def after_round(
        self, active: Sequence[tuple[Row, Link]], decisions: Sequence[Decision], stats: Sequence[RoundStats]
    ) -> None:
        """Takes in a round.

        Args:
            active: The rows that go on.
            decisions: Of all rows in the round.
            stats: Of the same.
        """
        ...


def no_grad(hands_out_tensors: bool, model_kwargs: dict[str, Any]) -> Any:
    """What the target's forwards run under."""
    # A twentieth faster on a small model. Its tensors would be a nuisance to a caller, so only where none is handed
    # out.
    is_private = not (hands_out_tensors or getattr(model_kwargs.get(CACHE_KEY), "_is_user_defined", False))
    return torch.inference_mode if is_private else torch.no_grad


def round_stats(
    row: int,
    received: Speculation,
    verified: Speculation,
    decision: Decision,
    num_emitted: int,
    verify_ms: float,
    wait_ms: float,
    mode: ConcreteMode | None = None,
) -> RoundStats:
    """The figures of one row's round: `verified` is what was left of `received`."""
    return RoundStats(
        row=row,
        num_draft_tokens=len(verified),
        num_accepted=len(decision.path),
        num_reached=len(decision.path) + (decision.node - 1 in verified.parents),
        num_emitted=num_emitted,
        origin=received.origin,
        miss=received.miss,
        depth=received.depth,
        verify_ms=verify_ms,
        wait_ms=wait_ms,
        draft_ms=received.draft_ms,
        num_draft_steps=received.num_draft_steps,
        path=decision.path,
        mode=mode,
    )
