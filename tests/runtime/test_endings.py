"""However a program ends, its assistant's process ends too, and nothing is left; and what forks of a program may do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import is_gone, wait_until

ROOT = Path(__file__).parents[2]

PROGRAM = """
import atexit, os, signal, sys, threading, time
sys.path[:0] = {paths!r}
import torch
from streamers import Listener, take_time
from tiny_models import make_noisy, make_target, prompt
from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.generation import generate_with_ssd
from hf_ssd.runtime import pool

target, assistant = make_target(), make_noisy()
config = SSDConfig(backend="process")

def ssd(num_tokens=40, **kwargs):
    ids = generate_with_ssd(
        target, inputs=prompt(6), assistant_model=assistant, ssd_config=config, max_new_tokens=num_tokens, **kwargs
    )
    return ids.tolist()

def plain(num_tokens=40):
    return make_target().generate(prompt(6), max_new_tokens=num_tokens).tolist()

def pid():
    return pool.worker_process(assistant).pid

def during(action):
    "Calls for long, and acts in the midst of that."
    ssd(900, streamer=Listener(30, action), stopping_criteria=take_time())

"""


def program(then: str, folder: Path) -> subprocess.Popen[str]:
    paths = [str(ROOT), str(ROOT / "tests")]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(paths=paths) + textwrap.dedent(then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


ENDINGS = {
    "os._exit in the midst of a call": ("ssd(); print(pid(), flush=True); during(lambda: os._exit(3))", 3),
    "sys.exit in the midst of a call": ("ssd(); print(pid(), flush=True); during(lambda: sys.exit(4))", 4),
    "SIGTERM in the midst of a call": (
        "ssd(); print(pid(), flush=True); during(lambda: os.kill(os.getpid(), signal.SIGTERM))",
        -signal.SIGTERM,
    ),
    "SIGTERM that is turned into an exit": (
        """
        ssd()
        print(pid(), flush=True)
        signal.signal(signal.SIGTERM, lambda *args: sys.exit(5))
        during(lambda: threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start())
        """,
        5,
    ),
    "SIGKILL while the worker starts": (
        """
        enable_ssd(target, assistant_model=assistant, ssd_config=config)
        print(pid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        -signal.SIGKILL,
    ),
    "the end of the script while the worker starts": (
        "enable_ssd(target, assistant_model=assistant, ssd_config=config); print(pid(), flush=True)",
        0,
    ),
    "the end of the script while a daemon calls": (
        """
        ssd()
        print(pid(), flush=True)
        is_calling = threading.Event()
        threading.Thread(target=during, args=(is_calling.set,), daemon=True).start()
        assert is_calling.wait(60)
        """,
        0,
    ),
    "the end of the script while a thread calls": (
        """
        ssd()
        print(pid(), flush=True)
        def call():
            found = ssd(120, stopping_criteria=take_time())
            os._exit(6 if found == plain(120) and target.ssd_stats.degraded is None else 1)
        threading.Thread(target=call).start()
        """,
        6,
    ),
    "a call when the interpreter ends": (
        """
        def call():
            found = ssd()
            print(pid(), flush=True)
            os._exit(7 if found == plain() else 1)
        atexit.register(call)
        """,
        7,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left(name: str, tmp_path: Path) -> None:
    then, status = ENDINGS[name]
    before = shared_memory()
    caller = program(then, tmp_path)
    out, err = caller.communicate(timeout=200)
    assert caller.returncode == status, err
    assert "Traceback" not in err
    assert wait_until(lambda: is_gone(int(out))), "the worker has outlived its caller"
    assert list(tmp_path.iterdir()) == []
    assert shared_memory() <= before


FORKS = """
def in_fork(action):
    "What the fork's exit status says: 0 if the action went well. A fork that hangs is ended."
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(150)
            action()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def generates():
    for backend in ("process", "stream", "inline"):
        global config
        config = SSDConfig(backend=backend)
        assert ssd() == plain()
        assert target.ssd_stats.degraded is None, target.ssd_stats.degraded
        assert target.ssd_stats.acceptance > 0
    pool.close_worker(assistant)  # a fork of a test leaves through os._exit, which ends no worker

"""


@pytest.mark.slow
def test_a_fork_generates_with_a_worker_of_its_own(tmp_path: Path) -> None:
    """Between calls, and while another thread is in one: it holds the worker, which nobody would ever release there."""
    then = """
        assert ssd() == plain()
        first = pid()
        assert in_fork(generates) == 0
        assert ssd() == plain()
        assert (pid(), target.ssd_stats.degraded) == (first, None)

        is_calling, found = threading.Event(), []
        def call():
            found.append(ssd(300, streamer=Listener(30, is_calling.set), stopping_criteria=take_time()))
        thread = threading.Thread(target=call)
        thread.start()
        is_calling.wait(60)
        assert in_fork(generates) == 0
        thread.join()
        assert found == [plain(300)]
        assert (pid(), target.ssd_stats.degraded) == (first, None)
        print("well")
    """
    caller = program(FORKS + textwrap.dedent(then), tmp_path)
    out, err = caller.communicate(timeout=200)
    assert (caller.returncode, out) == (0, "well\n"), err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "stream", "inline"])
def test_a_fork_in_the_midst_of_a_call_goes_on_without_the_assistant(backend: str, tmp_path: Path) -> None:
    """Two processes that speak on one connection would get each other's answers."""
    then = f"""
        config = SSDConfig(backend={backend!r})
        assert ssd(200) == plain(200)
        parent, children = os.getpid(), []

        def fork():
            children.append(os.fork())
            signal.alarm(150)

        found = ssd(200, streamer=Listener(60, fork))
        is_right, degraded = found == plain(200), target.ssd_stats.degraded
        if os.getpid() != parent:
            is_told = degraded is None if {backend!r} == "inline" else "a fork of" in degraded
            os._exit(0 if is_right and is_told else 1)
        assert is_right
        assert degraded is None, degraded
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        assert ssd(200) == plain(200)
        assert target.ssd_stats.degraded is None
        print("well")
    """
    caller = program(then, tmp_path)
    out, err = caller.communicate(timeout=200)
    assert (caller.returncode, out) == (0, "well\n"), err
