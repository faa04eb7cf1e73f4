"""The loop that runs the assistant, wherever that is: answer outcomes, and draft ahead while no message waits."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..drafting import DraftEngine, GraphedAssistant, make_fast_assistant
from . import messages


class Channel(Protocol):
    """The assistant's end of the way to its caller."""

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        ...

    def receive(self) -> Any:
        """The next message; waits for it. Raises `EOFError` or `ConnectionError` when there will be none any more."""
        ...

    def send(self, message: Any) -> None:
        """Sends a message to the caller."""
        ...


class Server:
    """Answers outcomes, and drafts ahead whenever no message is waiting.

    Each row has an engine of its own; they share the assistant and what has been measured.

    Args:
        channel: To the caller.
        model: The assistant.
    """

    def __init__(self, channel: Channel, model: PreTrainedModel) -> None:
        self._channel = channel
        self._model = model
        self._engines: dict[str | None, list[DraftEngine]] = {}
        self._rows: dict[int, DraftEngine] = {}  # in the order in which they are drafted for next

    @torch.inference_mode()
    def engine(self, quantization: str | None) -> DraftEngine:
        """An engine that no row uses, with the assistant in this quantization, made where there is none."""
        engines = self._engines.setdefault(quantization, [])
        busy = {id(engine) for engine in self._rows.values()}
        free = next((engine for engine in engines if id(engine) not in busy), None)
        if free is not None:
            return free
        if not engines or isinstance(engines[0].assistant, GraphedAssistant):
            # Graphs belong to the slabs of one row.
            assistant = make_fast_assistant(self._model, quantization)
        else:
            assistant = engines[0].assistant
        engines.append(DraftEngine(assistant, like=engines[0] if engines else None))
        return engines[-1]

    def run(self) -> None:
        """Serves until the channel ends.

        Raises:
            EOFError, ConnectionError: When it does.
        """
        while True:
            # Without work to do this sleeps in `receive`.
            if self._rows and not self._channel.has_message() and self._deepen():
                continue
            message = self._channel.receive()
            if isinstance(message, messages.Start):
                self._work(message.row, self._start, message)
            elif isinstance(message, messages.Resolve) and message.row in self._rows:
                self._work(message.row, self._answer, message)
            elif isinstance(message, messages.Stop):
                self._rows.pop(message.row, None)

    def _deepen(self) -> bool:
        """Does one piece of drafting ahead, for the rows in turn. Returns whether there was one to do."""
        for row, engine in list(self._rows.items()):
            self._rows[row] = self._rows.pop(row)  # last in turn
            if self._work(row, engine.deepen):
                return True
        return False

    def _start(self, message: messages.Start) -> None:
        # Of this thread alone: OpenMP keeps the number for each thread that asks for a team.
        if torch.get_num_threads() != message.num_threads:
            torch.set_num_threads(message.num_threads)
        engine = self._rows[message.row] = self.engine(message.request.config.assistant_quantization)
        sent = messages.unpickle_processors(message.processors, engine.assistant.device)
        request = dataclasses.replace(message.request, processors=[*message.request.processors, *sent])
        if isinstance(engine.assistant, GraphedAssistant):
            engine.assistant.prepare(request)
        if message.is_awaited:
            self._channel.send(messages.Started(message.row))
        engine.start(request)

    def _answer(self, message: messages.Resolve) -> None:
        speculation = self._rows[message.row].resolve(message.outcome, message.verify_ms)
        self._channel.send(messages.Answer(message.row, speculation))

    def _work(self, row: int, function: Callable[..., Any], *args: Any) -> bool:
        try:
            return bool(function(*args))
        except (EOFError, ConnectionError):
            raise
        except Exception:
            self._rows.pop(row, None)
            self._channel.send(messages.Failure(row, traceback.format_exc()))
            return False
