"""The loop that runs the assistant, wherever that is: answer outcomes, and draft ahead while no message waits."""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from ..drafting import DraftEngine, GraphedAssistant, Work, make_fast_assistant, work_together
from . import messages
from .cpu_threads import set_own_threads

T = TypeVar("T")

GATHER_S = 0.001  # the outcomes of a batch are sent one right after the other


class Channel(Protocol):
    """The assistant's end of the way to its caller."""

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Whether `receive` would return within some time, by default at once."""
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
        self._translation: Any = None
        self._engines: dict[str | None, list[DraftEngine]] = {}
        self._rows: dict[int, DraftEngine] = {}  # in the order in which they are drafted for next

    @torch.inference_mode()
    def engine(self, quantization: str | None, tokens: Sequence[int] = ()) -> DraftEngine:
        """An engine that no row uses, with the assistant in this quantization, made where there is none.

        Of several it is the one that knows most of the row's first `tokens`.
        """
        engines = self._engines.setdefault(quantization, [])
        busy = {id(engine) for engine in self._rows.values()}
        free = [engine for engine in engines if id(engine) not in busy]
        if free:
            return max(free, key=lambda engine: engine.num_known(tokens))
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
            self._handle(self._channel.receive())

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.Start):
            self._start(message)
        elif isinstance(message, messages.Translate):
            self._translation = message.translation  # made of it when a row begins, which may fail
        elif isinstance(message, messages.Resolve):
            resolves, other = self._gather(message)
            self._answer([each for each in resolves if each.row in self._rows])
            if other is not None:
                self._handle(other)
        elif isinstance(message, messages.Stop):
            self._rows.pop(message.row, None)
        elif isinstance(message, messages.Renew):
            self._renew(message.model)

    def _renew(self, model: PreTrainedModel | None) -> None:
        """Drops what was computed or copied from the weights as they were, and all else where the modules are new."""
        self._rows.clear()
        if model is not None:
            self._model = model
            self._engines.clear()
        for quantization, engines in list(self._engines.items()):
            if engines and engines[0].assistant.is_quantized:
                del self._engines[quantization]
            for engine in engines:
                engine.forget()

    def _gather(self, message: messages.Resolve) -> tuple[list[messages.Resolve], Any]:
        """The outcomes that come together: those of a batch do. And the message after them, if it has been read."""
        resolves = [message]
        while len(resolves) < len(self._rows) and self._channel.has_message(GATHER_S):
            other = self._channel.receive()
            if not isinstance(other, messages.Resolve):
                return resolves, other
            resolves.append(other)
        return resolves, None

    def _deepen(self) -> bool:
        """Does one piece of drafting ahead for every row that has one to do. Returns whether there was any."""
        return any(self._together({row: engine.deepening() for row, engine in self._rows.items()}).values())

    def _answer(self, resolves: Sequence[messages.Resolve]) -> None:
        works = {each.row: self._rows[each.row].resolving(each.outcome, each.verify_ms) for each in resolves}
        for row, speculation in self._together(works).items():
            self._channel.send(messages.Answer(row, speculation))

    def _start(self, message: messages.Start) -> None:
        try:
            self._start_row(message)
        except (EOFError, ConnectionError):
            raise
        except Exception:
            self._give_up([message.row])

    def _start_row(self, message: messages.Start) -> None:
        set_own_threads(message.num_threads)
        request = message.request
        tokens = request.prompt_ids[request.num_padding :]
        engine = self._rows[message.row] = self.engine(request.config.assistant_quantization, tokens)
        sent = messages.unpickle_processors(message.processors, engine.assistant.device)
        if isinstance(self._translation, bytes):
            self._translation = pickle.loads(self._translation)
        request = dataclasses.replace(
            request,
            processors=[*request.processors, *sent],
            translation=request.translation or self._translation,
        )
        if isinstance(engine.assistant, GraphedAssistant):
            engine.assistant.prepare(request)
        if message.is_awaited:
            self._channel.send(messages.Started(message.row))
        engine.start(request)

    def _together(self, works: Mapping[int, Work[T]]) -> dict[int, T]:
        """Does the work of several rows, as far as they share an assistant in one go. A row that fails is given up."""
        rows_by_assistant: dict[int, list[int]] = {}
        for row in works:
            rows_by_assistant.setdefault(id(self._rows[row].assistant), []).append(row)
        results: dict[int, T] = {}
        for rows in rows_by_assistant.values():
            assistant = self._rows[rows[0]].assistant
            try:
                results.update(zip(rows, work_together(assistant, [works[row] for row in rows]), strict=True))
            except Exception:
                self._give_up(rows)
        return results

    def _give_up(self, rows: Sequence[int]) -> None:
        for row in rows:
            engine = self._rows.pop(row, None)
            if engine is not None:
                engine.forget()  # some layers may have got further than others
            self._channel.send(messages.Failure(row, traceback.format_exc()))
