"""One block of shared memory that holds a model's weights, for two processes at once."""

from __future__ import annotations

import functools
import io
import mmap
import os
import pickle
import tempfile
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ALIGNMENT = 64  # bytes; what vectorised kernels like
RESERVED_AT_ONCE = 2**20  # bytes


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: in which storage of the arena, and how it views it."""

    offset_bytes: int  # of the storage, from the start of the arena
    storage_bytes: int
    dtype: torch.dtype
    storage_offset: int  # of the tensor in its storage, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True)
class ModelParcel:
    """A model without its weights, and where in an arena these lie. Picklable."""

    skeleton: bytes
    places: tuple[TensorPlace, ...]
    size_bytes: int


class Arena:
    """Anonymous shared memory: only those who inherit its descriptor reach it, and it is gone with the last of them.

    Args:
        descriptor: File descriptor of the memory.
        size_bytes: Its size.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Arena:
        """New memory of `size_bytes`.

        Raises:
            OSError: If the system has no such memory left.
        """
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("hf_ssd", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:  # unlinked already
                descriptor = os.dup(file.fileno())
        try:
            _reserve(descriptor, size_bytes)
            return cls(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def tensor(self, place: TensorPlace) -> torch.Tensor:
        """The tensor at `place`, a view of the shared memory."""
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=place.storage_bytes, offset=place.offset_bytes)
        storage = raw.untyped_storage()
        return torch.empty(0, dtype=place.dtype, device="cpu").set_(
            storage, place.storage_offset, place.shape, place.stride
        )

    def close_descriptor(self) -> None:
        """Gives up the descriptor; the memory stays while tensors view it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Takes the memory now: a page that is not to be had when it is first written to would end the program."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
        return
    for start in range(0, size_bytes, RESERVED_AT_ONCE):
        os.write(descriptor, bytes(min(RESERVED_AT_ONCE, size_bytes - start)))


def share_model(model: nn.Module) -> tuple[ModelParcel, Arena]:
    """Moves a model's weights into shared memory, or leaves them where they are, if that fails.

    Effects: parameters and buffers on the CPU become views of the arena, so that both processes see one copy, and
    changes in place by either. Those on other devices stay there, and a copy goes into the arena.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: If the model cannot be sent to another process.
        OSError: If the system has no such memory left.
    """
    skeleton, tensors = _pickle_without_tensors(model)
    places, size_bytes = _lay_out(tensors)
    arena = Arena.create(size_bytes)
    try:
        _fill(arena, tensors, places)
    except BaseException:
        arena.close_descriptor()
        raise
    return ModelParcel(skeleton, tuple(places), size_bytes), arena


def _fill(arena: Arena, tensors: list[torch.Tensor], places: list[TensorPlace]) -> None:
    """Copies tensors to their places, then lets those on the CPU view them."""
    shared_tensors = [arena.tensor(place) for place in places]
    is_filled: set[int] = set()
    for tensor, place, shared in zip(tensors, places, shared_tensors, strict=True):
        if place.offset_bytes not in is_filled:
            # The whole storage at once, so that tensors that share it keep sharing it.
            source = tensor.detach().untyped_storage()
            if source.nbytes():
                torch.empty(0, dtype=torch.uint8, device="cpu").set_(shared.untyped_storage()).copy_(
                    torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
                )
            is_filled.add(place.offset_bytes)
    for tensor, shared in zip(tensors, shared_tensors, strict=True):
        if tensor.device.type == "cpu":
            tensor.data = shared


def open_model(parcel: ModelParcel, arena: Arena) -> nn.Module:
    """The model in `parcel`, its weights views of the arena."""
    return _TensorUnpickler(io.BytesIO(parcel.skeleton), parcel.places, arena).load()


def pack_again(model: nn.Module, parcel: ModelParcel) -> ModelParcel:
    """A model anew whose weights are in shared memory already: what is not a tensor may have changed since.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: If the model cannot be sent to another process.
        ValueError: If its weights are not, or no longer, where `parcel` says.
    """
    skeleton, tensors = _pickle_without_tensors(model)
    places, size_bytes = _lay_out(tensors)
    offsets = [place.offset_bytes for place in places]
    if size_bytes != parcel.size_bytes or offsets != [place.offset_bytes for place in parcel.places]:
        raise ValueError("the model's weights are not those that were shared")
    return ModelParcel(skeleton, tuple(places), size_bytes)


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        # Of a quantised tensor those inside are placed.
        if not isinstance(obj, torch.Tensor) or is_traceable_wrapper_subclass(obj):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        # Classes and functions travel by name. Those of the caller's script have one, but not in another process.
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in `__main__`")
        if hasattr(obj, "_torchdynamo_orig_callable"):  # what torch.compile returned for a function
            return _same, (obj._torchdynamo_orig_callable,)
        if isinstance(obj, types.MethodType) and isinstance(obj.__func__, functools.partial):  # torchao's `extra_repr`
            return _bound, (obj.__func__, obj.__self__)
        if isinstance(obj, torch.Tensor) and is_traceable_wrapper_subclass(obj):
            names, context = obj.__tensor_flatten__()
            inner = {name: getattr(obj, name) for name in names}
            shape = obj.size(), obj.stride()
            return _wrapped, (type(obj), inner, context, *shape, isinstance(obj, nn.Parameter), obj.requires_grad)
        return NotImplemented


def _same(value: Any) -> Any:
    return value


def _bound(function: Any, owner: Any) -> types.MethodType:
    return types.MethodType(function, owner)


def _wrapped(
    kind: Any,
    inner: dict[str, torch.Tensor],
    context: Any,
    size: torch.Size,
    stride: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    """A tensor that holds others, as quantisation makes them."""
    tensor: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, places: tuple[TensorPlace, ...], arena: Arena) -> None:
        super().__init__(file)
        self._places = places
        self._arena = arena
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, index: int) -> torch.Tensor:
        if index not in self._tensors:
            place = self._places[index]
            tensor = self._arena.tensor(place)
            if place.is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=place.requires_grad)
            self._tensors[index] = tensor
        return self._tensors[index]


def _pickle_without_tensors(model: nn.Module) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _TensorPickler(file)
    pickler.dump(model)
    for tensor in pickler.tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"a {type(tensor).__name__} on {tensor.device} cannot be placed in shared memory")
    return file.getvalue(), pickler.tensors


def _lay_out(tensors: list[torch.Tensor]) -> tuple[list[TensorPlace], int]:
    offsets: dict[int, int] = {}
    places = []
    end = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in offsets:
            offsets[key] = end
            end += -(-max(storage.nbytes(), 1) // ALIGNMENT) * ALIGNMENT
        places.append(
            TensorPlace(
                offset_bytes=offsets[key],
                storage_bytes=max(storage.nbytes(), 1),
                dtype=tensor.dtype,
                storage_offset=int(tensor.storage_offset()),
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                is_parameter=isinstance(tensor, nn.Parameter),
                requires_grad=tensor.requires_grad,
            )
        )
    return places, max(end, 1)
