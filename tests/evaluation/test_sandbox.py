"""Programs that go wrong in every way that a model's code may, in the sandbox that HumanEval's answers run in."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from pathlib import Path

import pytest

from hf_ssd.evaluation.sandbox import Limits, Outcome, run_checks

LAYERS = {
    "kernel": {"use_audit_hook": False},
    "audit hook": {"use_kernel": False},
    "both": {},
}
HAS_SECCOMP = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
ENDLESS = "while True: pass"


@pytest.fixture(params=[name for name in LAYERS if name != "kernel" or HAS_SECCOMP])
def layers(request: pytest.FixtureRequest) -> dict[str, bool]:
    return LAYERS[request.param]


def test_what_holds_passes_and_what_does_not_fails() -> None:
    program = "def double(x):\n    return 2 * x\n"
    assert run_checks(program, "assert double(2) == 4").passed
    failed = run_checks(program, "assert double(2) == 5, 'no'")
    assert not failed.passed
    assert failed.error == "AssertionError: no"
    assert "SyntaxError" in str(run_checks("def f(:", "").error)


def test_an_endless_loop_is_ended() -> None:
    start = time.monotonic()
    outcome = run_checks(ENDLESS, "", Limits(seconds=1))
    assert not outcome.passed
    assert "TimeoutError: more than 1 s" in str(outcome.error)
    assert time.monotonic() - start < 10


def test_the_limit_on_the_cpu_is_told_from_other_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a clock that is far from over, the processor's time ends first.
    monkeypatch.setattr(Limits, "to_rlimits", lambda limits: {"CPU": 1})
    outcome = run_checks(ENDLESS, "", Limits(seconds=60))
    assert outcome.error == "TimeoutError: more than 60 s"


def test_sleeping_is_ended_too() -> None:
    assert "TimeoutError" in str(run_checks("import time; time.sleep(60)", "", Limits(seconds=1)).error)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit address space")
def test_memory_is_limited() -> None:
    assert "MemoryError" in str(run_checks("x = bytearray(4 << 30)", "").error)


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit(0)"]
)
def test_leaving_early_is_no_pass(program: str) -> None:
    outcome = run_checks(program, "assert False")
    assert not outcome.passed
    assert outcome.error


def test_a_verdict_without_the_nonce_is_no_pass() -> None:
    program = (
        "import os\nfor fd in range(3, 32):\n"
        '    try: os.write(fd, b\'{"nonce": "guess"}\\n\')\n    except OSError: pass\n'
    )
    assert not run_checks(program + "os._exit(0)", "").passed


def test_processes_and_threads_are_refused(layers: dict[str, bool]) -> None:
    for start in ("import os; os.fork()", "import subprocess; subprocess.run(['true'])"):
        outcome = run_checks(start, "", **layers)
        assert not outcome.passed, outcome
        assert "PermissionError" in str(outcome.error) or "Error" in str(outcome.error)


def test_a_fork_bomb_leaves_no_process() -> None:
    before = processes_of_the_sandbox()
    outcome = run_checks("import os\nwhile True: os.fork()", "", Limits(seconds=2))
    assert not outcome.passed
    assert processes_of_the_sandbox() <= before


def processes_of_the_sandbox() -> set[str]:
    if not Path("/proc").is_dir():
        return set()
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"sandbox_child" in (entry / "cmdline").read_bytes():
                found.add(entry.name)
        except OSError:
            continue
    return found


def test_the_network_is_refused(layers: dict[str, bool]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run_checks(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)", "", **layers)
        assert not outcome.passed
        assert "Error" in str(outcome.error)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_writing_outside_is_refused_and_inside_allowed(layers: dict[str, bool], tmp_path: Path) -> None:
    outcome = run_checks("open('inside.txt', 'w').write('x')", "assert open('inside.txt').read() == 'x'", **layers)
    if "use_audit_hook" in layers and "Landlock" not in outcome.in_force:
        pytest.skip("this kernel has no Landlock")
    assert outcome.passed, outcome
    target = tmp_path / "outside.txt"
    for attempt in (f"open({str(target)!r}, 'w')", f"import os; os.mkdir({str(target)!r})"):
        assert "PermissionError" in str(run_checks(attempt, "", **layers).error)
    (tmp_path / "kept.txt").write_text("kept")
    assert not run_checks(f"import os; os.remove({str(tmp_path / 'kept.txt')!r})", "", **layers).passed
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_files_are_limited() -> None:
    outcome = run_checks("open('big', 'wb').write(bytes(1 << 24))", "", Limits(file_bytes=1 << 16))
    assert not outcome.passed


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_checks("import os", "assert 'HF_TOKEN' not in os.environ and 'HOME' not in os.environ").passed


def test_our_process_is_untouched() -> None:
    before = dict(os.environ), os.getcwd(), set(sys.modules)
    run_checks("import os, sys; os.environ['X'] = '1'; sys.setrecursionlimit(50)", "")
    assert (dict(os.environ), os.getcwd(), set(sys.modules)) == before


@pytest.mark.skipif(not HAS_SECCOMP, reason="needs seccomp")
def test_what_is_in_force_is_said() -> None:
    outcome = run_checks("", "")
    assert isinstance(outcome, Outcome)
    assert {"limit on CPU", "limit on AS", "seccomp", "audit hook"} <= set(outcome.in_force)
