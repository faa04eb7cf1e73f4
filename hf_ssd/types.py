"""The messages that the verifier and the speculator exchange, and what a round leaves behind.

Everything here is frozen and picklable, so that it means the same in one process and across two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

import torch

ConcreteMode = Literal["ssd", "sd", "ar"]


class Origin(str, Enum):
    """Where a speculation came from."""

    CACHE = "cache"  # it had been prepared for exactly this outcome: a hit
    JUST_IN_TIME = "just_in_time"  # drafted by the assistant after the outcome was known: a miss, or mode "sd"
    NGRAM = "ngram"  # after a miss, copied from the text or from what had been prepared for other outcomes
    NONE = "none"  # nothing was drafted


class Miss(str, Enum):
    """Why the speculation cache had nothing for an outcome."""

    TOKEN = "token"  # the accepted length was prepared for, the bonus token was not
    LENGTH = "length"  # nothing was prepared for this accepted length
    UNFINISHED = "unfinished"  # the outcome was being prepared, but held no draft token yet
    COLD = "cold"  # nothing was prepared at all, for lack of time


@dataclass(frozen=True)
class Outcome:
    """A verification outcome `(k, t*)`: which draft tokens are kept, and the `bonus_token` that the target adds.

    `node` is the place of the last one kept: 0 for none, i for the i-th draft token of the speculation, counted from 1,
    with those that it follows. For a chain that is the number of tokens kept.

    `features` are the target's states of the tokens that its forward read and that belong to the row now: of the last
    token before the draft tokens and of the draft tokens kept; after a prefill of the prompt, or the end of it; after a
    change of plan also of what was decoded meanwhile. Their shape is `(num_tokens, feature_size)`. Only a speculator
    whose request names layers gets them.
    """

    node: int
    bonus_token: int
    features: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Span:
    """Something one side did, for the time line. Times are `time.monotonic_ns()`, one clock for all processes."""

    name: str
    start_ns: int
    end_ns: int
    args: tuple[tuple[str, int | float | str], ...] = ()


@dataclass(frozen=True)
class Speculation:
    """The draft tokens that the target verifies in one round.

    Args:
        tokens: Draft token ids.
        parents: For each draft token the index of the draft token that it follows, `-1` for the bonus token before
            them. A chain is `(-1, 0, 1, ...)`.
        draft_probs: What each token was drawn from, a float32 tensor of shape `(len(tokens), vocab_size)`, after all
            logits processors. `None` means a point mass on the token itself, as under greedy drafting.
        origin: Whether the speculation cache had it ready.
        miss: Why the cache did not have it; `None` on a hit and where no outcome was looked up.
        draft_ms: Time in milliseconds that the assistant spent in forward passes since the previous speculation.
        num_draft_steps: Number of those forward passes.
        spans: What the speculator did since the previous speculation. Empty unless a trace was asked for.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: torch.Tensor | None = None
    origin: Origin = Origin.NONE
    miss: Miss | None = None
    draft_ms: float = 0.0
    num_draft_steps: int = 0
    spans: tuple[Span, ...] = ()

    @classmethod
    def chain(cls, tokens: tuple[int, ...], **fields: object) -> Speculation:
        """A speculation in which each token follows the one before it."""
        return cls(tokens=tokens, parents=tuple(range(-1, len(tokens) - 1)), **fields)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each draft token follows the one before it."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """For each draft token the number of draft tokens up to it, itself included."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most draft tokens that can be accepted."""
        return max(self.depths, default=0)

    def cut(self, max_depth: int) -> Speculation:
        """The speculation without what is deeper than `max_depth`. It goes by number, never by what tokens are."""
        kept = [index for index, depth in enumerate(self.depths) if depth <= max_depth]
        if len(kept) == len(self):
            return self
        new_index = {-1: -1, **{old: new for new, old in enumerate(kept)}}
        return replace(
            self,
            tokens=tuple(self.tokens[index] for index in kept),
            parents=tuple(new_index[self.parents[index]] for index in kept),
            draft_probs=None if self.draft_probs is None else self.draft_probs[kept],
        )


@dataclass(frozen=True)
class Verdict:
    """What a verification rule decided for a batch of rows.

    Args:
        num_accepted: Number of draft tokens kept, of shape `(batch_size,)`, int64.
        bonus_tokens: The token that the target adds after them, of shape `(batch_size,)`, int64.
    """

    num_accepted: torch.Tensor
    bonus_tokens: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """How the rounds of a call are done.

    Args:
        mode: As in [`SSDConfig`].
        assistant: Which of several assistants drafts; 0 where none does.
        max_draft_tokens: Most draft tokens in one speculation, where that is less than the settings allow.
        cache_budget: Outcomes that are prepared, the likeliest ones, where the settings say otherwise.
    """

    mode: ConcreteMode
    assistant: int = 0
    max_draft_tokens: int | None = None
    cache_budget: int | None = None

    def __str__(self) -> str:
        text = self.mode if not self.assistant else f"{self.mode} with assistant {self.assistant}"
        if self.max_draft_tokens is not None:
            text += f", {self.max_draft_tokens} draft tokens at most"
        return text if self.cache_budget is None else f"{text}, {self.cache_budget} outcomes"


@dataclass(frozen=True)
class Switch:
    """A change of plan within a call.

    Args:
        before: The plan until then.
        after: The plan from then on.
        reason: Why, in words, with the figures that led to it.
        is_trial: Whether `after` is only being tried, or goes back from a trial.
        is_return: Whether it goes back from a trial.
        num_tokens: Tokens that the call had generated.
        time_ns: When, by `time.monotonic_ns()`.
    """

    before: Plan
    after: Plan
    reason: str
    is_trial: bool = False
    is_return: bool = False
    num_tokens: int = 0
    time_ns: int = 0

    def __str__(self) -> str:
        return f"{self.before} to {self.after}{' on trial' if self.is_trial else ''}: {self.reason}"


@dataclass(frozen=True)
class RoundStats:
    """One target forward and everything that belonged to it. Times are in milliseconds.

    Args:
        num_draft_tokens: Draft tokens that were verified.
        num_accepted: Draft tokens that were accepted.
        num_emitted: Tokens that reached the output: accepted ones and the bonus token, less what a stop cut off.
        origin: Where the speculation came from.
        miss: Why the cache had no speculation, where it had none.
        depth: Draft tokens that could have been accepted, before the speculation was cut to the tokens still wanted.
        verify_ms: The target's forward and the verification rule.
        wait_ms: Time that the target stood still until the speculation was there.
        draft_ms: Forward passes of the assistant, hidden behind the target or not.
        num_draft_steps: Number of those forward passes.
        row: Index of the row in its batch.
        num_reached: Positions at which draft tokens were tested: those accepted, and the one where none was right. By
            default that of a chain.
        path: Which draft tokens were accepted: their indices in the speculation, in the order of the text. For a chain
            `0, 1, ...`; in a tree it says which branch was right.
        mode: The mode that the round was in, where that changes within a call; `None` is the call's.
    """

    num_draft_tokens: int
    num_accepted: int
    num_emitted: int
    origin: Origin
    miss: Miss | None = None
    depth: int = 0
    verify_ms: float = 0.0
    wait_ms: float = 0.0
    draft_ms: float = 0.0
    num_draft_steps: int = 0
    row: int = 0
    num_reached: int = -1
    path: tuple[int, ...] = ()
    mode: ConcreteMode | None = None

    def __post_init__(self) -> None:
        if self.num_reached < 0:
            object.__setattr__(self, "num_reached", min(self.num_accepted + 1, self.num_draft_tokens))
