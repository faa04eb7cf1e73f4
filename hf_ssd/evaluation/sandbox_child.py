"""Runs one program and its checks, after giving up the right to do anything else. A script that `sandbox.py` starts.

It imports nothing but the standard library. What it gives up, each where the system has it:

- limits on CPU time, memory, file sizes and open files (`resource`; memory is not limited on macOS);
- on Linux, x86-64 or ARM64: sockets, new processes and threads, signals to others and tracing (a seccomp filter);
- on Linux 5.13 or later: writing outside the working folder (Landlock);
- everywhere: the same three by an audit hook, which Python code cannot remove. Native code is not bound by it.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
import struct
import sys
from collections.abc import Callable
from typing import Any

EPERM, ENOSYS = 1, 38
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
# System call numbers: what opens sockets, starts processes and threads, or reaches into other processes. io_uring could
# open sockets without the calls for them.
FORBIDDEN_CALLS = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "connect": 42, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "kill": 62,
            "ptrace": 101, "mount": 165, "tkill": 200, "tgkill": 234, "unshare": 272, "setns": 308,
            "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "io_uring_setup": 425, "pidfd_send": 424,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "connect": 203, "socketpair": 199, "clone": 220, "kill": 129, "ptrace": 117, "mount": 40,
            "tkill": 130, "tgkill": 131, "unshare": 97, "setns": 268, "process_vm_readv": 270,
            "process_vm_writev": 271, "bpf": 280, "io_uring_setup": 425, "pidfd_send": 424,
        },
    ),
}  # fmt: skip
CLONE3 = 435

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
# Rights that are given up: writing, removing and making files of any kind; with later kernels renaming and truncating.
LANDLOCK_WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))
LANDLOCK_LATER = {2: 1 << 13, 3: 1 << 14}


def main() -> None:
    """Reads a job from standard input, gives up rights, runs it, and writes a verdict to a pipe."""
    job = json.load(sys.stdin)
    verdict = os.fdopen(job["verdict_fd"], "w", encoding="utf-8")
    in_force = limit_resources(job["limits"])
    if job["use_kernel"]:
        in_force += [name for name, give_up in KERNEL_LAYERS if give_up()]
    if job["use_audit_hook"]:
        sys.addaudithook(make_audit_hook(os.getcwd()))
        in_force.append("audit hook")
    verdict.write(json.dumps({"in_force": in_force}) + "\n")
    verdict.flush()
    # The nonce is written after the last check only: leaving early, by whatever way, is no pass.
    verdict.write(json.dumps(run(job["program"], job["checks"], job["nonce"])) + "\n")
    verdict.flush()
    os._exit(0)  # what the program left to run at exit stays unrun


def run(program: str, checks: str, nonce: str) -> dict[str, str]:
    namespace: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(program, "<program>", "exec"), namespace)
        exec(compile(checks, "<checks>", "exec"), namespace)
    except BaseException as error:  # SystemExit too
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"nonce": nonce}


def limit_resources(limits: dict[str, int]) -> list[str]:
    """Sets resource limits, and returns those that the system took."""
    import resource

    in_force = []
    for name, value in limits.items():
        try:
            # Were both limits the same, Linux would kill at once, and not say that it was for the time.
            hard = value + 1 if name == "CPU" else value
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))
        except (ValueError, OSError, AttributeError):
            continue
        in_force.append(f"limit on {name}")
    return in_force


def forbid_system_calls() -> bool:
    """Installs a seccomp filter on this process. `False` where the system has none."""
    if sys.platform != "linux" or platform.machine() not in FORBIDDEN_CALLS:
        return False
    architecture, calls = FORBIDDEN_CALLS[platform.machine()]
    load, jump_if_equal, jump_if_at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000
    program = [
        (load, 0, 0, 4),  # the architecture, so that numbers mean what they are taken for
        (jump_if_equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
        (jump_if_at_least, 0, 1, 0x40000000),  # the x32 names of the same calls
        (give, 0, 0, refuse | EPERM),
        (jump_if_equal, 0, 1, CLONE3),
        (give, 0, 0, refuse | ENOSYS),  # the C library then tries clone
    ]
    for number in calls.values():
        program += [(jump_if_equal, 0, 1, number), (give, 0, 0, refuse | EPERM)]
    program.append((give, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0)


def confine_writes() -> bool:
    """Lets this process write below its working folder only. `False` where the system cannot."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    rights = LANDLOCK_WRITES | sum(bit for since, bit in LANDLOCK_LATER.items() if version >= since)
    handled = ctypes.create_string_buffer(struct.pack("Q", rights), 8)
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(8), ctypes.c_uint(0))
    if rules < 0:
        return False
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    below = ctypes.create_string_buffer(struct.pack("=Qi", rights, folder), 12)
    ok = (
        libc.syscall(LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), below, ctypes.c_uint(0)) == 0
        and libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.syscall(LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0)) == 0
    )
    os.close(folder)
    os.close(rules)
    return bool(ok)


KERNEL_LAYERS: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("Landlock", confine_writes),
    ("seccomp", forbid_system_calls),
)


def make_audit_hook(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that refuses network, processes, native code, and writing outside `folder`."""
    refused = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
               "os.startfile", "pty.", "ctypes.", "signal.pthread_kill", "_thread.start_new_thread")  # fmt: skip
    changing = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
                "os.chown", "os.utime", "shutil.")  # fmt: skip
    inside = os.path.realpath(folder) + os.sep
    realpath, fspath, is_text = os.path.realpath, os.fspath, builtins.isinstance

    def is_outside(path: Any) -> bool:
        if is_text(path, int):
            return False
        text = fspath(path)
        return not (realpath(text.decode() if is_text(text, bytes) else text) + os.sep).startswith(inside)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(refused):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if event == "open":
            path, mode, flags = args
            writes = bool((flags or 0) & WRITE_FLAGS) or any(letter in (mode or "") for letter in "wax+")
            if writes and is_outside(path):
                raise PermissionError("writing outside the sandbox's folder is not allowed")
        elif event.startswith(changing) and any(is_outside(path) for path in args[:2] if is_text(path, (str, bytes))):
            raise PermissionError(f"{event} outside the sandbox's folder is not allowed")

    return hook


if __name__ == "__main__":
    main()
