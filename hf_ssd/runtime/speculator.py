"""A speculator whose assistant works beside the caller, in a process or a thread that is kept between calls."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn

from transformers import PreTrainedModel
from transformers.utils import logging

from ..protocol import DraftRequest, SpeculatorError
from ..types import Outcome, Speculation
from .messages import Ready

logger = logging.get_logger(__name__)


class Worker(ABC):
    """Something that holds one assistant and runs beside the caller. At most one call uses it at a time.

    Args:
        device: Device that the assistant is on.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.user: int | None = None  # the thread whose call it serves
        self.finalizer: Any = None  # set by who ties the worker to something else's life
        self._owner = os.getpid()

    @contextlib.contextmanager
    def reserve(self, *, waits: bool = True) -> Iterator[bool]:
        """Keeps the worker to the calling thread, once it is free. Yields whether it is, which without `waits` it may
        not be.
        """
        if not self.lock.acquire(blocking=waits):
            yield False
            return
        try:
            self.user = threading.get_ident()
            yield True
        finally:
            self.user = None
            self.lock.release()

    @property
    def is_own(self) -> bool:
        """Whether this very process has started it. A fork must leave it alone: two would speak on one connection."""
        return os.getpid() == self._owner

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it can still answer."""

    @abstractmethod
    def start(self, model: PreTrainedModel) -> None:
        """Starts with the assistant `model`, and returns before it is ready. Raises [`SpeculatorError`]."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Waits until the assistant is loaded. Raises [`SpeculatorError`] if it cannot be."""

    @abstractmethod
    def holds(self, model: PreTrainedModel) -> bool:
        """Whether the worker can serve the model as it is now: its weights have not been replaced by others."""

    @abstractmethod
    def renew(self, model: PreTrainedModel) -> None:
        """Tells the worker, between two calls, what has changed in the model since: weights in place, adapters.

        A worker that cannot go on with it ends. Raises [`SpeculatorError`].
        """

    @abstractmethod
    def close(self) -> None:
        """Ends it. Harmless when it has ended."""

    # One row, each step as in [`Speculator`]

    @abstractmethod
    def begin_row(self, request: DraftRequest, num_threads: int, timeout_s: float) -> int:
        """Returns the row's number. `timeout_s` is for a worker that has served: the first row may take longer."""

    @abstractmethod
    def resolve(self, row: int, outcome: Outcome, verify_ms: float | None) -> None: ...

    @abstractmethod
    def receive(self, row: int, timeout_s: float) -> Speculation: ...

    @abstractmethod
    def end_row(self, row: int) -> None: ...


class WorkerSpeculator:
    """A speculator with a worker, for one call.

    Args:
        worker: A started worker, reserved for the call.
        num_threads: CPU threads that the assistant may use.
        timeout_s: Seconds of silence after which the worker is given up.
    """

    def __init__(self, worker: Worker, num_threads: int, timeout_s: float) -> None:
        self.threads: int | None = num_threads
        self.device = worker.device
        self._worker = worker
        self._timeout_s = timeout_s
        self._row: int | None = None
        self._vocab_size = 0

    def another(self) -> WorkerSpeculator:
        assert self.threads is not None
        return WorkerSpeculator(self._worker, self.threads, self._timeout_s)

    def start(self, request: DraftRequest) -> None:
        self._worker.wait_ready()
        assert self.threads is not None
        self._vocab_size = request.vocab_size
        self._row = self._worker.begin_row(request, self.threads, self._timeout_s)

    def resolve(self, outcome: Outcome, verify_ms: float | None = None) -> None:
        assert self._row is not None
        self._worker.resolve(self._row, outcome, verify_ms)

    def receive(self) -> Speculation:
        assert self._row is not None
        speculation = self._worker.receive(self._row, self._timeout_s)
        _check_speculation(speculation, self._vocab_size)
        return speculation

    def stop(self) -> None:
        # Once only: by then the worker may serve another call.
        row, self._row = self._row, None
        if row is not None:
            self._worker.end_row(row)


def _check_speculation(speculation: Speculation, vocab_size: int) -> None:
    """Raises [`SpeculatorError`] where the target could not verify a speculation: it would end the call."""
    num_tokens, probs = len(speculation.tokens), speculation.draft_probs
    if (
        all(type(token) is int and 0 <= token < vocab_size for token in speculation.tokens)
        and len(speculation.parents) == num_tokens
        and all(type(parent) is int and -1 <= parent < i for i, parent in enumerate(speculation.parents))
        and (probs is None or probs.shape == (num_tokens, vocab_size))
    ):
        return
    raise SpeculatorError("the assistant drafted what is no chain or tree of the target's tokens")


class LostSpeculator:
    """Stands for a speculator that could not be had: it says why when a row starts.

    Args:
        cause: Why, in words.
    """

    threads: int | None = None
    device = "cpu"

    def __init__(self, cause: str) -> None:
        self._cause = cause

    def another(self) -> LostSpeculator:
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SpeculatorError(self._cause)

    start = resolve = receive = stop = _refuse


def warn_unless_ahead(ready: Ready) -> None:
    """Says so where an assistant cannot draft ahead."""
    if not ready.takes_trees:
        logger.warning_once(
            "The assistant does not take attention masks for branches, so it drafts only after each outcome (as "
            'mode="sd" does). An assistant whose positions are neither ALiBi nor relative would draft ahead.'
        )
