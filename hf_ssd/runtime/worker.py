"""The assistant's process. Started as a program of its own by `process.py`, never imported by the caller's."""

from __future__ import annotations

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

from . import messages
from .arena import Arena, open_model
from .server import Server

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
    except Exception:
        # What came was no message of this version. The caller sees the end of the connection.
        logger.warning(f"The assistant's process gives up:\n{traceback.format_exc()}")
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
        server = Server(_ConnectionChannel(connection), model)
        takes_trees = server.engine(load.quantization).assistant.takes_trees
    except Exception:
        messages.send(connection, messages.Failure(-1, traceback.format_exc()))
        return None
    messages.send(connection, messages.Ready(takes_trees))
    return server


class _ConnectionChannel:
    """A connection as a server uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def has_message(self, timeout_s: float = 0.0) -> bool:
        return self._connection.poll(timeout_s)

    def receive(self) -> Any:
        return messages.receive(self._connection)

    def send(self, message: Any) -> None:
        if isinstance(message, messages.Answer):
            message = messages.Answer(message.row, messages.pack(message.speculation))
        messages.send(self._connection, message)
