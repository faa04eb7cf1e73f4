"""The drafting engine: drafts for the likely outcomes of a verification while that is running."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

import torch
from transformers.utils import logging

from ..kv_cache import bytes_per_token
from ..planning import (
    AcceptanceEstimate,
    Backup,
    BackupPolicy,
    Calibration,
    Event,
    Rates,
    best_step,
    is_worth_verifying,
    step_width,
)
from ..protocol import DraftRequest
from ..types import Miss, Origin, Outcome, Span, Speculation
from .assistant import AssistantModel
from .backup import Copy, RowBackup, borrow
from .draft_tree import Node, become_bonus, likeliest_first, make_root
from .draft_vocab import DraftVocabulary
from .feature_trunk import make_trunk
from .ngram import MAX_LENGTH, NGramIndex, match_strength
from .outcomes import OutcomeRanker
from .pace import SLOPE, Pace
from .proposer import Proposer, make_vocabulary, point_mass
from .together import Work, work_together
from .trunk import num_common

logger = logging.get_logger(__name__)

NUM_CHILDREN = 8  # likely next tokens kept after each token, where the speculation may be a tree
MIN_CHANCE = 0.004  # below, nothing is worth a place in a forward
MIN_CHANCE_UNHURRIED = 0.02  # the same where no outcome is waited for
MIN_UNMEASURED_CHANCE = 0.1  # of what is verified, before it is known what that costs
MAX_STEP_TOKENS = 48
MAX_PREPARED_TOKENS = 1024  # that no plan asks for: beyond, a slow reader of the text would fill the memory
MAX_COPIED_TOKENS = 8
MIN_COPIED_CHANCE = 0.02
FIRST_LENGTH = 4  # draft tokens just in time, before anything has been measured


class DraftEngine:
    """Drafts for one row at a time. It knows no process: whoever runs it calls `deepen` while a verification runs.

    Inside it is a coroutine that asks for forwards and projections, so that engines of several rows may share them
    ([`work_together`]).

    What may follow the row is one tree ([`Node`]): the speculation that is being verified, after each of its nodes the
    likely bonus tokens, and what was drafted after those. Each node has a chance to be reached. The assistant's cache
    holds the *trunk*, the tokens of the row, and after it the nodes that have been run, each of which sees the trunk
    and its ancestors.

    ```
    trunk: The cat sat ┬ on ┬ the ┬ mat ┬ .  ── It        sent: on the mat, a rug
                       │    │     │     └ and ─ purred    prepared: what follows "mat" (3 accepted), "the", "on", ...
                       │    │     └ sofa ─ and
                       │    └ a ── rug ── .
                       └ by ── the ── wall
    ```

    A step runs some nodes in one forward, which tells what may follow each of them. Which nodes, and whether the step
    pays, is decided by their chances and by what steps and verifications have taken ([`planning.planner`]). The first
    step after a speculation was sent is merged: it runs that speculation's last tokens, whose outcomes need their
    hidden states, together with the bonus tokens of all other outcomes.

    Args:
        assistant: The model that drafts.
        overlaps: Whether steps run beside the verification, so that time is short. Otherwise everything likely is
            prepared, however long that takes.
        like: An engine with the same assistant, for another row of the same batch. What either measures is known to
            both.
    """

    def __init__(self, assistant: AssistantModel, *, overlaps: bool = True, like: DraftEngine | None = None) -> None:
        self.assistant = assistant
        self.overlaps = overlaps
        self._like = like
        self._vocabularies: dict[tuple[object, ...], DraftVocabulary | None] = {}
        # What was measured in one row is the best guess for the next.
        self._measured: dict[tuple[object, ...], tuple[Calibration, AcceptanceEstimate]] = (
            {} if like is None else like._measured
        )
        # Times, and what to do about misses, depend on how many rows there are.
        self._backup_policies: dict[tuple[bool, bool, str, int], BackupPolicy] = (
            {} if like is None else like._backup_policies
        )
        self._paces: dict[int, Pace] = {}
        self.forget()

    def forget(self) -> None:
        """Drops what was computed from the weights, or copied: they have changed."""
        self._tokens: list[int] = []
        self._trunk = make_trunk(self.assistant)
        self._vocabularies.clear()

    def num_known(self, tokens: Sequence[int]) -> int:
        """With how many of a row's first tokens the row before began."""
        return num_common(self._tokens, tokens)

    @torch.inference_mode()
    def start(self, request: DraftRequest) -> None:
        """Reads the prompt, as far as the row before did not begin with the same tokens.

        As if an empty speculation were being verified, `deepen` then prepares for first tokens.
        """
        self.config = config = request.config
        self._vocab_size = request.vocab_size
        self._proposer = Proposer(self.assistant, request, self._vocabulary(request))
        expected = config.expected_acceptance
        self._calibration, self._acceptance = self._measured.setdefault(
            (request.do_sample, config.rule, expected, request.translation is None),
            (Calibration(expected), AcceptanceEstimate(expected)),
        )
        self._pace = self._pace_of(request.num_rows)
        self._ranker = OutcomeRanker(config, self._calibration, self._acceptance)
        # By Saguaro sampling only, which needs it before the speculation is known that it will be for.
        is_saguaro = request.do_sample and config.saguaro_coefficient < 1.0
        self._fan_out = self._ranker.expected_fan_out() if is_saguaro else None
        self._max_tree_tokens = config.max_tree_tokens if request.takes_trees and not request.draws else 0
        self._tokens = request.read_ids
        self._trunk.begin(request)
        self._ngrams = NGramIndex(self._tokens)
        policy = self._backup_policies.setdefault(
            (bool(self._max_tree_tokens), request.do_sample, config.rule, request.num_rows), BackupPolicy()
        )
        self._backup = RowBackup(request, policy if self.overlaps else None)
        self._origin = Origin.NONE
        self._last_position = len(self._tokens) + request.max_new_tokens - 1
        self._sent: list[Node] = []
        self._spans: list[Span] = []
        self._draft_ns = self._num_steps = 0
        self._root = Node(self._tokens[-1] if self._tokens else 0, None, len(self._tokens) - 1)
        self._frontier: list[Node] = []
        self._proposer.activate(self._tokens)
        if self._has_room(1):
            with self._span("prefill", tokens=len(self._trunk.pending)):
                work_together(self.assistant, [self._read_row()])
        self._pace.started()

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> Speculation:
        """Answers an outcome: from the speculation cache, or by the backup."""
        return work_together(self.assistant, [self.resolving(outcome, verify_ms)])[0]

    def resolving(self, outcome: Outcome, verify_ms: float | None = None) -> Work[Speculation]:
        """`resolve`, for engines that work together."""
        last = self._sent[outcome.node - 1] if outcome.node else self._root
        path = last.path()
        self._pace.resolved(len(path) + 1, verify_ms)
        self._observe(last, outcome.bonus_token)
        child = last.child(outcome.bonus_token)
        self._trunk.learn(outcome.features)
        self._tokens += [*(node.token for node in path), outcome.bonus_token]
        new_tokens = self._tokens[-len(path) - 1 :]
        self._ngrams.extend(new_tokens)
        miss: Miss | None = None
        borrowed = Copy()
        is_prepared = child is not None and child.is_run and any(node.is_draft for node in child.children)
        is_hit = is_prepared and self.config.mode == "ssd"
        if self.config.mode == "ssd":
            self._backup.resolved(new_tokens, is_hit, verify_ms)
        if is_hit:
            assert child is not None
            with self._span("look up", hit=1):
                self._keep([*path, child], child, new_tokens)
        else:
            if self.config.mode == "ssd":
                miss = self._why_missed(last, child)
                borrowed = borrow(self._root, self._tokens, MAX_COPIED_TOKENS)
            self._keep(path, None, new_tokens)
        for node in self._sent:
            node.is_sent = False
        self._frontier = [node for node in self._root.descendants() if not node.is_run]
        self._origin = Origin.CACHE
        if not is_hit:
            self._origin = yield from self._answer_miss(borrowed)
        self._send()
        return self._speculation(miss)

    def deepen(self) -> bool:
        """Does one piece of pre-speculation: ranks outcomes, or runs a draft step.

        Returns:
            Whether there was one to do. If not, there is nothing to do until the outcome is known.
        """
        return work_together(self.assistant, [self.deepening()])[0]

    def deepening(self) -> Work[bool]:
        """`deepen`, for engines that work together."""
        if self.config.mode != "ssd" or not self.assistant.takes_trees or not self._has_room(2):
            return False
        if not self._root.is_run or self._trunk.is_provisional:
            yield from self._catch_up()
            return True
        if (yield from self._rank_outcomes()):
            return True
        nodes = self._next_step()
        if not nodes:
            return False
        started = time.monotonic()
        with self._span("draft step", tokens=len(nodes)):
            yield from self._run(nodes)
        if self.overlaps:
            self._pace.step.update(len(nodes), (time.monotonic() - started) * 1e3)
        return True

    # Outcomes

    def _rank_outcomes(self) -> Work[bool]:
        """Adds the likely bonus tokens after the nodes of the speculation whose hidden states have become known."""
        nodes = self._ranker.due(self._root, self._sent)
        if not nodes:
            return False
        is_first = not self._root.is_ranked
        with self._span("rank outcomes", nodes=len(nodes)):
            if is_first:
                self._ranker.plan(self._root, self._sent)
            ranked = yield from self._proposer.rank_bonus_tokens(
                torch.stack([node.hidden for node in nodes if node.hidden is not None]),
                self._prefixes(nodes),
                [node.position + 1 for node in nodes],
                [[child.token for child in node.sent_children] for node in nodes],
                self._ranker.num_candidates(nodes),
                # Each look at all tokens reads the whole projection; one per round is what that is worth.
                use_full_vocabulary=is_first,
            )
            if is_first and self.config.fan_out == "per_instance":
                self._ranker.plan(self._root, self._sent, dict(zip(nodes, ranked, strict=True)))
            for node, candidates in zip(nodes, ranked, strict=True):
                self._frontier += self._ranker.add(node, candidates)
            if any(node.num_planned is not None for node in nodes):
                # A plan gives up what earlier rounds have left beside it.
                kept = {id(node) for node in self._root.descendants()}
                self._frontier = [node for node in self._frontier if id(node) in kept]
            if is_first:
                likely = [candidate.token for candidates in ranked for candidate in candidates]
                self._proposer.activate([*self._tokens, *(node.token for node in self._sent)], likely)
        return True

    def _observe(self, last: Node, bonus_token: int) -> None:
        """Learns from an outcome how far the assistant's word can be trusted."""
        path = [self._root, *last.path()]
        # What a chain copied is not the assistant's word.
        own, after = path, last.sent_children
        if not self._max_tree_tokens:
            own = [self._root, *takewhile(lambda node: not node.is_copied, path[1:])]
            after = [child for child in own[-1].sent_children if not child.is_copied]
        num_tested = len(own) - 1 + bool(after)
        if num_tested and self._origin is not Origin.NGRAM:
            self._acceptance.update(num_tested, len(own) - 1)
        for node in path:
            for child in node.children:
                if child.is_sent:
                    self._calibration.update(child.event, child.confidence, child in path)
                    if child.match is not None:
                        self._calibration.update(Event.OBJECTED, child.match, child in path)
                elif node is last and child.event in (Event.REPLACED, Event.APPENDED):
                    self._calibration.update(child.event, child.confidence, child.token == bonus_token)

    def _why_missed(self, last: Node, child: Node | None) -> Miss:
        if child is not None and child.is_planned:
            return Miss.UNFINISHED
        if any(node.is_run for node in last.children if not node.is_sent):
            return Miss.TOKEN
        is_cold = not any(node.is_run and not node.is_sent for node in self._root.descendants())
        return Miss.COLD if is_cold else Miss.LENGTH

    # Drafting

    def _next_step(self) -> list[Node]:
        """The nodes to run in one forward now: none if none is worth what it costs."""
        self._frontier = [node for node in self._frontier if not node.is_run and self._may_run(node)]
        self._frontier.sort(key=lambda node: -node.chance)
        # Copied tokens follow each other without having been run: parents first, which their chances see to.
        ready = self._ready(self._frontier)
        # With little memory only the first of them are prepared: what is planned, then the likeliest.
        return (self._timely(ready) if self.overlaps else ready)[: min(self._room(), MAX_STEP_TOKENS)]

    def _timely(self, ready: list[Node]) -> list[Node]:
        """Those of the nodes, the likeliest first, that are worth their time beside the verification."""
        planned = [node for node in ready if _is_called_for(node)]
        if not planned and self._trunk.num_branch_slots >= MAX_PREPARED_TOKENS:
            return []
        rates = self._rates()
        is_first = not any(node.is_run and not node.is_sent and not node.is_draft for node in self._root.descendants())
        if planned or is_first or rates is None:
            # The first step always pays: it makes misses into hits.
            width = step_width([node.chance for node in ready], self._pace.step.line or (1.0, SLOPE))
            return [*planned, *(node for node in ready[:width] if not _is_called_for(node))]
        chances = [node.chance for node in ready[:MAX_STEP_TOKENS]]
        return ready[: best_step(chances, rates, self._pace.time_left_ms())]

    def _ready(self, nodes: list[Node]) -> list[Node]:
        """Those that can be run in the next forward, among others that are."""
        if not self._trunk.needs_parents:
            return nodes
        return [node for node in nodes if node.parent is not None and node.parent.is_run]

    def _room(self) -> int:
        """How many more tokens may be run ahead, by the memory that their keys and values take."""
        budget = self.config.memory_budget
        if budget is None:
            return MAX_STEP_TOKENS
        return max(budget // max(bytes_per_token(self._trunk.cache), 1) - self._trunk.num_branch_slots, 0)

    def _may_run(self, node: Node) -> bool:
        """Whether running `node` may lead to draft tokens that can still be used."""
        if node.is_draft and not node.is_sent and node.chance < self.config.draft_threshold:
            return False  # a plan is about outcomes: drafts after one end as elsewhere
        least = max(MIN_CHANCE if self.overlaps else MIN_CHANCE_UNHURRIED, self.config.draft_threshold)
        return (node.chance >= least or _is_called_for(node)) and self._can_run(node)

    def _can_run(self, node: Node) -> bool:
        limit = self.assistant.max_length
        has_position = limit is None or node.position + self._trunk.shift < limit
        return (
            has_position
            and self._trunk.is_readable(node)
            and self._is_wanted_after(node)
            and (node.is_sent or self._may_be_longer(node))
        )

    def _is_wanted_after(self, node: Node) -> bool:
        """Whether a draft token after `node` could be emitted."""
        # The target adds a token to what is drafted, so the last token wanted is never drafted.
        return node.position + 1 < self._last_position

    def _may_be_longer(self, node: Node) -> bool:
        return node.num_drafted < self.config.max_draft_tokens

    def _run(self, nodes: Sequence[Node]) -> Work[None]:
        """Runs nodes whose ancestors have been run, and adds what may follow them."""
        hidden = yield from self._trunk.run(nodes)
        for node, state in zip(nodes, hidden, strict=True):
            node.hidden = state
        # What follows the speculation's own tokens are outcomes, and ranked as such.
        self._add_drafts([node for node in nodes if not node.is_sent], hidden)
        self._num_steps += 1

    def _add_drafts(self, nodes: Sequence[Node], hidden: torch.Tensor | None = None) -> None:
        if not nodes:
            return
        if hidden is None or len(nodes) < len(hidden):
            hidden = torch.stack([node.hidden for node in nodes if node.hidden is not None])
        width = NUM_CHILDREN if self._max_tree_tokens else 1
        drafted = self._proposer.draft(
            hidden,
            self._prefixes(nodes),
            [node.position + 1 for node in nodes],
            width,
            None
            if self._fan_out is None
            else [self._fan_out[min(n.num_drafted, len(self._fan_out) - 1)] for n in nodes],
        )
        for node, candidates in zip(nodes, drafted, strict=True):
            copied = {child.token: child for child in node.children}
            is_main = node.is_planned
            for candidate in candidates:
                child = copied.pop(candidate.token, None)
                match = None if child is None else child.confidence
                child = self._add_child(node, candidate.token) if child is None else child
                child.event, child.confidence, child.match = Event.ACCEPTED, candidate.probability, match
                child.distribution = candidate.distribution
                child.set_chance(node.chance * self._calibration(Event.ACCEPTED, candidate.probability))
                child.is_planned, is_main = is_main and not self.overlaps, False
            for child in copied.values():
                # Copied before the assistant had a say, which now is for something else.
                child.event = Event.OBJECTED
                child.set_chance(node.chance * self._calibration(Event.OBJECTED, child.confidence))
            if self._max_tree_tokens and self.config.ngram_drafts and len(node.children) == len(candidates):
                self._add_copy(node, self._copy_after(node))

    def _copy_after(self, node: Node) -> Copy:
        """What followed earlier in the text."""
        return Copy(*self._ngrams.lookup([each.token for each in node.path()], MAX_COPIED_TOKENS))

    def _add_copy(self, node: Node, copy: Copy) -> None:
        """Adds copied tokens, as far as they are likely enough to be worth verifying."""
        length = copy.length
        for token in copy.tokens:
            strength = match_strength(length)
            event = Event.OBJECTED if node.is_run else copy.event
            chance = node.chance * self._calibration(event, strength)
            is_wanted = self._is_wanted_after(node) and self._may_be_longer(node)
            child = next((child for child in node.children if child.token == token), None)
            if child is not None:
                child.match = strength
                child.set_chance(max(child.chance, chance))
            elif chance < MIN_COPIED_CHANCE or not is_wanted or not self._may_branch(node, chance):
                return
            else:
                child = self._add_child(node, token)
                child.event, child.confidence, child.chance = event, strength, chance
            node, length = child, min(length + 1, MAX_LENGTH)

    def _add_child(self, node: Node, token: int) -> Node:
        child = Node(token, node, node.position + 1, num_drafted=node.num_drafted + 1)
        node.children.append(child)
        self._frontier.append(child)
        return child

    # Misses

    def _answer_miss(self, borrowed: Copy) -> Work[Origin]:
        """Drafts after a root that nothing was prepared for, or copies.

        Args:
            borrowed: What was prepared for another outcome, and may do.

        Returns:
            Where the tokens are from.
        """
        copies: list[Copy] = []
        backup: Backup = "jit"
        may_copy = self.config.ngram_drafts or self.config.backup == "ngram"
        # One that cannot draft ahead would have nothing to do.
        if self.config.mode == "ssd" and self.assistant.takes_trees:
            if may_copy:
                copies = [self._cut(copy) for copy in (borrowed, self._copy_after(self._root))]
                copies.sort(key=lambda copy: -self._calibration(copy.event, match_strength(copy.length)))
            backup = self._backup.choose(copies[0].tokens if copies else ())
        if backup == "none":
            return Origin.NONE
        if backup == "jit":
            yield from self._draft_just_in_time()
        else:
            for copy in copies:
                self._add_copy(self._root, copy)
        has_drafted = bool(self._root.children) and backup == "jit"
        if may_copy and not self._max_tree_tokens:
            # Where the chain ends the text may know more.
            end = self._root
            while end.children:
                end = end.children[0]
            self._add_copy(end, self._copy_after(end))
        return Origin.JUST_IN_TIME if has_drafted else Origin.NGRAM

    def _cut(self, copy: Copy) -> Copy:
        """What of a copy after the root would be sent."""
        chance, tokens = 1.0, list[int]()
        room = min(self.config.max_draft_tokens, self._last_position - self._root.position - 1)
        for index, token in enumerate(copy.tokens[: max(room, 0)]):
            chance *= self._calibration(copy.event, match_strength(min(copy.length + index, MAX_LENGTH)))
            if chance < MIN_COPIED_CHANCE or not self._pays_as_copy(chance):
                break
            tokens.append(token)
        return replace(copy, tokens=tokens)

    def _may_branch(self, node: Node, chance: float) -> bool:
        """Whether a copied token may follow `node`, given its chance. In a chain everything is sent."""
        return bool(self._max_tree_tokens) or (not node.children and self._pays_as_copy(chance))

    def _pays_as_copy(self, chance: float) -> bool:
        # Without a second process nothing goes by the clock, so that a seed gives the same draws each time.
        rates = self._rates() if self.overlaps else None
        return chance > MIN_UNMEASURED_CHANCE if rates is None else is_worth_verifying(chance, rates)

    def _catch_up(self) -> Work[None]:
        """Runs what the row got without the assistant, and after it the speculation if that is a chain."""
        is_apart = bool(self._max_tree_tokens) or self._trunk.needs_parents
        sent = [] if is_apart else list(takewhile(self._can_run, self._sent))
        with self._span("extend" if self._root.is_run else "catch up", tokens=len(self._trunk.pending) + len(sent)):
            hidden = yield from self._trunk.read(sent)
        for node, state in zip((self._root, *sent), hidden, strict=True):
            node.hidden = state
        self._num_steps += 1

    def _draft_just_in_time(self) -> Work[None]:
        """Drafts while the target waits."""
        if not self._has_room(1):
            return
        with self._span("just in time"):
            if self.config.mode != "ssd":
                self._proposer.activate(self._tokens)
            began = started = time.monotonic()
            num_run = len(self._trunk.pending)
            yield from self._read_row()
            if num_run > MAX_STEP_TOKENS:  # a head reads its prompt here: no step, miss or round is like that
                began, num_run = time.monotonic(), 0
                self._pace.interrupted()
            if self._is_wanted_after(self._root):
                self._add_drafts([self._root])
            num_before = self._trunk.num_branch_slots
            while True:
                nodes = self._next_just_in_time()
                if self._max_tree_tokens:
                    # More than can be sent would be waited for in vain.
                    nodes = nodes[: max(self._max_tree_tokens - (self._trunk.num_branch_slots - num_before), 0)]
                if num_run:
                    self._pace.step.update(num_run, (time.monotonic() - started) * 1e3)
                if not nodes:
                    break
                started, num_run = time.monotonic(), len(nodes)
                yield from self._run(nodes)
            self._backup.jit_took((time.monotonic() - began) * 1e3)

    def _next_just_in_time(self) -> list[Node]:
        pending = self._ready([node for node in self._frontier if not node.is_run and self._can_run(node)])
        rates = self._rates()
        is_fixed = self.config.num_assistant_tokens != "auto"
        if is_fixed or rates is None or not self.assistant.takes_trees:
            # One chain, after the likeliest token each time.
            drafted = [node for node in self._frontier if node.parent is not None and node.parent.is_run]
            deepest = max(drafted, key=lambda node: (node.num_drafted, node.chance), default=None)
            limit = self.config.max_draft_tokens if is_fixed else FIRST_LENGTH
            if deepest is None or deepest not in pending or deepest.chance < self.config.draft_threshold:
                return []
            return [deepest] if deepest.num_drafted < limit else []
        ready = sorted((node for node in pending if self._may_run(node)), key=lambda node: -node.chance)
        return ready[: best_step([node.chance for node in ready[:MAX_STEP_TOKENS]], rates, 0.0)]

    def _read_row(self) -> Work[None]:
        """Runs the tokens of the row that the cache lacks, up to the root."""
        self._root.hidden = (yield from self._trunk.read())[0]
        self._num_steps += 1

    # What is sent

    def _send(self) -> None:
        """Chooses the speculation: the likeliest draft tokens after the root."""
        if self._max_tree_tokens:
            rates = self._rates()
            depth = max((node.num_drafted for node in self._root.descendants()), default=0)
            self._sent = likeliest_first(
                self._root, lambda node, count: not count or self._is_worth_sending(node, count, rates, depth)
            )
        else:
            # A drawn token must be sent, whatever it is.
            self._sent = likeliest_first(self._root, lambda node, count: True)
        for node in self._sent:
            node.is_sent = True
        for node in (self._root, *self._sent):
            for child in node.children:
                if not child.is_sent:
                    become_bonus(child)
        self._pace.sent(len(self._sent))

    def _is_worth_sending(self, node: Node, count: int, rates: Rates | None, depth: int) -> bool:
        if count >= self._max_tree_tokens:
            return False
        if rates is None:
            return node.chance > MIN_UNMEASURED_CHANCE
        # As a bonus token a second choice could be drafted after at once. As a draft token it has to be run first, so
        # that the next speculation has a token less.
        is_second_choice = not node.is_run and any(other.chance > node.chance for other in _siblings(node))
        return is_worth_verifying(node.chance, rates, rates.acceptance**depth if is_second_choice else 0.0)

    def _keep(self, path: Sequence[Node], root: Node | None, new_tokens: Sequence[int]) -> None:
        """Makes `path` part of the row, and of what the assistant reads; keeps of the cache what is still right.

        Args:
            path: What follows the old root.
            root: The new root, the last of `path`, where its branch is kept. Otherwise the last token of the row is
                the new root, and nothing is known after it.
            new_tokens: What the row got.
        """
        kept = None if root is None else [node for node in root.descendants() if node.slot is not None]
        self._trunk.append(new_tokens, path, kept)
        if root is None:
            root = Node(self._tokens[-1], None, len(self._tokens) - 1)
        make_root(root)
        self._root = root

    def _speculation(self, miss: Miss | None) -> Speculation:
        index = {id(node): i for i, node in enumerate(self._sent)}
        speculation = Speculation(
            tokens=tuple(node.token for node in self._sent),
            parents=tuple(index.get(id(node.parent), -1) for node in self._sent),
            draft_probs=self._draft_probs(),
            origin=self._origin if self._sent else Origin.NONE,
            miss=miss,
            draft_ms=self._draft_ns / 1e6,
            num_draft_steps=self._num_steps,
            spans=tuple(self._spans),
        )
        self._draft_ns = self._num_steps = 0
        self._spans = []
        return speculation

    def _draft_probs(self) -> torch.Tensor | None:
        """What the tokens were drawn from, all of the mass on those that were not; `None` where none was."""
        if all(node.distribution is None for node in self._sent):
            return None
        rows = [node.distribution or point_mass(node.token, self.assistant.device) for node in self._sent]
        return torch.stack([each.to_dense(self._vocab_size) for each in rows])

    # Bookkeeping

    def _rates(self) -> Rates | None:
        return self._pace.rates(self._acceptance(1)[0])

    def _prefixes(self, nodes: Sequence[Node]) -> list[list[int]]:
        if not self._proposer.reads_prefixes:
            return [[] for _ in nodes]
        return [[*self._tokens, *(each.token for each in node.path())] for node in nodes]

    def _has_room(self, num_tokens: int) -> bool:
        """Whether the assistant's positions reach far enough for the row and `num_tokens` more."""
        limit = self.assistant.max_length
        num_read = self._trunk.num_read
        has_room = limit is None or num_read + num_tokens <= limit
        if not has_room:
            logger.warning_once(
                f"The assistant reads at most {limit} tokens (`max_position_embeddings`); from there on it drafts "
                "nothing. An assistant with a longer context would keep the speed."
            )
        return has_room and num_read > 0 and not self._trunk.reading.is_waiting

    def _pace_of(self, num_rows: int) -> Pace:
        """The pace of calls with so many rows."""
        if num_rows not in self._paces:
            self._paces[num_rows] = Pace(None if self._like is None else self._like._pace_of(num_rows))
        return self._paces[num_rows]

    def _vocabulary(self, request: DraftRequest) -> DraftVocabulary | None:
        translation_key = request.translation and request.translation.key
        key = (request.vocab_size, request.config.draft_vocab_size, translation_key)
        for other in [each for each in self._vocabularies if each[2] not in (None, translation_key)]:
            del self._vocabularies[other]  # of tokenizers that the caller may load anew for each call
        if key not in self._vocabularies:
            known = None if self._like is None else self._like._vocabulary(request)
            # A copy has tokens of its own for the round, and shares the static ones.
            self._vocabularies[key] = copy.copy(known) if known else make_vocabulary(self.assistant, request)
        return self._vocabularies[key]

    @contextmanager
    def _span(self, name: str, **args: int) -> Iterator[None]:
        start = time.monotonic_ns()
        yield
        end = time.monotonic_ns()
        if name != "look up":
            self._draft_ns += end - start
        if self.config.trace:
            self._spans.append(Span(name, start, end, tuple(args.items())))


def _is_called_for(node: Node) -> bool:
    """Whether a plan needs `node` to be run, however unlikely it is: for itself, or for outcomes from it on."""
    return node.is_planned or bool(node.num_planned) or any(_is_called_for(child) for child in node.sent_children)


def _siblings(node: Node) -> list[Node]:
    return [] if node.parent is None else [other for other in node.parent.children if other is not node]
