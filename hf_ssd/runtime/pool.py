"""Which backend a call drafts with, and the workers that are kept between calls."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import SSDConfig
from ..fork_lock import ForkLock
from ..protocol import Speculator, SpeculatorError
from ..wrappers import input_device
from .backoff import Backoff
from .inline import InlineSpeculator
from .placement import normalize_device, place_assistant
from .process import AssistantLoadError, AssistantWorker, is_supported
from .speculator import LostSpeculator, Worker, WorkerSpeculator
from .stream import StreamWorker

logger = logging.get_logger(__name__)

# One worker of each kind per assistant. It ends with the assistant, or with the interpreter.
_WORKERS: weakref.WeakKeyDictionary[PreTrainedModel, Worker] = weakref.WeakKeyDictionary()
_THREADS: weakref.WeakKeyDictionary[PreTrainedModel, Worker] = weakref.WeakKeyDictionary()
_LOCK = ForkLock()
# Of assistants whose worker has failed.
_BACKOFFS: weakref.WeakKeyDictionary[PreTrainedModel, Backoff] = weakref.WeakKeyDictionary()
_BUSY = "the assistant is busy with another call"
# Assistants that cannot live in another process. They need not be tried at every call.
_THREAD_ONLY: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class BusyError(SpeculatorError):
    """Another call has the assistant, and is not waited for."""


def start_worker(
    assistant: PreTrainedModel, target: PreTrainedModel, config: SSDConfig, *, waits: bool = True
) -> Worker:
    """The worker of `assistant`, started if there is none that is alive, holds its weights and is on the right device.

    One that is no longer right is replaced once the call that it serves is done, if `waits`.

    Raises:
        BusyError: If it would have to be waited for.
        SpeculatorError: If it cannot be started.
        InsufficientMemoryError: If the device that the settings ask for has no room.
        ValueError: If it is no device, or one that the assistant would have to be moved to by the caller.
    """
    wanted = config.assistant_device
    in_thread = drafts_in_thread(assistant, config)
    if in_thread:
        wanted = _device_in_caller(assistant, wanted)
    workers = _THREADS if in_thread else _WORKERS
    while True:
        with _LOCK:
            worker = workers.get(assistant)
            if worker is not None and not worker.is_own:
                worker = None  # this process is a fork: the other one goes on using it
            if worker is not None:
                is_placed = wanted == "auto" or str(normalize_device(wanted)) == worker.device
                if worker.user == threading.get_ident() or (worker.is_alive and is_placed and worker.holds(assistant)):
                    return worker
            if worker is None or worker.lock.acquire(blocking=False):
                if worker is not None:
                    worker.close()
                    worker.lock.release()
                if in_thread:
                    worker = StreamWorker(wanted, config.assistant_quantization)
                else:
                    device = place_assistant(assistant, target, wanted)
                    worker = AssistantWorker(str(device), config.assistant_quantization)
                worker.start(assistant)
                workers[assistant] = worker
                worker.finalizer = weakref.finalize(assistant, worker.close)
                return worker
        if not waits:
            raise BusyError(_BUSY)
        # Not within `_LOCK`: the call that it serves may itself want a worker before it is done.
        with worker.lock:
            pass


def worker_process(assistant: PreTrainedModel) -> AssistantWorker | None:
    """The process that holds `assistant`, if it has one."""
    worker = _WORKERS.get(assistant)
    assert worker is None or isinstance(worker, AssistantWorker)
    return worker


def living_workers(assistant: PreTrainedModel) -> tuple[bool, bool]:
    """Whether `assistant` has a process, and whether it has a thread, that could draft now."""
    process, thread = _WORKERS.get(assistant), _THREADS.get(assistant)
    return process is not None and process.is_alive, thread is not None and thread.is_alive


def close_worker(assistant: PreTrainedModel) -> None:
    """Ends the workers of `assistant`, if there are any. The next call starts another."""
    with _LOCK:
        workers = [_WORKERS.pop(assistant, None), _THREADS.pop(assistant, None)]
    for worker in workers:
        if worker is not None:
            worker.close()


def is_busy(assistant: PreTrainedModel) -> bool:
    """Whether another call has the assistant now."""
    workers = (_WORKERS.get(assistant), _THREADS.get(assistant))
    # Of a fork of the process, where nobody would ever open the lock, it is no worker.
    return any(worker is not None and worker.is_own and worker.lock.locked() for worker in workers)


def drafts_in_thread(assistant: PreTrainedModel, config: SSDConfig) -> bool:
    """Whether the settings lead to a thread rather than a process."""
    has_process = is_supported() and assistant not in _THREAD_ONLY
    return config.backend == "stream" or (config.backend == "auto" and not has_process)


@contextlib.contextmanager
def speculator_for(
    assistant: PreTrainedModel, target: PreTrainedModel, config: SSDConfig, num_threads: int, *, waits: bool = True
) -> Iterator[Speculator]:
    """The speculator of one call. A worker serves one call at a time; others wait for it.

    Args:
        assistant: Drafts.
        target: Decides by its devices where the assistant goes.
        config: Settings of the call.
        num_threads: CPU threads of the assistant, where it has a process or a thread of its own.
        waits: Whether to wait for it. A call that has one worker may not: the other call may be waiting for that.

    Where a worker is busy and not waited for, cannot be started, or has failed several times in a row, the speculator
    says so when it is asked, and the call goes on without it.

    Raises:
        AssistantLoadError: If the assistant cannot have the process that `backend="process"` asks for.
        ValueError: If the backend does not allow the settings.
    """
    if config.backend == "process" and not is_supported():
        raise ValueError('`backend="process"` needs a POSIX system, which this is not. Use "auto" or "stream".')
    if config.backend != "inline":
        with contextlib.ExitStack() as stack:
            try:
                worker = _acquire(assistant, target, config, stack, waits=waits)
            except AssistantLoadError:
                raise
            except SpeculatorError as error:
                yield LostSpeculator(str(error))
                return
            if worker is not None:
                yield WorkerSpeculator(worker, num_threads, config.timeout_s)
                # Not where the caller's own exception ended the call, and the worker with it.
                _take_note(assistant, has_failed=not worker.is_alive)
                return
        if not _is_in_place(assistant, config.assistant_device):
            yield LostSpeculator("the assistant is busy with the call that this one is part of")
            return
    _device_in_caller(assistant, config.assistant_device)
    yield InlineSpeculator(assistant, config.assistant_quantization)


def _acquire(
    assistant: PreTrainedModel,
    target: PreTrainedModel,
    config: SSDConfig,
    stack: contextlib.ExitStack,
    *,
    waits: bool,
) -> Worker | None:
    """The assistant's worker, loaded and reserved until `stack` unwinds; `None` if the call must draft inline."""
    _check_backoff(assistant)
    while True:
        worker = None
        try:
            worker = start_worker(assistant, target, config, waits=waits)
            if worker.user == threading.get_ident():
                # A streamer or a criterion of the running call generates too; waiting for that call would be for ever.
                return None
            if not stack.enter_context(worker.reserve(waits=waits)):
                raise BusyError(_BUSY)
            if worker.is_alive:
                worker.wait_ready()
                worker.renew(assistant)
            if worker.is_alive:
                return worker
        except BusyError:
            raise
        except AssistantLoadError as error:
            if config.backend == "process":
                raise
            if not _is_in_place(assistant, config.assistant_device):
                _take_note(assistant, has_failed=True)
                raise SpeculatorError(str(error)) from error
            _THREAD_ONLY.add(assistant)
            logger.warning_once(
                f"The assistant drafts in a thread of the caller's process, which overlaps less: {error}. To give it a "
                "process of its own, define its class in an importable module and remove hooks from it."
            )
        except SpeculatorError:
            if worker is None:
                _take_note(assistant, has_failed=True)
                raise
            return worker  # it says so again when the row starts, and the row goes on without it
        stack.close()  # it has to be a thread, or the worker died, was replaced while this call waited, or ended


def _check_backoff(assistant: PreTrainedModel) -> None:
    """Raises [`SpeculatorError`] where the assistant has failed too often to be tried again now."""
    backoff = _BACKOFFS.get(assistant)
    if backoff is not None and backoff.wait_s > 0:
        raise SpeculatorError(
            f"the assistant has failed {backoff.num_failures} times in a row, and is tried again in "
            f"{backoff.wait_s:.0f} s"
        )


def _take_note(assistant: PreTrainedModel, *, has_failed: bool) -> None:
    backoff = _BACKOFFS.setdefault(assistant, Backoff())
    if has_failed:
        backoff.failed()
    else:
        backoff.succeeded()


def _is_in_place(assistant: PreTrainedModel, requested: str) -> bool:
    """Whether an assistant already is on the device that is asked for."""
    return requested == "auto" or normalize_device(requested) == normalize_device(input_device(assistant))


def _device_in_caller(assistant: PreTrainedModel, requested: str) -> str:
    """The device of an assistant that is used where it is.

    Raises:
        ValueError: If another is requested.
    """
    device = normalize_device(input_device(assistant))
    if not _is_in_place(assistant, requested):
        raise ValueError(
            f'`assistant_device` must be "auto" where the assistant drafts in the caller\'s process, but got '
            f'"{requested}". Move the assistant there, or use `backend="process"`.'
        )
    return str(device)
