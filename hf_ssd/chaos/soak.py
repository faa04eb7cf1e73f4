"""Many calls in one process: what it has must not grow."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from ..config import Backend, SSDConfig
from ..generation import generate_with_ssd
from ..matrix.run import families_named
from ..matrix.zoo import VOCAB_SIZE
from ..runtime import pool

NUM_LOOKS = 20
WARM_UP = 0.25  # of the calls, in which allocators and caches find their size
MAX_GROWTH_MB = 16.0  # of resident memory after that; a leak of a page per call would be 6 MB in 1,500 calls
BACKENDS: tuple[Backend, ...] = ("process", "stream", "inline")
PROMPT_LENGTHS = (4, 40)
NUM_TOKENS = 100  # per call and row, on average


@dataclass(frozen=True)
class Look:
    """What the process has after some calls. Memory is resident, in megabytes (10^6 bytes)."""

    num_calls: int
    num_tokens: int
    caller_mb: float
    worker_mb: float
    shared_mb: float
    descriptors: int
    threads: int
    processes: int


@dataclass(frozen=True)
class SoakResult:
    """The looks of a soak, in order."""

    looks: tuple[Look, ...]

    def growth(self) -> dict[str, float]:
        """What there is more of at the end than after the warm-up, by name."""
        first, last = self.looks[round(WARM_UP * (len(self.looks) - 1))], self.looks[-1]
        names = ("caller_mb", "worker_mb", "shared_mb", "descriptors", "threads", "processes")
        return {name: getattr(last, name) - getattr(first, name) for name in names}

    def problems(self) -> list[str]:
        """What has grown more than it may."""
        limits = {"caller_mb": MAX_GROWTH_MB, "worker_mb": MAX_GROWTH_MB}
        return [f"{name} has grown by {more:g}" for name, more in self.growth().items() if more > limits.get(name, 0)]

    def summary(self) -> str:
        """The same in words."""
        grown = ", ".join(f"{name.replace('_mb', '')} {more:+.3g}" for name, more in self.growth().items())
        last = self.looks[-1]
        verdict = "; ".join(self.problems()) or "nothing has grown"
        return f"{last.num_calls} calls, {last.num_tokens} tokens. After the warm-up: {grown}; {verdict}."


def soak(num_calls: int, seed: int, tell: Callable[[int], None] = lambda number: None) -> SoakResult:
    """Calls `generate()` with random backends, lengths, rows and rules, and looks at the process now and then.

    Args:
        num_calls: Number of calls.
        seed: Of what is random.
        tell: Called with the number of calls done.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    family = families_named(["llama"])[0]
    target, assistant = family.make(), family.make_assistant()
    num_tokens, looks = 0, []
    step = max(1, num_calls // NUM_LOOKS)
    try:
        for number in range(1, num_calls + 1):
            num_rows = draw.choice([1, 1, 1, 3])
            input_ids = torch.randint(1, VOCAB_SIZE, (num_rows, draw.randint(*PROMPT_LENGTHS)), generator=generator)
            config = SSDConfig(
                backend=draw.choice(BACKENDS),
                seed=draw.getrandbits(32),
                verification=draw.choice(["coupled", "token", "block"]),
                assistant_quantization=None,
            )
            output = generate_with_ssd(
                target,
                assistant_model=assistant,
                ssd_config=config,
                input_ids=input_ids,
                do_sample=draw.random() < 0.5,
                max_new_tokens=draw.randint(NUM_TOKENS // 2, 3 * NUM_TOKENS // 2) // num_rows,
            )
            num_tokens += output.numel() - input_ids.numel()
            if number % step == 0 or number == num_calls:
                looks.append(_look(number, num_tokens))
            tell(number)
    finally:
        pool.close_worker(assistant)
    return SoakResult(tuple(looks))


def _look(num_calls: int, num_tokens: int) -> Look:
    gc.collect()
    this = psutil.Process()
    children = this.children(recursive=True)
    return Look(
        num_calls,
        num_tokens,
        caller_mb=this.memory_info().rss / 1e6,
        worker_mb=sum(child.memory_info().rss for child in children) / 1e6,
        shared_mb=_shared_mb(this),
        descriptors=this.num_fds(),
        threads=threading.active_count(),
        processes=len(children),
    )


def _shared_mb(process: psutil.Process) -> float:
    """Size of the weights' shared memory in the address space."""
    maps = process.memory_maps(grouped=True)
    return sum(each.rss for each in maps if "memfd:hf_ssd" in each.path) / 1e6
