"""The assistant's process. Started as a program of its own by `process.py`, never imported by the caller's."""

from __future__ import annotations

import contextlib
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

from ..drafting.assistant import MASKED_ATTENTION
from . import messages
from .arena import Arena, ModelParcel, open_model
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
        server = _start(connection, Arena(setup["arena"], setup["arena_bytes"]))
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


def _start(connection: Connection, arena: Arena) -> Server | None:
    load: messages.Load = messages.receive(connection)
    logging.set_verbosity(load.log_level)
    try:
        channel = _ConnectionChannel(connection, arena, load.device)
        server = Server(channel, channel.open(load.parcel))
        arena.close_descriptor()
        takes_trees = server.engine(load.quantization).assistant.takes_trees
    except Exception:
        messages.send(connection, messages.Failure(-1, traceback.format_exc()))
        return None
    messages.send(connection, messages.Ready(takes_trees))
    return server


def _attend_with_masks(model: PreTrainedModel) -> None:
    """Replaces an attention that takes no masks, which trees need."""
    for name in ("sdpa", "eager"):
        with contextlib.suppress(ValueError, ImportError):  # not every family has both
            model.set_attn_implementation(name)
            return


class _ConnectionChannel:
    """A connection as a server uses it.

    Args:
        connection: To the caller.
        arena: Holds the weights of the models that come over it.
        device: Where they go.
    """

    def __init__(self, connection: Connection, arena: Arena, device: str) -> None:
        self._connection = connection
        self._arena = arena
        self._device = device

    def has_message(self, timeout_s: float = 0.0) -> bool:
        return self._connection.poll(timeout_s)

    def receive(self) -> Any:
        message = messages.receive(self._connection)
        if isinstance(message, messages.Renew) and message.parcel is not None:
            return messages.Renew(model=self.open(message.parcel))
        if isinstance(message, messages.Resolve):
            return messages.Resolve(message.row, messages.unpack_outcome(message.outcome), message.verify_ms)
        return message

    def open(self, parcel: ModelParcel) -> PreTrainedModel:
        """The model in `parcel`, ready to draft."""
        model = open_model(parcel, self._arena)
        assert isinstance(model, PreTrainedModel)
        model = model.eval().to(self._device)
        if model.config._attn_implementation not in MASKED_ATTENTION:
            _attend_with_masks(model)
        return model

    def send(self, message: Any) -> None:
        if isinstance(message, messages.Answer):
            message = messages.Answer(message.row, messages.pack(message.speculation))
        messages.send(self._connection, message)
