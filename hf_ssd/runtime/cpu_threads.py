"""CPU threads of torch, set for one thread of the caller's program and for no other.

torch keeps their number for each thread that asks for a team of them, and gives a thread that has none yet the number
that was set last, wherever that was. A new thread of a server would so take what the call in another one leaves to the
target to be all there is, and keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..fork_lock import ForkLock

Result = TypeVar("Result")

_LOCK = ForkLock()


def set_own_threads(num_threads: int) -> None:
    """`torch.set_num_threads()` for the calling thread: those that are yet to start get what they would have got."""
    if torch.get_num_threads() == num_threads:
        return
    with _LOCK:
        try:
            inherited = _in_new_thread(torch.get_num_threads)
            torch.set_num_threads(num_threads)
            _in_new_thread(lambda: torch.set_num_threads(inherited))
        except RuntimeError:  # the interpreter is about to end, and starts no more threads
            torch.set_num_threads(num_threads)
        if torch.get_num_threads() != num_threads:  # a build in which all threads share one number
            torch.set_num_threads(num_threads)


def _in_new_thread(function: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(function).result()
