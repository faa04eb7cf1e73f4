"""What the caller's process and the assistant's process say to each other."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..protocol import DraftRequest
from ..sampling import Processor
from ..types import Outcome, Speculation
from .arena import ModelParcel

logger = logging.get_logger(__name__)

MAX_MESSAGE_BYTES = 2**30  # far more than any has, and far less than a broken one may claim to have


class MessageError(Exception):
    """What came is no message; its text completes "the other side sent ..."."""


@dataclass(frozen=True)
class Load:
    """Caller: here is the assistant; put it on `device`, and expect calls that want it in this `quantization`."""

    parcel: ModelParcel
    device: str
    quantization: str | None
    log_level: int


@dataclass(frozen=True)
class Renew:
    """Caller: the assistant's weights have been changed in place; its modules too, where there is a parcel (to a
    process) or a model (to a thread).
    """

    parcel: ModelParcel | None = None
    model: PreTrainedModel | None = None


@dataclass(frozen=True)
class Ready:
    """Worker: the assistant is loaded."""

    takes_trees: bool


@dataclass(frozen=True)
class Translate:
    """Caller: this pickle is the translation of the rows from here on. It is large, so it is sent once for many."""

    translation: bytes | None


@dataclass(frozen=True)
class Start:
    """Caller: begin a row. Processors that go to another process travel apart, each as its own pickle."""

    row: int
    request: DraftRequest
    num_threads: int
    processors: tuple[bytes, ...] = ()
    is_awaited: bool = False


@dataclass(frozen=True)
class Started:
    """Worker: everything is in place for the row, and the prompt is read next. Sent if it is awaited."""

    row: int


@dataclass(frozen=True)
class Resolve:
    """Caller: the outcome of the row's latest verification.

    Between processes its features are a [`PackedTensor`] in it, if anything.
    """

    row: int
    outcome: Outcome
    verify_ms: float | None


@dataclass(frozen=True)
class Answer:
    """Worker: the speculation for the row's latest outcome.

    Between processes `draft_probs` is the tensor's memory in it, if anything.
    """

    row: int
    speculation: Speculation


@dataclass(frozen=True)
class Stop:
    """Caller: the row is done; rest."""

    row: int


@dataclass(frozen=True)
class Failure:
    """Worker: this went wrong. The worker itself goes on, but the row is lost; row -1 means the worker gives up."""

    row: int
    error: str
    lacks_memory: bool = False  # which there may be again


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as the bytes of an array, which pickle as one block of memory in any dtype."""

    data: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PackedTensor:
        return cls(tensor.cpu().contiguous().view(torch.uint8).numpy(), tensor.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.data).view(self.dtype)


def send(connection: Connection, message: Any) -> None:
    """Sends a message. Plain pickle: the connection's own would pass tensors through shared-memory handles."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Waits for a message. Call it only once both sides have proved themselves: it unpickles.

    Raises:
        MessageError: If it is too long.
    """
    return pickle.loads(receive_bytes(connection))


def receive_bytes(connection: Connection) -> bytes:
    """Waits for a message, and leaves it as it is. Raises [`MessageError`] if it is too long."""
    try:
        return connection.recv_bytes(MAX_MESSAGE_BYTES)
    except OSError as error:
        if not connection.closed and not connection.readable:  # how a connection ends for too long a message
            raise MessageError(f"a message of more than {MAX_MESSAGE_BYTES} bytes") from error
        raise


def pack_outcome(outcome: Outcome) -> Outcome:
    """`outcome` with its features packed."""
    if outcome.features is None:
        return outcome
    return dataclasses.replace(outcome, features=PackedTensor.of(outcome.features))  # type: ignore[arg-type]


def unpack_outcome(outcome: Outcome) -> Outcome:
    """Undoes `pack_outcome`."""
    if not isinstance(outcome.features, PackedTensor):
        return outcome
    return dataclasses.replace(outcome, features=outcome.features.tensor)


def pack(speculation: Speculation) -> Speculation:
    """`speculation` with its tensor as bytes, which every unpickler knows."""
    if speculation.draft_probs is None:
        return speculation
    probs = bytearray(speculation.draft_probs.float().cpu().contiguous().numpy().data)
    return dataclasses.replace(speculation, draft_probs=probs)  # type: ignore[arg-type]


def unpack(speculation: Speculation) -> Speculation:
    """Undoes `pack`.

    Raises:
        MessageError: If the bytes are no such tensor.
    """
    data: Any = speculation.draft_probs
    if data is None:
        return speculation
    if not isinstance(data, bytearray) or not data or len(data) % (4 * max(len(speculation), 1)):
        raise MessageError("draft probabilities that do not belong to the draft tokens")
    probs = torch.frombuffer(data, dtype=torch.float32).view(len(speculation), -1)
    return dataclasses.replace(speculation, draft_probs=probs)


def pickle_processors(processors: Sequence[Processor]) -> tuple[bytes, ...]:
    """Each processor as a pickle of its own, less those that cannot be pickled.

    Drafting without one costs speed, not exactness: verification applies them all.
    """
    pickles = []
    for processor in processors:
        try:
            file = io.BytesIO()
            _ModelFreePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(processor)
            pickles.append(file.getvalue())
        except Exception as error:
            logger.info(f"{type(processor).__name__} cannot be sent to the assistant's process: {error!r}")
    return tuple(pickles)


def unpickle_processors(pickles: Sequence[bytes], device: torch.device) -> list[Processor]:
    """The processors that can be made here, their tensors on `device`."""
    processors = []
    for data in pickles:
        try:
            processor = pickle.loads(data)
            move_processor(processor, device)
            processors.append(processor)
        except Exception as error:  # its class may live in the caller's script
            logger.info(f"A logits processor is not known to the assistant's process: {error!r}")
    return processors


def move_processor(processor: Processor, device: torch.device) -> None:
    """Moves the tensors that a processor holds to `device`, in place."""
    for name, value in list(getattr(processor, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor):
            setattr(processor, name, value.to(device))


class _ModelFreePickler(pickle.Pickler):
    """Refuses to send a model along with a processor that holds one."""

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, nn.Module):
            raise pickle.PicklingError("it holds a model")
