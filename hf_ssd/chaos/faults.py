"""What can go wrong around a call, and what has to come of it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal
from unittest import mock

import psutil

from ..config import Backend
from ..runtime import process
from ..runtime.arena import Arena
from ..runtime.process import AssistantWorker
from .saboteur import MISCHIEFS

HANG_TIMEOUT_S = 1.0  # after which a call of a fault that hangs gives the assistant up

Ending = Literal["degraded", "whole", "either", "interrupted"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Args:
        name: In words.
        backends: Where it can.
        ending: How the call has to end: `"degraded"`, without the assistant and with the cause in `ssd_stats`;
            `"whole"`, as if nothing had been; `"either"`, where the fault may strike too late to matter;
            `"interrupted"`, by the caller's own exception.
        strike: Called with the worker (`None` inline) at some step of the call.
        around: What the call runs within.
        mischief: What the assistant itself does, a key of `MISCHIEFS`.
        hangs: Whether an answer is waited for in vain, so that the run gets a short time-out.
    """

    name: str
    backends: tuple[Backend, ...]
    ending: Ending
    strike: Callable[[AssistantWorker | None], None] | None = None
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    mischief: str | None = None
    hangs: bool = False


class Interruption(Exception):
    """Raised by a caller's own criterion."""


def _signal(number: int, worker: AssistantWorker | None) -> None:
    assert worker is not None
    assert worker.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, number)


def _pause(worker: AssistantWorker | None) -> None:
    _signal(signal.SIGSTOP, worker)
    time.sleep(0.2)
    _signal(signal.SIGCONT, worker)


def _starve(worker: AssistantWorker | None) -> None:
    """Takes memory from the worker: what it has may stay, more it does not get."""
    assert worker is not None
    process_ = psutil.Process(worker.pid)
    process_.rlimit(psutil.RLIMIT_AS, (process_.memory_info().vms, process_.memory_info().vms))


def _disconnect(worker: AssistantWorker | None) -> None:
    assert worker is not None
    with socket.socket(fileno=os.dup(worker.connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _send(data: bytes, worker: AssistantWorker | None) -> None:
    assert worker is not None
    with contextlib.suppress(OSError):
        worker.connection.send_bytes(data)


def _write(data: bytes, worker: AssistantWorker | None) -> None:
    """Sends bytes as they are, without the length of a message before them."""
    assert worker is not None
    with contextlib.suppress(OSError):
        os.write(worker.connection.fileno(), data)


def _fork(worker: AssistantWorker | None) -> None:
    """Another thread's library forks the program. The fork ends what it takes for its own."""
    child = os.fork()
    if child == 0:
        if worker is not None:
            worker.close()
        os._exit(0)
    os.waitpid(child, 0)


def _raise(kind: type[BaseException], worker: AssistantWorker | None) -> None:
    raise kind


def _starting_with(statement: str) -> contextlib.AbstractContextManager[object]:
    """Lets the worker's program do something before it begins."""
    first, last = process.BOOTSTRAP.rsplit("; ", 1)
    return mock.patch.object(process, "BOOTSTRAP", f"{first}; {statement}; {last}")


@contextlib.contextmanager
def _hanging_start() -> Iterator[None]:
    with mock.patch.object(process, "START_TIMEOUT_S", HANG_TIMEOUT_S), _starting_with("import time; time.sleep(3600)"):
        yield


@contextlib.contextmanager
def _wild_clock() -> Iterator[None]:
    """The system's clock jumps, as when it is set."""
    source = random.Random(0)
    with mock.patch("time.time", side_effect=lambda: source.uniform(0, 4e9)):
        yield


def _failing(target: object, name: str, number: int) -> contextlib.AbstractContextManager[object]:
    """Lets a call of the system fail."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))  # a new one each time: it holds on to the frames that it comes from

    return mock.patch.object(target, name, fail)


_MISCHIEF_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "hangs": ("process", "stream"),
    "leaves": ("process",),
    "aborts": ("process",),
    "answers with rubbish": ("process",),
    "answers with nothing": ("process",),
    "answers with a message without end": ("process",),
    "answers from another version": ("process",),
}
_HARMLESS = ("dawdles", "scores are NaN")

FAULTS: tuple[Fault, ...] = (
    Fault("nothing", ("process", "stream", "inline"), "whole"),
    Fault("the worker is killed", ("process",), "degraded", partial(_signal, signal.SIGKILL)),
    Fault("the worker is asked to end", ("process",), "degraded", partial(_signal, signal.SIGTERM)),
    Fault("the worker is stopped", ("process",), "degraded", partial(_signal, signal.SIGSTOP), hangs=True),
    Fault("the worker is stopped for a moment", ("process",), "whole", _pause),
    Fault("the worker gets no more memory", ("process",), "either", _starve),
    Fault("the worker is sent rubbish", ("process",), "degraded", partial(_send, b"\x80rubbish")),
    Fault("the worker is sent nothing", ("process",), "degraded", partial(_send, b"")),
    Fault("the worker is sent a megabyte of rubbish", ("process",), "degraded", partial(_send, b"\x80r" * 2**19)),
    Fault(
        "the worker is sent half of a message",
        ("process",),
        "degraded",
        partial(_write, struct.pack("!i", 100) + b"x"),
        hangs=True,
    ),
    Fault(
        "the worker is sent a message without end",
        ("process",),
        "degraded",
        partial(_write, struct.pack("!iQ", -1, 2**60)),
    ),
    Fault("the connection is closed", ("process",), "degraded", _disconnect),
    Fault(
        "no process can be started",
        ("process",),
        "degraded",
        around=partial(_failing, subprocess, "Popen", errno.EAGAIN),
    ),
    Fault(
        "no shared memory is left",
        ("process",),
        "degraded",
        around=partial(_failing, Arena, "create", errno.ENOMEM),
    ),
    Fault(
        "the worker starts too slowly",
        ("process",),
        "degraded",
        around=lambda: mock.patch.object(process, "START_TIMEOUT_S", 0.05),
    ),
    Fault("the worker hangs while it starts", ("process",), "degraded", around=_hanging_start),
    Fault(
        "the worker leaves while it starts",
        ("process",),
        "degraded",
        around=partial(_starting_with, "raise SystemExit(3)"),
    ),
    Fault(
        "the worker is of another version",
        ("process",),
        "degraded",
        around=partial(_starting_with, "import hf_ssd.version; hf_ssd.version.__version__ = '0.0.0'"),
    ),
    Fault(
        "the worker does not hold the key",
        ("process",),
        "degraded",
        around=partial(_starting_with, "setup['key'] = '00' * 32"),
    ),
    Fault("the program is forked", ("process", "stream", "inline"), "whole", _fork),
    Fault("the clock jumps", ("process", "stream", "inline"), "whole", around=_wild_clock),
    Fault(
        "the caller's criterion raises",
        ("process", "stream", "inline"),
        "interrupted",
        partial(_raise, Interruption),
    ),
    Fault("Ctrl-C", ("process", "stream", "inline"), "interrupted", partial(_raise, KeyboardInterrupt)),
    *(
        Fault(
            f"the assistant {name}" if not name.startswith("scores") else f"the assistant's {name}",
            _MISCHIEF_BACKENDS.get(name, ("process", "stream")),
            "whole" if name in _HARMLESS else "either",
            mischief=name,
            hangs=name == "hangs",
        )
        for name in MISCHIEFS
    ),
)
