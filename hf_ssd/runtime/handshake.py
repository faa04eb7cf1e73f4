"""How the caller and the assistant's process prove themselves to each other, before either unpickles anything.

Both hold a key that was made for this one process and handed to it through a pipe. Each side chooses a number, and the
other answers with a code (HMAC) of both numbers and of which side it is, so that neither a recorded answer nor one that
is sent back is worth anything. The process's answer also says which versions it runs, as JSON.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import secrets
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from .. import version

NONCE_BYTES = PROOF_BYTES = 32
MAX_VERSIONS_BYTES = 4096


class HandshakeError(Exception):
    """The other side has not proved itself, or is of another version."""


def versions() -> dict[str, str]:
    """What both sides must have the same of: messages between others might mean something else."""
    return {
        "hf_ssd": version.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def prove_to_caller(connection: Connection, key: bytes) -> None:
    """The process's part. It speaks first.

    Raises:
        HandshakeError: If the caller does not hold the key.
        EOFError, OSError: If it is gone, or sent more than the handshake has room for.
    """
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(own_nonce)
    answer = connection.recv_bytes(NONCE_BYTES + PROOF_BYTES)
    nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if len(proof) != PROOF_BYTES or not hmac.compare_digest(proof, _proof(key, b"caller", own_nonce, nonce)):
        raise HandshakeError("the caller does not hold the key")
    told = json.dumps(versions()).encode()
    connection.send_bytes(_proof(key, b"worker", nonce, own_nonce, told) + told)


def welcome_worker(connection: Connection, key: bytes, wait: Callable[[], None]) -> None:
    """The caller's part.

    Args:
        connection: To the process.
        key: The key.
        wait: Waits until the process has sent something, or raises.

    Raises:
        HandshakeError: If the process does not hold the key, or runs other versions than the caller.
        EOFError, OSError: If it is gone, or sent more than the handshake has room for.
    """
    wait()
    nonce = connection.recv_bytes(NONCE_BYTES)
    if len(nonce) != NONCE_BYTES:
        raise HandshakeError("the assistant's process began with what is no handshake")
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(own_nonce + _proof(key, b"caller", nonce, own_nonce))
    wait()
    answer = connection.recv_bytes(PROOF_BYTES + MAX_VERSIONS_BYTES)
    proof, told = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"worker", own_nonce, nonce, told)):
        raise HandshakeError("the assistant's process does not hold the key")
    _compare(json.loads(told))


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _compare(theirs: Mapping[str, Any]) -> None:
    ours = versions()
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        pairs = ", ".join(f"{name} {theirs.get(name)} (here {ours[name]})" for name in differing)
        raise HandshakeError(
            f"the assistant's process runs {pairs}: packages were changed after this program had started. Restart it"
        )
