"""The assistant's process. Started as a program of its own by `process.py`, never imported by the caller's."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafting import DraftEngine, make_assistant
from ..protocol import DraftRequest
from . import messages
from .arena import Arena, open_model

logger = logging.get_logger(__name__)


def main(setup: dict[str, Any]) -> None:
    """Runs until the caller closes the connection or is gone.

    Args:
        setup: `connection` and `arena` (file descriptors), `arena_bytes`, `key` (hex) and `parent` (process id).
    """
    # Ctrl-C goes to every process of the terminal; the caller decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(setup["parent"],), daemon=True).start()
    torch.set_num_threads(1)
    connection = Connection(setup["connection"])
    key = bytes.fromhex(setup["key"])
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        server = _load(connection, Arena(setup["arena"], setup["arena_bytes"]))
        if server is not None:
            server.run()
    except (EOFError, ConnectionError):
        pass  # the caller is done with us
    # Not through interpreter shutdown: a thread of some library might hold it up.
    os._exit(0)


def _leave_with_parent(parent: int) -> None:
    # The end of the connection tells the same sooner, unless a fork of the caller still holds it open.
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _load(connection: Connection, arena: Arena) -> Server | None:
    load: messages.Load = messages.receive(connection)
    logging.set_verbosity(load.log_level)
    try:
        model = open_model(load.parcel, arena)
        arena.close_descriptor()
        assert isinstance(model, PreTrainedModel)
        model = model.eval().to(load.device)
        if model.config._attn_implementation not in ("eager", "sdpa"):
            model.set_attn_implementation("sdpa")  # trees need masks
        server = Server(connection, model)
        takes_trees = server.engine(load.quantization).assistant.takes_trees
    except Exception:
        messages.send(connection, messages.Failure(-1, traceback.format_exc()))
        return None
    messages.send(connection, messages.Ready(takes_trees))
    return server


class Server:
    """Answers outcomes, and drafts ahead whenever no message is waiting.

    Args:
        connection: To the caller.
        model: The assistant.
    """

    def __init__(self, connection: Connection, model: PreTrainedModel) -> None:
        self._connection = connection
        self._model = model
        self._engines: dict[str | None, DraftEngine] = {}
        self._row: int | None = None

    @torch.inference_mode()
    def engine(self, quantization: str | None) -> DraftEngine:
        """The engine that drafts with the assistant in this quantization, made when it is first asked for."""
        if quantization not in self._engines:
            self._engines[quantization] = DraftEngine(make_assistant(self._model, quantization))
        return self._engines[quantization]

    def run(self) -> None:
        """Serves until the connection ends.

        Raises:
            EOFError, ConnectionError: When it does.
        """
        while True:
            # Without work to do this sleeps in `receive`.
            if self._row is not None and not self._connection.poll() and self._work(self._engine.deepen):
                continue
            message = messages.receive(self._connection)
            if isinstance(message, messages.Start):
                self._row = message.row
                torch.set_num_threads(message.num_threads)
                self._work(self._start, message.request, message.processors)
            elif isinstance(message, messages.Resolve) and message.row == self._row:
                self._work(self._answer, message)
            elif isinstance(message, messages.Stop):
                self._row = None

    def _start(self, request: DraftRequest, processors: tuple[bytes, ...]) -> None:
        self._engine = self.engine(request.config.assistant_quantization)
        device = self._engine.assistant.device
        request = dataclasses.replace(request, processors=messages.unpickle_processors(processors, device))
        self._engine.start(request)

    def _answer(self, message: messages.Resolve) -> None:
        speculation = self._engine.resolve(message.outcome, message.verify_ms)
        messages.send(self._connection, messages.Answer(message.row, messages.pack(speculation)))

    def _work(self, function: Any, *args: Any) -> bool:
        try:
            return bool(function(*args))
        except (EOFError, ConnectionError):
            raise
        except Exception:
            row, self._row = self._row, None
            messages.send(self._connection, messages.Failure(-1 if row is None else row, traceback.format_exc()))
            return False
