"""The families on several processes: most of a tiny model's time is Python's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from ..config import Backend
from .encoders import ENCODER_FAMILIES
from .families import FAMILIES
from .multimodal import VISION_FAMILIES
from .trials import FamilyResult, try_family
from .zoo import Tried

ALL_FAMILIES: tuple[Tried, ...] = (*FAMILIES, *ENCODER_FAMILIES, *VISION_FAMILIES)

# Through a process of the assistant's own, too: one of each way to draft. It takes some seconds to start.
WITH_PROCESS = ("llama", "gemma3_text", "bloom", "deepseek_v3", "mixtral", "whisper", "qwen2_vl")


def families_named(names: Sequence[str]) -> tuple[Tried, ...]:
    """All families, or those of some model types.

    Raises:
        ValueError: If there is none of a name.
    """
    unknown = sorted(set(names) - {family.model_type for family in ALL_FAMILIES})
    if unknown:
        known = sorted({family.model_type for family in ALL_FAMILIES})
        raise ValueError(f"`only` must name families, but got {unknown}. Known are {', '.join(known)}.")
    return tuple(family for family in ALL_FAMILIES if not names or family.model_type in names)


def try_families(families: Sequence[Tried], num_jobs: int, backend: Backend | None = None) -> Iterator[FamilyResult]:
    """Tries families, several at a time.

    Args:
        families: The families.
        num_jobs: Processes that try them; 1 is this one.
        backend: Where the assistants run; by default in the same thread, and those of `WITH_PROCESS` once more in a
            process.

    Returns:
        One result per family, in order. The first backend that fails is the result.
    """
    if num_jobs == 1:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from (_try_all(family, backend) for family in families)
        finally:
            torch.set_num_threads(num_threads)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_prepare) as pool:
        yield from pool.map(_try_all, families, [backend] * len(families))


def _try_all(family: Tried, backend: Backend | None) -> FamilyResult:
    result = try_family(family, backend or "inline")
    if backend is None and result.passes and family.model_type in WITH_PROCESS:
        other = try_family(family, "process")
        return result if other.passes else other
    return result


def _prepare() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the assistants' processes
    torch.set_num_threads(1)  # threads that wait for each other make a tiny model a hundred times slower
