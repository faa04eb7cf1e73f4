"""The stream backend: the assistant in a thread of the caller's process, on CUDA with a stream of its own.

Threads share the interpreter lock, so where kernels are launched one by one from Python (on the CPU, and on CUDA
without graphs) the two sides overlap less than two processes do. It needs no copy of the assistant and starts at once.

CPU threads: OpenMP keeps a number of threads for each thread that asks for a team of them, so
`torch.set_num_threads()` in the assistant's thread leaves the target's as it is, and the other way round. Threads that
are created during a call get neither's ([`cpu_threads`]).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafting.int8 import copy_modules
from ..protocol import DraftRequest, SpeculatorError
from ..sampling import Processor
from ..types import Outcome, Speculation
from . import messages
from .inline import copy_processors
from .model_state import ModelState, weight_places
from .server import Server
from .speculator import Worker, warn_unless_ahead

logger = logging.get_logger(__name__)

# Loading, and what the first row on a device has to prepare.
START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 2.0


class StreamWorker(Worker):
    """A thread that drafts with one assistant. Kept for later calls; at most one call uses it at a time.

    Args:
        device: Where the assistant is. It is used there, not copied.
        quantization: What the first call will ask for, made while the thread starts.
    """

    def __init__(self, device: str, quantization: str | None = None) -> None:
        super().__init__(device)
        self._quantization = quantization
        self._inbox = Mailbox(torch.device(device))
        self._outbox = Mailbox(torch.device(device))
        self._thread: threading.Thread | None = None
        self._state: ModelState | None = None
        self._is_ready = self._is_over = self._has_served = False
        self._replies: dict[int, list[messages.Started | messages.Answer | messages.Failure]] = {}  # not asked for yet
        self._cause = "the assistant's thread has ended"
        self._rows = itertools.count()
        self._open_rows: set[int] = set()

    def start(self, model: PreTrainedModel) -> None:
        """Starts the thread. It returns before that is ready."""
        self._state = ModelState.of(model)
        arguments = (_second_object(model), self._quantization, self._inbox, self._outbox)
        self._thread = threading.Thread(target=_serve, args=arguments, name="hf_ssd assistant", daemon=True)
        self._inbox.put(None)  # the weights may still be on their way to the device
        try:
            self._thread.start()
        except RuntimeError as error:  # no more of them, or the interpreter is about to end
            self._thread = None
            raise SpeculatorError(f"the assistant's thread cannot be started: {error}") from error

    def wait_ready(self) -> None:
        """Waits until the assistant has been tried out.

        Raises:
            SpeculatorError: If it cannot be used.
        """
        if not self.is_alive:
            raise SpeculatorError(self._cause)
        if self._is_ready:
            return
        reply = self._get(START_TIMEOUT_S)
        self._is_ready = True
        warn_unless_ahead(reply)

    @property
    def is_alive(self) -> bool:
        if self._thread is None or self._is_over or not self.is_own:
            return False
        # One that has failed is not over before its last words are read.
        return self._thread.is_alive() or not self._outbox.empty()

    def holds(self, model: PreTrainedModel) -> bool:
        return self._state is not None and weight_places(model) == self._state.places

    def renew(self, model: PreTrainedModel) -> None:
        state = ModelState.of(model)
        if self._state is None or state == self._state:
            return
        has_new_modules = state.adapters != self._state.adapters
        self._put(messages.Renew(model=_second_object(model) if has_new_modules else None))
        self._state = state

    def close(self) -> None:
        """Ends the thread once its step is done. Harmless when it has ended, and in a fork, which has none."""
        if self.finalizer is not None:
            self.finalizer.detach()
        if self._thread is None or not self.is_own:
            return
        self._inbox.close()
        # One that hangs is not waited for. The assistant may be collected in any thread, in its own too.
        if not self._is_over and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    # One row

    def begin_row(self, request: DraftRequest, num_threads: int, timeout_s: float) -> int:
        """Waits until the thread is ready to read the prompt: what it prepares may not run beside the target."""
        row = next(self._rows)
        self._open_rows.add(row)
        processors = copy_processors(request.processors)
        for processor in processors:
            messages.move_processor(processor, self._inbox.device)
        request = dataclasses.replace(request, processors=processors)
        self._put(messages.Start(row, request, num_threads, is_awaited=True))
        self._answer(row, messages.Started, timeout_s if self._has_served else START_TIMEOUT_S)
        self._has_served = True
        return row

    def resolve(self, row: int, outcome: Outcome, verify_ms: float | None) -> None:
        self._put(messages.Resolve(row, outcome, verify_ms))

    def receive(self, row: int, timeout_s: float) -> Speculation:
        speculation: Speculation = self._answer(row, messages.Answer, timeout_s).speculation
        return speculation

    def end_row(self, row: int) -> None:
        self._open_rows.discard(row)
        self._replies.pop(row, None)
        self._put(messages.Stop(row))

    def _put(self, message: Any) -> None:
        if not self.is_alive:
            raise SpeculatorError(self._cause)
        self._inbox.put(message)

    def _answer(self, row: int, kind: type[messages.Started | messages.Answer], timeout_s: float) -> Any:
        """The answer for `row`. What is left over from rows before it, a call that was broken off, is passed over."""
        if not self.is_own:
            raise SpeculatorError("the assistant's thread belongs to the process that this one is a fork of")
        while True:
            waiting = self._replies.get(row)
            reply = waiting.pop(0) if waiting else self._get(timeout_s)
            if reply.row not in self._open_rows:
                continue
            if reply.row != row:
                self._replies.setdefault(reply.row, []).append(reply)
            elif isinstance(reply, messages.Failure):
                raise SpeculatorError(f"the assistant failed:\n{reply.error}")
            elif isinstance(reply, kind):
                return reply

    def _get(self, timeout_s: float) -> Any:
        try:
            reply = self._outbox.get(timeout_s)
        except queue.Empty:
            # A thread cannot be ended from outside; it is left alone, and leaves when it comes back.
            self._inbox.close()
            self._is_over, self._cause = True, f"no answer from the assistant's thread for {timeout_s:g} s"
            raise SpeculatorError(self._cause) from None
        if isinstance(reply, messages.Failure) and reply.row == -1:
            self._is_over, self._cause = True, f"the assistant's thread failed:\n{reply.error}"
            raise SpeculatorError(self._cause)
        return reply


class Mailbox:
    """Messages from one thread to another.

    On CUDA each goes with an event. What the sender's stream was given before is done before the receiver's stream goes
    on, so tensors in messages may be used at once, and neither thread waits for the device.

    Args:
        device: The assistant's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, message: Any) -> None:
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        self._queue.put((message, event))

    def get(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises:
            EOFError: If the mailbox was closed.
            queue.Empty: If there is none for `timeout_s` seconds.
        """
        message, event = self._queue.get(timeout=timeout_s)
        if message is _CLOSED:
            raise EOFError
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for tensor in _tensors(message):
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # or its memory might be used anew while this stream reads it
        return message

    def close(self) -> None:
        """Ends the mailbox, for a receiver that has read everything before."""
        self._queue.put((_CLOSED, None))

    def empty(self) -> bool:
        return self._queue.empty()


class _MailboxChannel:
    """Two mailboxes as a server uses them."""

    def __init__(self, inbox: Mailbox, outbox: Mailbox) -> None:
        self._inbox = inbox
        self.receive = inbox.get
        self.send = outbox.put

    def has_message(self, timeout_s: float = 0.0) -> bool:
        if timeout_s and self._inbox.empty():
            time.sleep(timeout_s)
        return not self._inbox.empty()


_CLOSED = object()


def _second_object(model: PreTrainedModel) -> PreTrainedModel:
    """Another model over the same weights, in evaluation mode.

    The thread must not keep the caller's alive, at whose end it ends. And a target that is its own assistant, or shares
    its config, must not attend as the thread does meanwhile, which is set in the config: so that is another one too.
    """
    try:
        return copy_modules(model).eval()
    except Exception as error:  # whatever a model may hold that cannot be copied
        logger.info(f"The assistant's modules cannot be copied ({error!r}); the thread uses them as they are.")
        return copy.copy(model)


def _serve(model: PreTrainedModel, quantization: str | None, inbox: Mailbox, outbox: Mailbox) -> None:
    """What the thread runs. It knows nothing of the worker, which can so be collected."""
    try:
        with _own_stream(inbox.device):
            inbox.get()
            server = Server(_MailboxChannel(inbox, outbox), model)
            outbox.put(messages.Ready(server.engine(quantization).assistant.takes_trees))
            server.run()
    except EOFError:
        pass  # the caller is done with us
    except BaseException:
        outbox.put(messages.Failure(-1, traceback.format_exc()))


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Gives the calling thread a stream of its own for what runs inside, where there are streams."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _tensors(message: Any) -> Iterator[torch.Tensor]:
    """The tensors that a message hands over."""
    if isinstance(message, messages.Answer) and message.speculation.draft_probs is not None:
        yield message.speculation.draft_probs
    if isinstance(message, messages.Resolve) and message.outcome.features is not None:
        yield message.outcome.features
    if isinstance(message, messages.Start):
        for processor in message.request.processors:
            yield from _attributes(processor)
        if message.request.encoder is not None:
            yield from message.request.encoder.tensors


def _attributes(processor: Processor) -> Iterator[torch.Tensor]:
    for value in getattr(processor, "__dict__", {}).values():
        if isinstance(value, torch.Tensor):
            yield value
