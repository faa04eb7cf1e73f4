"""Hostile peers: refused before anything is unpickled, with bounded reading, and the call goes on."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_models import prompt

from hf_ssd import SSDConfig
from hf_ssd.generation import generate_with_ssd
from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime import handshake, messages, pool, process
from hf_ssd.runtime.answers import receive_answer
from hf_ssd.runtime.handshake import HandshakeError, prove_to_caller, welcome_worker
from hf_ssd.runtime.messages import Answer, Failure, MessageError, Ready
from hf_ssd.runtime.process import AssistantWorker
from hf_ssd.runtime.speculator import WorkerSpeculator
from hf_ssd.types import Miss, Origin, Span, Speculation

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
Side = Callable[[Connection, bytes], None]


def welcome(connection: Connection, key: bytes) -> None:
    welcome_worker(connection, key, lambda: None)


class Pair:
    """Two ends of a socket pair, of which the first is one of ours."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.ours, self.theirs = Connection(ours.detach()), Connection(theirs.detach())

    def run(self, side: Side, peer: Callable[[Connection], Any], key: bytes = KEY) -> BaseException | None:
        """What our side raises while the peer does what it does, and then leaves."""
        found: list[BaseException | None] = []

        def run() -> None:
            try:
                side(self.ours, key)
                found.append(None)
            except BaseException as error:
                found.append(error)
            finally:
                self.ours.close()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            peer(self.theirs)
        except (EOFError, OSError, HandshakeError):
            pass
        finally:
            self.theirs.close()
            thread.join(20)
        assert not thread.is_alive(), "it waits for ever"
        return found[0]


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


class TestHandshake:
    def test_both_hold_the_key(self) -> None:
        assert Pair().run(prove_to_caller, lambda peer: welcome(peer, KEY)) is None
        assert Pair().run(welcome, lambda peer: prove_to_caller(peer, KEY)) is None

    def test_a_wrong_key_is_refused_by_either_side(self) -> None:
        assert isinstance(Pair().run(prove_to_caller, lambda peer: welcome(peer, OTHER_KEY)), HandshakeError)
        # The process is the first to know, and leaves.
        assert isinstance(
            Pair().run(welcome, lambda peer: prove_to_caller(peer, OTHER_KEY)), (HandshakeError, EOFError)
        )

    def test_a_worker_that_knows_only_the_caller_s_proof(self) -> None:
        """It cannot make one of its own from that, nor send it back."""

        def reflects(peer: Connection) -> None:
            peer.send_bytes(bytes(32))
            answer = peer.recv_bytes()
            peer.send_bytes(answer[32:] + b"{}")

        assert "does not hold the key" in str(Pair().run(welcome, reflects))

    @pytest.mark.parametrize("side", [prove_to_caller, welcome])
    def test_a_recorded_handshake_is_worth_nothing(self, side: Side) -> None:
        """What one side sent in a good handshake is sent again to another of the same key."""
        recorded: list[bytes] = []
        other: Side = welcome if side is prove_to_caller else prove_to_caller

        class Recording(Connection):
            def send_bytes(self, buf: bytes, *args: Any) -> None:  # type: ignore[override]
                recorded.append(bytes(buf))
                super().send_bytes(buf, *args)

        def record(peer: Connection) -> None:
            other(Recording(os.dup(peer.fileno())), KEY)

        assert Pair().run(side, record) is None

        def replay(peer: Connection) -> None:
            for data in recorded:
                peer.send_bytes(data)
            time.sleep(0.1)

        assert isinstance(Pair().run(side, replay), HandshakeError)

    @pytest.mark.parametrize("side", [prove_to_caller, welcome])
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x00\x00",  # half of a length
            struct.pack("!i", 64) + b"x" * 10,  # less than it says
            struct.pack("!i", 0),
            struct.pack("!i", 2**31 - 1) + b"x" * 1000,
            struct.pack("!iQ", -1, 2**60) + b"x" * 1000,
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            struct.pack("!i", 64) + b"x" * 64 + struct.pack("!i", 40) + b"y" * 40,
            os.urandom(4096),
        ],
    )
    def test_rubbish_ends_it_without_more_than_it_may_read(self, side: Side, data: bytes) -> None:
        before = psutil.Process().memory_info().rss
        error = Pair().run(side, lambda peer: os.write(peer.fileno(), data))
        assert isinstance(error, (HandshakeError, EOFError, OSError))
        assert psutil.Process().memory_info().rss < before + 50e6

    def test_nothing_is_unpickled_before(self, tmp_path: Path) -> None:
        trap = pickle.dumps(Trap(tmp_path / "sprung"))
        for side in (prove_to_caller, welcome):
            assert Pair().run(side, lambda peer: [peer.send_bytes(trap) for _ in range(3)]) is not None
        assert not (tmp_path / "sprung").exists()

    def test_other_versions_are_refused_with_what_to_do(self, monkeypatch) -> None:
        theirs = {**handshake.versions(), "hf_ssd": "9.9"}
        ours = handshake.versions()
        is_worker = threading.local()
        monkeypatch.setattr(handshake, "versions", lambda: theirs if getattr(is_worker, "yes", False) else ours)

        def prove(peer: Connection) -> None:
            is_worker.yes = True
            prove_to_caller(peer, KEY)

        error = Pair().run(welcome, prove)
        del is_worker.yes
        assert isinstance(error, HandshakeError)
        assert str(error) == (
            f"the assistant's process runs hf_ssd 9.9 (here {ours['hf_ssd']}): packages were changed after this "
            "program had started. Restart it"
        )


class TestAnswers:
    """From the process to the caller: of what comes, only answers are made."""

    def received(self, data: bytes) -> Any:
        pair = Pair()
        threading.Thread(target=pair.theirs.send_bytes, args=(data,)).start()
        return receive_answer(pair.ours)

    def test_answers_come_as_they_were_sent(self) -> None:
        speculation = Speculation.chain(
            (3, 5), draft_probs=torch.rand(2, 7), origin=Origin.CACHE, miss=Miss.TOKEN, spans=(Span("a", 1, 2),)
        )
        for message in (Ready(True), Failure(3, "broken"), Answer(1, Speculation())):
            assert self.received(pickle.dumps(message)) == message
        answer = self.received(pickle.dumps(Answer(2, messages.pack(speculation)), pickle.HIGHEST_PROTOCOL))
        found = messages.unpack(answer.speculation)
        assert torch.equal(found.draft_probs, speculation.draft_probs)
        assert (found.tokens, found.origin, found.miss, found.spans) == (
            (3, 5),
            Origin.CACHE,
            Miss.TOKEN,
            speculation.spans,
        )

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x80rubbish",
            pickle.dumps(Answer(1, Speculation()))[:-5],
            pickle.dumps(("a", "tuple")),
            pickle.dumps(Answer("one", Speculation())),
            pickle.dumps(Answer(1, None)),
            pickle.dumps(Failure(1, b"bytes")),
            pickle.dumps(torch.ones(2)),
            b"chf_ssd.runtime.messages\npickle.loads\n.",  # a dotted name leads anywhere
            b"\x80\x04\x8c\x18hf_ssd.runtime.messages\x8c\x0cpickle.loads\x93.",
        ],
    )
    def test_what_is_no_answer(self, data: bytes) -> None:
        with pytest.raises(MessageError):
            self.received(data)

    def test_code_is_not_run(self, tmp_path: Path) -> None:
        with pytest.raises(MessageError, match="is no part of an answer"):
            self.received(pickle.dumps(Trap(tmp_path / "sprung")))
        assert not (tmp_path / "sprung").exists()

    def test_too_long_a_message_is_not_read(self) -> None:
        pair = Pair()
        os.write(pair.theirs.fileno(), struct.pack("!iQ", -1, 2**50) + b"x" * 100)
        with pytest.raises(MessageError, match=f"more than {messages.MAX_MESSAGE_BYTES} bytes"):
            receive_answer(pair.ours)

    def test_probabilities_of_another_size(self) -> None:
        for data in (bytearray(), bytearray(9), bytes(16), torch.ones(2)):
            with pytest.raises(MessageError, match="draft probabilities"):
                messages.unpack(Speculation.chain((3, 5), draft_probs=data))

    @pytest.mark.parametrize(
        "speculation",
        [
            Speculation.chain((3, 64)),
            Speculation.chain((-1,)),
            Speculation.chain(("3",)),
            Speculation((3, 5), (-1,)),
            Speculation((3, 5), (-1, 1)),
            Speculation((3, 5), (-2, 0)),
            Speculation.chain((3, 5), draft_probs=torch.ones(1, 64)),
            Speculation.chain((3, 5), draft_probs=torch.ones(2, 63)),
        ],
    )
    def test_drafts_that_no_target_could_verify(self, speculation: Speculation) -> None:
        class Drafts:
            device = "cpu"

            def receive(self, row: int, timeout_s: float) -> Speculation:
                return speculation

        speculator = WorkerSpeculator(Drafts(), 1, 1.0)  # type: ignore[arg-type]
        speculator._row, speculator._vocab_size = 0, 64
        with pytest.raises(SpeculatorError, match="no chain or tree of the target's tokens"):
            speculator.receive()


@pytest.fixture
def stranger(monkeypatch) -> Iterator[tuple[AssistantWorker, Connection]]:
    """A caller's side whose process is another program, and the connection that this one has."""
    ours, theirs = socket.socketpair()
    worker = AssistantWorker("cpu")
    worker._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    monkeypatch.setattr(process, "MESSAGE_TIMEOUT_S", 1)
    worker._connection = process.connection_over(ours)
    with Connection(theirs.detach()) as connection:
        yield worker, connection
    worker.close()


class TestCaller:
    def refused(self, worker: AssistantWorker) -> str:
        with pytest.raises(SpeculatorError) as info:
            worker.wait_ready()
        assert not worker.is_alive
        assert worker._process is not None
        assert worker._process.poll() is not None, "it is left behind"
        return str(info.value)

    def test_a_program_that_is_not_ours(self, stranger) -> None:
        worker, theirs = stranger
        theirs.send_bytes(b"hello")
        assert "began with what is no handshake" in self.refused(worker)

    def test_one_that_connects_and_says_nothing(self, stranger, monkeypatch) -> None:
        monkeypatch.setattr(process, "START_TIMEOUT_S", 0.2)
        assert "no answer from the assistant's process for 0.2 s" in self.refused(stranger[0])

    def test_one_that_stops_in_the_middle_of_a_message(self, stranger) -> None:
        worker, theirs = stranger
        os.write(theirs.fileno(), struct.pack("!i", 32) + b"abc")
        assert "has died" in self.refused(worker)


class TestWhoCanReachIt:
    def test_there_is_nothing_to_connect_to(self, target, shared_noisy) -> None:
        """A socket pair has no name and no port. Its key is in neither arguments nor environment, which others read."""
        generate_with_ssd(
            target,
            inputs=prompt(6),
            assistant_model=shared_noisy,
            ssd_config=SSDConfig(backend="process"),
            max_new_tokens=8,
        )
        worker = pool.worker_process(shared_noisy)
        assert worker is not None
        worker_process = psutil.Process(worker.pid)
        for each in worker_process.net_connections(kind="all"):
            assert (each.family, each.laddr, each.raddr) == (socket.AF_UNIX, "", ""), each
        assert worker._key.hex() not in " ".join(worker_process.cmdline())
        assert worker._key.hex() not in str(worker_process.environ())
