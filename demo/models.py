"""The pair that races: loaded in the background, and used by one thread only."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from hf_ssd import SSDConfig, embedded_pair, enable_ssd, load_pair

from .options import DemoOptions

logger = logging.get_logger(__name__)

Result = TypeVar("Result")


class Models:
    """A target, its assistant and their tokenizer.

    Everything that computes runs in one thread, one thing after the other: so no two runs share cores, and a change of
    the precision waits for the run before it.

    Args:
        options: Which pair.
    """

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.status = "The models have not been loaded yet."
        self.is_ready = False
        self.error: str | None = None
        self.dtype = options.dtype
        self._pair: Any = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="race")
        self._tasks: list[Future[Any]] = []  # in the order in which they are done

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Runs something in the thread that computes, after what was submitted before."""
        future = self._executor.submit(task)
        self._tasks = [*(each for each in self._tasks if not each.done()), future]
        return future

    def num_before(self, future: Future[Any]) -> int:
        """How many tasks have to be over before this one begins."""
        tasks = [each for each in self._tasks if not each.done()]
        return tasks.index(future) if future in tasks else 0

    def close(self) -> None:
        """Lets the thread end, and the assistant's process with the models."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pair = None

    def pair(self, dtype: str | None = None) -> Any:
        """`(target, assistant, tokenizer)` in a precision, loaded if they are not. For the thread that computes.

        Args:
            dtype: Name of the type of the weights; `None` is the one in use.

        Raises:
            OSError: If there are no such models, and whatever else loading raises.
        """
        if self._pair is None or (dtype is not None and dtype != self.dtype):
            self._load(dtype or self.dtype)
        return self._pair

    def _load(self, dtype: str) -> None:
        self.is_ready, self.error = False, None
        # One pair at a time: a large one would not fit in twice. Its worker ends with the assistant.
        self._pair = None
        gc.collect()
        try:
            self.status = f"Loading target and assistant in {dtype} (the first time this takes half a minute) ..."
            pair = load(self.options, getattr(torch, dtype))
            self.status = "Starting the assistant ..."
            warm_up(pair, SSDConfig())
        except Exception as error:
            self.error = str(error)
            self.status = "The models could not be loaded."
            raise
        self._pair, self.dtype, self.is_ready = pair, dtype, True
        self.status = f"Ready: {self.options.title}, in {dtype} on {pair.target.device}."
        logger.info(self.status)


def load(options: DemoOptions, dtype: torch.dtype) -> Any:
    """The pair, with SSD enabled on its target."""
    device = options.device
    if device == "auto":
        device = str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
    if options.target is not None and options.assistant is not None:
        device_map = None if device == "cpu" else device
        return load_pair(options.target, options.assistant, dtype=dtype, device_map=device_map)
    pair = embedded_pair(dtype)
    pair.target.to(device)
    enable_ssd(pair.target, assistant_model=pair.assistant)
    return pair


def warm_up(pair: Any, config: SSDConfig) -> Any:
    """A call of a few tokens, so that no arm of a race pays for what is done once. Returns its statistics."""
    inputs = pair.tokenizer("One, two, three,", return_tensors="pt").to(pair.target.device)
    pair.target.generate(
        **inputs, max_new_tokens=6, do_sample=False, pad_token_id=padding(pair.tokenizer), ssd_config=config
    )
    return pair.target.ssd_stats


def padding(tokenizer: Any) -> int | None:
    """The padding token, or what stands in for it."""
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


class Sessions:
    """Which page has which run, so that its Stop button and its closing end that run and no other."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[threading.Event, threading.Event]] = {}
        self._lock = threading.Lock()

    def begin(self, session: str) -> threading.Event:
        """A run begins; returns the event that asks it to stop."""
        stop, ended = threading.Event(), threading.Event()
        with self._lock:
            self._runs[session] = stop, ended
        return stop

    def end(self, session: str) -> None:
        """The run is over, and its last figures are on the page."""
        with self._lock:
            run = self._runs.pop(session, None)
        if run is not None:
            run[0].set()
            run[1].set()

    def stop(self, session: str, timeout_s: float = 0.0) -> bool:
        """Asks a page's run to stop and waits until it has. Returns whether there was one."""
        with self._lock:
            run = self._runs.get(session)
        if run is None:
            return False
        run[0].set()
        run[1].wait(timeout_s)
        return True
