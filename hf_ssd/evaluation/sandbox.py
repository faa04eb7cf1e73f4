"""Runs generated code in a process of its own, with limits. It is never run in ours.

What binds that process is in `sandbox_child.py`; [`Outcome.in_force`] says which of it this system has. It is made for
code that a language model wrote, which goes wrong by accident. It does not claim to hold against an attacker who knows
it: for that use a virtual machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).parent / "sandbox_child.py"
MAX_VERDICT_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        seconds: Time on the clock, and on the CPU.
        memory_bytes: Address space.
        file_bytes: Size of each file that it writes.
        open_files: Files open at once.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 32

    def to_rlimits(self) -> dict[str, int]:
        """The limits by the names that `resource` has for them."""
        return {
            "CPU": max(1, round(self.seconds)),
            "AS": self.memory_bytes,
            "FSIZE": self.file_bytes,
            "NOFILE": self.open_files,
            "NPROC": 0,
            "CORE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        passed: Whether every check was reached and held.
        error: What went wrong, where something did.
        in_force: What bound the program: resource limits, `"seccomp"`, `"Landlock"`, `"audit hook"`.
    """

    passed: bool
    error: str | None = None
    in_force: tuple[str, ...] = ()


def run_checks(
    program: str,
    checks: str,
    limits: Limits | None = None,
    *,
    use_kernel: bool = True,
    use_audit_hook: bool = True,
) -> Outcome:
    """Runs a program and then checks of it, in a fresh interpreter, environment and temporary folder.

    Args:
        program: Source of the program.
        checks: Source that raises if the program is wrong, run in the program's namespace.
        limits: What it may use.
        use_kernel: Whether to have the kernel refuse network, processes and writes. For tests of the other layer.
        use_audit_hook: Whether to have Python's audit hook refuse them. For tests of the other layer.
    """
    limits, nonce = limits or Limits(), secrets.token_hex(16)
    read_fd, write_fd = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="hf-ssd-sandbox-") as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(CHILD)],
                cwd=folder,
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
            job = {
                "program": program,
                "checks": checks,
                "nonce": nonce,
                "verdict_fd": write_fd,
                "limits": limits.to_rlimits(),
                "use_kernel": use_kernel,
                "use_audit_hook": use_audit_hook,
            }
            timed_out = _feed_and_wait(process, json.dumps(job).encode(), limits.seconds)
            os.set_blocking(read_fd, False)
            lines = _read(read_fd).splitlines()
    finally:
        os.close(read_fd)
        os.close(write_fd)
    return _judge(lines, nonce, process.returncode, limits, timed_out=timed_out)


def _feed_and_wait(process: subprocess.Popen[bytes], job: bytes, seconds: float) -> bool:
    """Whether the time was over before the process was. It and all that it started are gone afterwards."""
    try:
        process.communicate(job, timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    except BrokenPipeError:
        return False
    finally:
        _kill_group(process)
    return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # harmless where it has ended; its group is empty then
    process.wait()


def _read(fd: int) -> str:
    try:
        return os.read(fd, MAX_VERDICT_BYTES).decode(errors="replace")
    except BlockingIOError:
        return ""


def _judge(lines: list[str], nonce: str, status: int, limits: Limits, *, timed_out: bool) -> Outcome:
    found = [_parse(line) for line in lines]
    in_force = tuple(str(name) for entry in found[:1] for name in entry.get("in_force", ()))
    if any(entry.get("nonce") == nonce for entry in found):
        return Outcome(True, None, in_force)
    if timed_out or status == -signal.SIGXCPU:
        return Outcome(False, f"TimeoutError: more than {limits.seconds:g} s", in_force)
    errors = [str(entry["error"]) for entry in found if "error" in entry]
    return Outcome(False, errors[0] if errors else f"ended with status {status} before the last check", in_force)


def _parse(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
