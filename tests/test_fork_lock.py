"""A lock that another thread held when the process was forked is free in the fork."""

from __future__ import annotations

import os
import threading

from hf_ssd.fork_lock import ForkLock


def test_one_at_a_time_and_again_by_its_own_thread() -> None:
    lock, order = ForkLock(), []

    def run() -> None:
        with lock:
            order.append("second")

    thread = threading.Thread(target=run)
    with lock, lock:
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_it_is_free_in_a_fork() -> None:
    lock, is_held, may_leave = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(30)
    child = os.fork()
    if child == 0:
        with lock:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    may_leave.set()
    thread.join()
