"""Which device the assistant runs on, and how CPU cores are split.

Nothing is moved here. The assistant's worker moves its own copy; placement only decides, through accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

CPU = torch.device("cpu")


class InsufficientMemoryError(MemoryError):
    """A model does not fit where it is to go."""


def normalize_device(device: torch.device | str | int) -> torch.device:
    """One name per device: accelerators carry an index, the CPU does not.

    ```python
    >>> normalize_device("cuda"), normalize_device("cpu:0")
    (device(type='cuda', index=0), device(type='cpu'))

    ```

    Raises:
        ValueError: If torch knows no such device.
    """
    try:
        # A bare index means the accelerator of this machine, as everywhere in accelerate.
        device = torch.device(_accelerator_type(), device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'A device must be "cpu" or an accelerator such as "cuda:0", but got {device!r}.') from error
    if device.type == "cpu":
        return CPU
    return device if device.index is not None else torch.device(device.type, 0)


def target_devices(model: torch.nn.Module) -> tuple[torch.device, ...]:
    """The devices that a model's weights are on, those of its `hf_device_map` where accelerate spread it."""
    # Offloaded weights are named "disk" in the map and are on "meta" as parameters: neither is a device that computes.
    places = getattr(model, "hf_device_map", None)
    names = list(places.values()) if places else [parameter.device for parameter in model.parameters()]
    devices = dict.fromkeys(normalize_device(name) for name in names if str(name) not in ("disk", "meta"))
    return tuple(devices) or (CPU,)


def model_bytes(model: torch.nn.Module) -> int:
    """Memory of a model's weights and buffers, in bytes. Tied weights count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_memory() -> dict[torch.device, int]:
    """Free memory of every device of this machine, in bytes, as accelerate sees it."""
    from accelerate.utils import get_max_memory  # imports much, and is only needed once a model is placed

    free = {normalize_device(name): int(size) for name, size in get_max_memory().items()}
    # Where accelerator and CPU share one memory, accelerate leaves the CPU out, lest it be counted twice.
    free.setdefault(CPU, max(free.values(), default=0))
    return free


def choose_assistant_device(
    assistant_bytes: int,
    target_devices: Collection[torch.device],
    free_memory: Mapping[torch.device, int],
    requested: torch.device | str | int = "auto",
    *,
    current: torch.device | None = None,
) -> torch.device:
    """Decides where the assistant goes.

    `"auto"` leaves an assistant on an accelerator of its own where it is; otherwise it takes the accelerator with most
    free memory that the target does not use; where none has room, it shares the target's device.

    Args:
        assistant_bytes: Memory of the assistant's weights, in bytes.
        target_devices: Devices that the target uses.
        free_memory: Free bytes of every device there is.
        requested: `"auto"`, or a device to obey.
        current: Device that the assistant is on now, if it is loaded.

    Raises:
        ValueError: If `requested` is no device of this machine.
        InsufficientMemoryError: If the assistant does not fit.

    ```python
    >>> gpus = {torch.device("cuda", 0): 40, torch.device("cuda", 1): 80, torch.device("cpu"): 100}
    >>> choose_assistant_device(10, [torch.device("cuda", 0)], gpus)
    device(type='cuda', index=1)

    ```
    """
    in_use = {normalize_device(device) for device in target_devices}
    current = None if current is None else normalize_device(current)

    def fits(device: torch.device) -> bool:
        # Weights in CPU memory are shared with the worker, not copied.
        return device == current == CPU or free_memory[device] >= assistant_bytes

    if requested != "auto":
        device = normalize_device(requested)
        if device not in free_memory:
            choices = ["auto", *(str(choice) for choice in free_memory)]
            raise ValueError(f'`assistant_device` must be one of {choices}, but got "{requested}".')
        if not fits(device):
            raise _insufficient(assistant_bytes, {device: free_memory[device]})
        return device

    own = [device for device in free_memory if device != CPU and device not in in_use]
    if current in own:
        return current
    # On a target that is partly offloaded to the CPU, the accelerator is what computes.
    shared = [device for device in in_use if device != CPU] or [CPU]
    shared = [device for device in shared if device in free_memory]
    for group in (own, shared):
        roomy = [device for device in group if fits(device)]
        if roomy:
            return max(roomy, key=lambda device: (free_memory[device], str(device)))
    raise _insufficient(assistant_bytes, {device: free_memory[device] for device in own + shared})


def place_assistant(
    assistant: torch.nn.Module, target: torch.nn.Module, requested: torch.device | str | int = "auto"
) -> torch.device:
    """[`choose_assistant_device`] for two loaded models and the memory that is free now."""
    current = target_devices(assistant)
    return choose_assistant_device(
        model_bytes(assistant),
        target_devices(target),
        free_memory(),
        requested,
        current=current[0] if len(current) == 1 else None,
    )


def available_cores() -> int:
    """CPU cores that this process may use: what the system grants it and what torch was told to use."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), granted))


def split_threads(target_threads: int | None, assistant_threads: int | None, total: int) -> tuple[int, int]:
    """Splits cores between target and assistant.

    The assistant gets a quarter, at least one; the target gets what remains, at least one. Given numbers are obeyed.

    Args:
        target_threads: Threads of the target, or `None` for what the assistant leaves.
        assistant_threads: Threads of the assistant, or `None` for its quarter, or less where the target leaves less.
        total: Number of cores.

    Returns:
        Threads of the target and of the assistant.

    ```python
    >>> split_threads(None, None, 2), split_threads(None, None, 16), split_threads(14, None, 16)
    ((1, 1), (12, 4), (14, 2))

    ```
    """
    if assistant_threads is None:
        left = total if target_threads is None else total - target_threads
        assistant_threads = max(1, min(total // 4, left))
    if target_threads is None:
        target_threads = max(1, total - assistant_threads)
    if target_threads + assistant_threads > max(total, 2):
        logger.warning_once(
            f"`target_threads` + `assistant_threads` should be at most the {total} cores there are, but is "
            f"{target_threads} + {assistant_threads}: target and assistant will slow each other down. Leave both at "
            "None to split the cores."
        )
    return target_threads, assistant_threads


def format_bytes(size: int) -> str:
    """A size for people.

    ```python
    >>> format_bytes(269_060_552), format_bytes(3_000_000_000)
    ('269.1 MB', '3.0 GB')

    ```
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _insufficient(needed: int, free: Mapping[torch.device, int]) -> InsufficientMemoryError:
    there = ", ".join(f"{format_bytes(size)} on {device}" for device, size in free.items()) or "nothing"
    return InsufficientMemoryError(
        f"The assistant needs {format_bytes(needed)} of memory, but free is {there}. Free some, choose a smaller "
        'assistant or a smaller `dtype`, or set `assistant_device` to a device with room (for example "cpu").'
    )


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type
