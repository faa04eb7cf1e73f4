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
from .placement import normalize_device, place_assistant
from .process import AssistantLoadError, AssistantWorker, ProcessSpeculator, is_supported

logger = logging.get_logger(__name__)

# One worker per assistant. It ends with the assistant, or with the interpreter.
_WORKERS: weakref.WeakKeyDictionary[PreTrainedModel, AssistantWorker] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
# Assistants that cannot live in another process. They need not be tried at every call.
_INLINE_ONLY: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def start_worker(assistant: PreTrainedModel, target: PreTrainedModel, config: SSDConfig) -> AssistantWorker:
    """The worker of `assistant`, started if there is none that is alive, holds its weights and is on the right device.

    One that is no longer right is replaced once the call that it serves is done.

    Raises:
        SpeculatorError: If it cannot be started.
        InsufficientMemoryError: If the device that the settings ask for has no room.
    """
    wanted = config.assistant_device
    with _LOCK:
        worker = _WORKERS.get(assistant)
        if worker is not None:
            is_placed = wanted == "auto" or str(normalize_device(wanted)) == worker.device
            if worker.user == threading.get_ident() or (worker.is_alive and is_placed and worker.holds(assistant)):
                return worker
            with worker.lock:
                worker.close()
        worker = AssistantWorker(str(place_assistant(assistant, target, wanted)), config.assistant_quantization)
        worker.start(assistant)
        _WORKERS[assistant] = worker
        worker.finalizer = weakref.finalize(assistant, worker.close)
        return worker


def close_worker(assistant: PreTrainedModel) -> None:
    """Ends the worker of `assistant`, if there is one. The next call starts another."""
    with _LOCK:
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
        SpeculatorError: If the assistant cannot have the process that `backend="process"` asks for.
        ValueError: If the backend does not allow the settings.
    """
    if config.backend == "process" and not is_supported():
        raise ValueError('`backend="process"` needs a POSIX system, which this is not. Use "auto" or "inline".')
    if config.backend != "inline" and is_supported() and assistant not in _INLINE_ONLY:
        with contextlib.ExitStack() as stack:
            worker = _acquire(assistant, target, config, stack)
            if worker is not None:
                yield ProcessSpeculator(worker, num_threads, config.timeout_s)
                return
    if config.assistant_device != "auto" and normalize_device(config.assistant_device) != assistant.device:
        raise ValueError(
            f'`assistant_device` must be "auto" where the assistant drafts in the caller\'s thread, but got '
            f'"{config.assistant_device}". Move the assistant there, or use `backend="process"`.'
        )
    yield InlineSpeculator(assistant, config.assistant_quantization)


def _acquire(
    assistant: PreTrainedModel, target: PreTrainedModel, config: SSDConfig, stack: contextlib.ExitStack
) -> AssistantWorker | None:
    """The assistant's worker, loaded and reserved until `stack` unwinds; `None` if the call must draft inline."""
    try:
        while True:
            worker = start_worker(assistant, target, config)
            if worker.user == threading.get_ident():
                # A streamer or a criterion of the running call generates too; waiting for that call would be for ever.
                return None
            stack.enter_context(worker.reserve())
            if worker.is_alive:
                break
            stack.close()  # it died, or was replaced, while this call waited for it
        worker.wait_ready()
    except AssistantLoadError as error:
        if config.backend == "process":
            raise
        _INLINE_ONLY.add(assistant)
        logger.warning_once(
            f"The assistant drafts in the caller's thread, so nothing overlaps: {error}. To give it a process of its "
            "own, define its class in an importable module and remove hooks from it."
        )
        stack.close()
        return None
    except SpeculatorError:
        pass  # it says so again when the row starts, and the row goes on without it
    return worker
