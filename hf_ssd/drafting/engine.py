"""The drafting engine: drafts for the likely outcomes of a verification while that is running."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers.utils import logging

from ..kv_cache import keep_branch
from ..planning import AcceptanceEstimate, plan_fan_out
from ..protocol import DraftRequest
from ..speculation_cache import Hit, SpeculationCache
from ..theory import worthwhile_draft_length
from ..types import Miss, Origin, Outcome, Span, Speculation
from .assistant import AssistantModel
from .draft_vocab import DraftVocabulary
from .pace import Pace
from .proposer import DraftDistribution, Proposer, make_vocabulary

logger = logging.get_logger(__name__)


@dataclass
class Branch:
    """What is being prepared for one outcome: `tokens` are the bonus token and the draft tokens after it.

    All but the last of `tokens` have been run: `slots` says where their keys are in the cache, `hidden` holds their
    hidden states, `distributions` what the draft tokens were drawn from.
    """

    outcome: Outcome
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    distributions: list[DraftDistribution | None] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Number of draft tokens after the bonus token."""
        return len(self.tokens) - 1


class DraftEngine:
    """Drafts for one row at a time. It knows no process: whoever runs it calls `deepen` while a verification runs.

    The assistant's cache holds a *trunk*, the tokens of the row so far and the speculation that is being verified, and
    after it the *branches*, one per prepared outcome, each seeing the part of the trunk that its outcome keeps.

    ```
    trunk   The cat sat | on the mat          <- speculation of K = 3, being verified
    k = 0               | by  a  wall         <- branches: a bonus token, then draft tokens
    k = 1               | on  my lap  and
    k = 3               | on the mat  and purred
    ```

    All branches grow by one token per forward. The first forward is merged: it runs the last draft token, whose hidden
    state the outcome "all accepted" needs, together with the bonus tokens of all other outcomes.

    Args:
        assistant: The model that drafts.
        overlaps: Whether steps run beside the verification, so that time is short. Otherwise all branches are deepened
            fully, however long that takes.
    """

    def __init__(self, assistant: AssistantModel, *, overlaps: bool = True) -> None:
        self.assistant = assistant
        self.overlaps = overlaps
        self._vocabularies: dict[tuple[int, object], DraftVocabulary | None] = {}
        self._branches: SpeculationCache[Branch] = SpeculationCache()
        # What was measured in one row is the best guess for the next.
        self._acceptances: dict[tuple[bool, float], AcceptanceEstimate] = {}
        self._pace = Pace()

    @torch.inference_mode()
    def start(self, request: DraftRequest) -> None:
        """Reads the prompt. As if an empty speculation were being verified, `deepen` then prepares for first tokens."""
        config = request.config
        self.config = config
        self._proposer = Proposer(self.assistant, request, self._vocabulary(request))
        self._acceptance = self._acceptances.setdefault(
            (request.do_sample, config.expected_acceptance), AcceptanceEstimate(config.expected_acceptance)
        )
        self._vocab_size = request.vocab_size
        self._num_wanted = request.max_new_tokens
        self._tokens = list(request.prompt_ids[request.num_padding :])
        self._path: list[int] = []  # the speculation that is being verified
        self._path_hidden: list[torch.Tensor] = []  # after the last token of the row, after the first draft token, ...
        self._num_cached = 0
        self._cache = self.assistant.new_cache()
        self._branches.clear()
        self._num_ranked = 0  # positions of the path whose bonus tokens were ranked
        self._spans: list[Span] = []
        self._draft_ns = self._num_steps = 0
        self._proposer.activate(self._tokens)
        if self._has_room(1):
            with self._span("prefill", tokens=len(self._tokens)):
                self._path_hidden = list(self.assistant.forward(self._tokens, self._cache, num_hidden=1))
            self._num_cached = len(self._tokens)
        self._pace.started()

    @torch.inference_mode()
    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> Speculation:
        """Answers an outcome: from the speculation cache, or by drafting just in time."""
        self._pace.resolved(outcome, verify_ms)
        if self._path:
            self._acceptance.update(len(self._path), outcome)
        found = self._branches.lookup(outcome)
        self._pace.looked_up(isinstance(found, Hit))
        num_kept = len(self._tokens) + outcome.num_accepted
        self._num_wanted -= outcome.num_accepted + 1
        self._tokens += [*self._path[: outcome.num_accepted], outcome.bonus_token]
        distributions: Sequence[DraftDistribution | None]
        if isinstance(found, Hit):
            branch = found.entry
            with self._span("look up", hit=1, depth=branch.depth):
                keep_branch(self._cache, num_kept, branch.slots)
            self._num_cached = num_kept + len(branch.slots)
            self._path, self._path_hidden, distributions = branch.tokens[1:], branch.hidden, branch.distributions
        else:
            self._num_cached = min(self._num_cached, num_kept)
            keep_branch(self._cache, self._num_cached, ())
            self._path, self._path_hidden = [], []
            distributions = self._draft_just_in_time()
        self._branches.clear()
        self._num_ranked = 0
        self._pace.sent()
        return self._speculation(distributions, None if isinstance(found, Hit) else found)

    @torch.inference_mode()
    def deepen(self) -> bool:
        """Runs one step of pre-speculation.

        Returns:
            Whether there was one to run. If not, there is nothing to do until the outcome is known.
        """
        if self.config.mode != "ssd" or not self.assistant.takes_trees or not self._has_room(2):
            return False
        self._rank_outcomes()
        pending = self._row()[self._num_cached :]
        growing = [branch for branch in self._branches if self._may_grow(branch)]
        if not (pending or growing) or not self._is_worthwhile(growing):
            return False
        started = time.monotonic()
        with self._span("draft step", branches=len(growing)):
            hidden = self._run(pending, growing)
            self._path_hidden += hidden[: len(pending)]
            if growing:
                self._extend(growing, torch.stack(hidden[len(pending) :]))
        if self.overlaps:
            self._pace.stepped((time.monotonic() - started) * 1e3)
        return True

    # Pre-speculation

    def _rank_outcomes(self) -> None:
        """Adds branches for the positions whose hidden states have become known."""
        first, last = self._num_ranked, len(self._path_hidden)
        if first == last:
            return
        self._num_ranked = last
        positions = range(first, last)
        fan_out = plan_fan_out(self.config, self._acceptance(len(self._path)))
        with self._span("project outcomes", positions=len(positions)):
            ranked = self._proposer.rank_bonus_tokens(
                torch.stack(self._path_hidden[first:last]),
                [[*self._tokens, *self._path[:k]] for k in positions],
                [self._path[k] if k < len(self._path) else None for k in positions],
                [fan_out[k] for k in positions],
                # Each look at all tokens reads the whole projection; one per round is what that is worth.
                use_full_vocabulary=first == 0,
            )
        for k, tokens in zip(positions, ranked, strict=True):
            for token in tokens:
                outcome = Outcome(k, token)
                self._branches.add(outcome, Branch(outcome, [token]))
        if first == 0:
            self._proposer.activate(self._row(), [token for tokens in ranked for token in tokens])

    def _may_grow(self, branch: Branch) -> bool:
        limit = self.assistant.max_length
        num_kept = branch.outcome.num_accepted
        # The target adds a token to what is drafted, so the last token wanted is never drafted.
        num_wanted = self._num_wanted - (num_kept + 1) - 1
        has_position = limit is None or len(self._tokens) + num_kept + branch.depth < limit
        return has_position and branch.depth < min(self.config.max_draft_tokens, num_wanted)

    def _is_worthwhile(self, growing: Sequence[Branch]) -> bool:
        """Whether to start a step, given when the outcome is due.

        The first always is: it makes misses into hits. A later one that would end after the outcome makes the target
        wait, which pays while the tokens it is expected to add cost less than tokens cost the run on average.
        """
        depth = max((branch.depth for branch in growing), default=0)
        overrun_ms = self._pace.overrun_ms()
        if depth == 0 or overrun_ms is None or self._pace.ms_per_token is None:
            return True
        gained_tokens = self._pace.hit_rate * math.prod(self._acceptance(depth + 1))
        return gained_tokens * self._pace.ms_per_token > overrun_ms

    def _run(self, pending: Sequence[int], growing: Sequence[Branch]) -> list[torch.Tensor]:
        """Runs the rest of the trunk and the last token of each branch in one forward."""
        num_trunk = self._num_cached + len(pending)
        first_slot = self._cache.get_seq_length()
        num_row = len(self._tokens)
        tokens = list(pending)
        positions = list(range(self._num_cached, num_trunk))
        visible: list[tuple[int, Sequence[int]]] = [(position + 1, ()) for position in positions]
        for branch in growing:
            slot = first_slot + len(tokens)
            num_seen = num_row + branch.outcome.num_accepted
            visible.append((num_seen, (*branch.slots, slot)))
            positions.append(num_seen + len(branch.slots))
            tokens.append(branch.tokens[-1])
            branch.slots.append(slot)
        mask = self.assistant.mask.build(
            num_trunk=num_trunk, num_slots=first_slot + len(tokens), visible=visible, positions=positions
        )
        self._num_cached = num_trunk
        return list(self.assistant.forward(tokens, self._cache, positions, mask))

    def _extend(self, growing: Sequence[Branch], hidden: torch.Tensor) -> None:
        prefixes = [[*self._tokens, *self._path[: branch.outcome.num_accepted], *branch.tokens] for branch in growing]
        tokens, distributions = self._proposer.draft(hidden, prefixes)
        for branch, state, token, distribution in zip(growing, hidden, tokens, distributions, strict=True):
            branch.hidden.append(state)
            branch.tokens.append(token)
            branch.distributions.append(distribution)

    # Just in time

    def _draft_just_in_time(self) -> list[DraftDistribution | None]:
        distributions: list[DraftDistribution | None] = []
        if not self._has_room(1):
            return distributions
        with self._span("just in time"):
            if self.config.mode != "ssd":
                self._proposer.activate(self._tokens)
            for _ in range(min(self._just_in_time_length(), self._num_wanted - 1)):
                if not self._has_room(1):
                    break
                started = time.monotonic()
                pending = self._row()[self._num_cached :]
                hidden = self.assistant.forward(pending, self._cache, num_hidden=1)
                self._num_cached += len(pending)
                token, distribution = self._proposer.draft(hidden, [self._row()])
                self._path += token
                self._path_hidden += list(hidden)
                distributions += distribution
                self._num_steps += 1
                self._pace.drafted((time.monotonic() - started) * 1e3)
        return distributions

    def _just_in_time_length(self) -> int:
        if self.config.num_assistant_tokens != "auto":
            return self.config.max_draft_tokens
        if self._pace.ms_per_token is None or self._pace.token_ms is None:
            return min(4, self.config.max_draft_tokens)
        acceptance = self._acceptance(self.config.max_draft_tokens)
        return worthwhile_draft_length(acceptance, self._pace.token_ms, self._pace.ms_per_token)

    # Bookkeeping

    def _row(self) -> list[int]:
        return self._tokens + self._path

    def _has_room(self, num_tokens: int) -> bool:
        """Whether the assistant's positions reach far enough for the row and `num_tokens` more."""
        limit = self.assistant.max_length
        has_room = limit is None or len(self._tokens) + len(self._path) + num_tokens <= limit
        if not has_room:
            logger.warning_once(
                f"The assistant reads at most {limit} tokens (`max_position_embeddings`); from there on the target "
                "goes on alone. An assistant with a longer context would keep the speed."
            )
        return has_room and bool(self._tokens)

    def _vocabulary(self, request: DraftRequest) -> DraftVocabulary | None:
        key = (request.vocab_size, request.config.draft_vocab_size)
        if key not in self._vocabularies:
            self._vocabularies[key] = make_vocabulary(self.assistant, request)
        return self._vocabularies[key]

    def _speculation(self, distributions: Sequence[DraftDistribution | None], miss: Miss | None) -> Speculation:
        drawn = [distribution for distribution in distributions if distribution is not None]
        speculation = Speculation.chain(
            tuple(self._path),
            draft_probs=torch.stack([each.to_dense(self._vocab_size) for each in drawn]) if drawn else None,
            origin=Origin.CACHE if miss is None else Origin.JUST_IN_TIME if self._path else Origin.NONE,
            miss=miss,
            draft_ms=self._draft_ns / 1e6,
            num_draft_steps=self._num_steps,
            spans=tuple(self._spans),
        )
        self._draft_ns = self._num_steps = 0
        self._spans = []
        return speculation

    @contextmanager
    def _span(self, name: str, **args: int) -> Iterator[None]:
        start = time.monotonic_ns()
        yield
        end = time.monotonic_ns()
        if name != "look up":
            self._draft_ns += end - start
        if name == "draft step":
            self._num_steps += 1
        if self.config.trace:
            self._spans.append(Span(name, start, end, tuple(args.items())))
