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

    Between processes `draft_probs` is a NumPy array in it, if anything.
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
    """Waits for a message. Call it only once both sides have proved themselves: it unpickles."""
    return pickle.loads(connection.recv_bytes())


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
    """`speculation` with its tensor as an array, which pickles as one block of memory."""
    if speculation.draft_probs is None:
        return speculation
    return dataclasses.replace(speculation, draft_probs=speculation.draft_probs.cpu().numpy())  # type: ignore[arg-type]


def unpack(speculation: Speculation) -> Speculation:
    """Undoes `pack`."""
    if speculation.draft_probs is None:
        return speculation
    return dataclasses.replace(speculation, draft_probs=torch.from_numpy(speculation.draft_probs))


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
