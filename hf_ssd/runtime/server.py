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

    Args:
        channel: To the caller.
        model: The assistant.
    """

    def __init__(self, channel: Channel, model: PreTrainedModel) -> None:
        self._channel = channel
        self._model = model
        self._engines: dict[str | None, DraftEngine] = {}
        self._row: int | None = None

    @torch.inference_mode()
    def engine(self, quantization: str | None) -> DraftEngine:
        """The engine that drafts with the assistant in this quantization, made when it is first asked for."""
        if quantization not in self._engines:
            self._engines[quantization] = DraftEngine(make_fast_assistant(self._model, quantization))
        return self._engines[quantization]

    def run(self) -> None:
        """Serves until the channel ends.

        Raises:
            EOFError, ConnectionError: When it does.
        """
        while True:
            # Without work to do this sleeps in `receive`.
            if self._row is not None and not self._channel.has_message() and self._work(self._engine.deepen):
                continue
            message = self._channel.receive()
            if isinstance(message, messages.Start):
                self._row = message.row
                self._work(self._start, message)
            elif isinstance(message, messages.Resolve) and message.row == self._row:
                self._work(self._answer, message)
            elif isinstance(message, messages.Stop):
                self._row = None

    def _start(self, message: messages.Start) -> None:
        # Of this thread alone: OpenMP keeps the number for each thread that asks for a team.
        if torch.get_num_threads() != message.num_threads:
            torch.set_num_threads(message.num_threads)
        self._engine = self.engine(message.request.config.assistant_quantization)
        sent = messages.unpickle_processors(message.processors, self._engine.assistant.device)
        request = dataclasses.replace(message.request, processors=[*message.request.processors, *sent])
        if isinstance(self._engine.assistant, GraphedAssistant):
            self._engine.assistant.prepare(request)
        if message.is_awaited:
            self._channel.send(messages.Started(message.row))
        self._engine.start(request)

    def _answer(self, message: messages.Resolve) -> None:
        speculation = self._engine.resolve(message.outcome, message.verify_ms)
        self._channel.send(messages.Answer(message.row, speculation))

    def _work(self, function: Callable[..., Any], *args: Any) -> bool:
        try:
            return bool(function(*args))
        except (EOFError, ConnectionError):
            raise
        except Exception:
            row, self._row = self._row, None
            self._channel.send(messages.Failure(-1 if row is None else row, traceback.format_exc()))
            return False
