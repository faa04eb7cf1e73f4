"""The process backend: the assistant in a program of its own, with threads of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import secrets
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from ..protocol import DraftRequest, SpeculatorError
from ..translation import Translation
from ..types import Outcome, Speculation
from . import messages
from .answers import receive_answer
from .arena import pack_again, share_model
from .handshake import HandshakeError, welcome_worker
from .model_state import ModelState, plain_tensors, weight_places
from .speculator import Worker, warn_unless_ahead

# A fresh interpreter that imports torch and transformers on a busy machine.
START_TIMEOUT_S = 180.0
MESSAGE_TIMEOUT_S = 60  # for the next part of a message that has begun
CLOSE_TIMEOUT_S = 2.0

# Not multiprocessing's spawn: that imports the caller's script again, which needs a guard there, and a file.
BOOTSTRAP = (
    # The folder that the caller happens to be in comes first here, and may hold a json.py.
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "import json; setup = json.loads(sys.stdin.readline()); sys.path[:] = setup['sys_path']; "
    "from hf_ssd.runtime.worker import main; main(setup)"
)


class AssistantLoadError(SpeculatorError):
    """The assistant cannot live in another process."""


class _NoAnswerError(Exception):
    """The worker was silent for too long. Not a `TimeoutError`: a caller's own signal handler may raise that."""


def is_supported() -> bool:
    """Whether this system can hand file descriptors to a new program."""
    return os.name == "posix" and bool(sys.executable)


class AssistantWorker(Worker):
    """A process that holds one assistant. Kept for later calls; at most one call uses it at a time.

    Args:
        device: Device that the worker puts its assistant on.
        quantization: What the first call will ask for, made while the worker starts.
    """

    def __init__(self, device: str, quantization: str | None = None) -> None:
        super().__init__(device)
        self._quantization = quantization
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._load: messages.Load | None = None
        self._state: ModelState | None = None
        self._is_shared = False  # whether both sides see all of the weights in one memory
        self._key = secrets.token_bytes(32)
        self._is_ready = False
        self._cause = "the assistant's process has ended"
        self._rows = itertools.count()
        self._num_unanswered = 0
        self._translation: Translation | None = None  # what the process knows
        self._replies: dict[int, messages.Answer | messages.Failure] = {}  # by row, not asked for yet

    def start(self, model: PreTrainedModel) -> None:
        """Moves the model's weights to shared memory and starts the program. Returns before that is ready.

        Raises:
            SpeculatorError: If the model cannot be sent, or the system has no process or memory for it.
        """
        try:
            parcel, arena = share_model(model)
        except (OSError, MemoryError) as error:
            raise SpeculatorError(f"there is no shared memory for the assistant: {error}") from error
        except Exception as error:  # pickling runs any code
            raise AssistantLoadError(f"the assistant cannot be sent to another process: {error!r}") from error
        self._state = ModelState.of(model)
        self._is_shared = all(tensor.device.type == "cpu" for tensor in plain_tensors(model))
        self._load = messages.Load(parcel, self.device, self._quantization, logging.get_verbosity())
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            arena.close_descriptor()
            raise SpeculatorError(f"the assistant's process cannot be reached: {error}") from error
        setup = {
            "connection": theirs.fileno(),
            "arena": arena.descriptor,
            "arena_bytes": arena.size_bytes,
            "key": self._key.hex(),
            "parent": os.getpid(),
            "sys_path": [os.path.abspath(path) for path in sys.path],
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), arena.descriptor),
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(setup).encode() + b"\n")
            self._process.stdin.close()
        except OSError as error:
            ours.close()
            raise SpeculatorError(f"the assistant's process cannot be started: {error}") from error
        finally:
            theirs.close()
            arena.close_descriptor()
        self._connection = connection_over(ours)

    def wait_ready(self) -> None:
        """Waits until the assistant is loaded.

        Raises:
            SpeculatorError: If it cannot be.
        """
        if self._is_ready:
            return
        connection = self._connected()
        with self._failures():
            # The worker speaks first, so that waiting for it covers its start.
            welcome_worker(connection, self._key, lambda: self._poll(START_TIMEOUT_S))
            messages.send(connection, self._load)
            self._poll(START_TIMEOUT_S)
            reply = self._receive((messages.Ready, messages.Failure))
            self._is_ready = isinstance(reply, messages.Ready)
        if isinstance(reply, messages.Failure):
            self.close()
            if reply.lacks_memory:
                self._cause = f"the assistant's process has no memory for it:\n{reply.error}"
                raise SpeculatorError(self._cause)
            raise AssistantLoadError(f"the assistant could not be loaded in its process:\n{reply.error}")
        warn_unless_ahead(reply)

    @property
    def is_alive(self) -> bool:
        has_process = self.is_own and self._connection is not None and self._process is not None
        return has_process and self._process.poll() is None  # type: ignore[union-attr]

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def connection(self) -> Connection:
        """To the process. Raises [`SpeculatorError`] where that has ended."""
        return self._connected()

    def holds(self, model: PreTrainedModel) -> bool:
        if self._state is None or weight_places(model) != self._state.places:
            return False
        return self._is_shared or ModelState.of(model) == self._state

    def renew(self, model: PreTrainedModel) -> None:
        state = ModelState.of(model)
        if self._state is None or self._load is None or state == self._state:
            return
        parcel = None
        # On another device the worker has a copy, to be made again.
        if state.adapters != self._state.adapters or self.device != "cpu":
            try:
                parcel = pack_again(model, self._load.parcel)
            except ValueError:
                self.close()
                return
            except Exception as error:
                self.close()
                raise AssistantLoadError(f"the assistant cannot be sent to another process: {error!r}") from error
        self._send(messages.Renew(parcel))
        self._state = state

    def close(self) -> None:
        """Ends the process. Harmless when it has ended, and in a fork of the caller, whose process it is not."""
        if not self.is_own:
            return
        if self.finalizer is not None:
            self.finalizer.detach()
        if self._connection is not None:
            self._connection.close()  # which the worker sees, and leaves
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> AssistantWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # One row

    def begin_row(self, request: DraftRequest, num_threads: int, timeout_s: float) -> int:
        self._drain(timeout_s)
        row = next(self._rows)
        processors = messages.pickle_processors(request.processors)
        if request.translation is not self._translation:
            self._send(messages.Translate(_pickle_translation(request.translation)))
            self._translation = request.translation
        encoder = None if request.encoder is None else request.encoder.on("cpu")
        request = dataclasses.replace(request, processors=(), translation=None, encoder=encoder)
        self._send(messages.Start(row, request, num_threads, processors))
        return row

    def resolve(self, row: int, outcome: Outcome, verify_ms: float | None) -> None:
        self._send(messages.Resolve(row, messages.pack_outcome(outcome), verify_ms))
        self._num_unanswered += 1

    def receive(self, row: int, timeout_s: float) -> Speculation:
        """The answer for `row`. What is left over from rows before it, a call that was broken off, is passed over."""
        with self._failures():
            while row not in self._replies:
                self._poll(timeout_s)
                reply = self._receive((messages.Answer, messages.Failure))
                self._num_unanswered -= 1
                self._replies[row if reply.row == -1 else reply.row] = reply
            reply = self._replies.pop(row)
            if isinstance(reply, messages.Failure):
                raise SpeculatorError(f"the assistant failed:\n{reply.error}")
            return messages.unpack(reply.speculation)

    def end_row(self, row: int) -> None:
        self._replies.pop(row, None)
        self._send(messages.Stop(row))

    def _drain(self, timeout_s: float) -> None:
        """Reads what a row that was stopped did not wait for: a worker that is still sending does not listen."""
        with self._failures():
            while self._num_unanswered > 0:
                self._poll(timeout_s)
                self._receive((messages.Answer, messages.Failure))
                self._num_unanswered -= 1
            self._replies.clear()

    def _connected(self) -> Connection:
        if not self.is_own:
            raise SpeculatorError("the assistant's process belongs to the process that this one is a fork of")
        if self._connection is None:
            raise SpeculatorError(self._cause)
        return self._connection

    def _send(self, message: Any) -> None:
        with self._failures():
            messages.send(self._connected(), message)

    def _receive(self, kinds: tuple[type, ...]) -> Any:
        """The next message. Raises [`messages.MessageError`] if it is none that is due."""
        reply = receive_answer(self._connected())
        if not isinstance(reply, kinds):
            raise messages.MessageError(f"{type(reply).__name__}, which is not due here")
        return reply

    def _poll(self, timeout_s: float) -> None:
        if not self._connected().poll(timeout_s):
            raise _NoAnswerError(f"no answer from the assistant's process for {timeout_s:g} s")

    @contextlib.contextmanager
    def _failures(self) -> Any:
        """Turns what a broken connection raises into SpeculatorError, and ends what is left of the process."""
        try:
            yield
        except SpeculatorError:
            raise
        except (_NoAnswerError, HandshakeError, messages.MessageError) as error:
            if self._process is not None:
                self._process.kill()  # it may be stopped, and would not leave by itself
            self.close()
            is_message = isinstance(error, messages.MessageError)
            self._cause = f"the assistant's process sent {error}" if is_message else str(error)
            raise SpeculatorError(self._cause) from error
        except TimeoutError:
            self.close()
            raise  # a caller's own signal handler may raise that
        except (EOFError, OSError) as error:
            if isinstance(error, BlockingIOError) and self._process is not None:
                self._process.kill()
            self.close()
            status = self._process.returncode if self._process is not None else None
            self._cause = f"the assistant's process has died (exit status {status})"
            raise SpeculatorError(self._cause) from error
        except BaseException:
            # Ctrl-C, or what a signal handler raised, perhaps in mid message: what is read next would be its rest.
            self.close()
            raise


def connection_over(end: socket.socket) -> Connection:
    """The caller's end of a socket pair.

    A worker that does not read, or stops in the middle of a message, must not hold the caller up for ever.
    """
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_TIMEOUT_S, 0))
    return Connection(end.detach())


def _pickle_translation(translation: Translation | None) -> bytes | None:
    """Raises [`SpeculatorError`] where a tokenizer's own code cannot be sent."""
    try:
        return None if translation is None else pickle.dumps(translation, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise SpeculatorError(
            f'the assistant\'s tokenizer cannot be sent to its process ({error!r}); `backend="stream"` does without'
        ) from error
