"""Which backend a call drafts with, and the workers that are kept between calls."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import SSDConfig
from ..protocol import Speculator, SpeculatorError
from .inline import InlineSpeculator
from .placement import place_assistant
from .process import AssistantWorker, ProcessSpeculator, is_supported

logger = logging.get_logger(__name__)

# One worker per assistant. It ends with the assistant, or with the interpreter.
_WORKERS: weakref.WeakKeyDictionary[PreTrainedModel, AssistantWorker] = weakref.WeakKeyDictionary()


def start_worker(assistant: PreTrainedModel, target: PreTrainedModel, config: SSDConfig) -> AssistantWorker:
    """The worker of `assistant`, started if there is none that is alive, holds its weights and is on the right device.

    Raises:
        SpeculatorError: If it cannot be started.
        InsufficientMemoryError: If the device that the settings ask for has no room.
    """
    worker = _WORKERS.get(assistant)
    if worker is not None:
        is_placed = config.assistant_device in ("auto", worker.device)
        if worker.is_alive and is_placed and worker.holds(assistant):
            return worker
        worker.close()
    worker = AssistantWorker(str(place_assistant(assistant, target, config.assistant_device)))
    worker.start(assistant)
    _WORKERS[assistant] = worker
    weakref.finalize(assistant, worker.close)
    return worker


def close_worker(assistant: PreTrainedModel) -> None:
    """Ends the worker of `assistant`, if there is one. The next call starts another."""
    worker = _WORKERS.pop(assistant, None)
    if worker is not None:
        worker.close()


@contextlib.contextmanager
def speculator_for(
    assistant: PreTrainedModel, target: PreTrainedModel, config: SSDConfig, num_threads: int
) -> Iterator[Speculator]:
    """The speculator of one call. A worker serves one call at a time; others wait for it.

    Args:
        assistant: Drafts.
        target: Decides by its devices where the assistant goes.
        config: Settings of the call.
        num_threads: CPU threads of the assistant, where it has a process of its own.

    Raises:
        SpeculatorError: If there is no way to draft.
    """
    if config.backend == "process" and not is_supported():
        raise ValueError('`backend="process"` needs a POSIX system, which this is not. Use "auto" or "inline".')
    if config.backend == "inline" or not is_supported():
        yield InlineSpeculator(assistant)
        return
    try:
        worker = start_worker(assistant, target, config)
    except SpeculatorError as error:
        if config.backend == "process":
            raise
        logger.warning_once(
            f"The assistant drafts in the caller's thread, so nothing overlaps: {error}. Define its class in an "
            "importable "
            "module, and remove hooks from it, to give it a process of its own."
        )
        yield InlineSpeculator(assistant)
        return
    if worker.user == threading.get_ident():
        # A streamer or a criterion of the running call generates too; waiting for the worker would be for ever.
        yield InlineSpeculator(assistant)
        return
    with worker.lock:
        worker.user = threading.get_ident()
        try:
            yield ProcessSpeculator(worker, num_threads, config.timeout_s)
        finally:
            worker.user = None
