"""Text that is read while it is generated: streamers of transformers, in threads and in asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from callers.enabled import GREEDY, assert_speculated, enabled_target
from streamers import take_time
from tiny_models import make_target, prompt, tiny_tokenizer
from transformers import AsyncTextIteratorStreamer, PreTrainedModel, TextIteratorStreamer

from hf_ssd import SSDConfig


@pytest.fixture(scope="module")
def model(shared_noisy) -> PreTrainedModel:
    return enabled_target(shared_noisy, SSDConfig())


def text_of(seed: int) -> str:
    ids = make_target().generate(prompt(seed=seed), **GREEDY)
    return tiny_tokenizer().decode(ids[0, 6:])


def start(model: PreTrainedModel, streamer: Any, seed: int) -> threading.Thread:
    kwargs = {"streamer": streamer, "stopping_criteria": take_time(), **GREEDY}
    thread = threading.Thread(target=model.generate, args=(prompt(seed=seed),), kwargs=kwargs)
    thread.start()
    return thread


def parts_of(streamer: TextIteratorStreamer) -> Iterator[str]:
    return (part for part in streamer if part)


def test_a_reader_of_an_iterator_gets_text_as_it_comes(model) -> None:
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60)
    thread = start(model, streamer, 0)
    first = next(parts_of(streamer))
    assert thread.is_alive(), "the text came only when all of it was there"
    assert first + "".join(streamer) == text_of(0)
    thread.join()
    assert_speculated(model)


def test_several_readers_at_once(model) -> None:
    """As in a server: a thread per request, on one model."""
    streamers = [TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60) for _ in range(3)]
    threads = [start(model, streamer, seed) for seed, streamer in enumerate(streamers)]
    assert ["".join(streamer) for streamer in streamers] == [text_of(seed) for seed in range(3)]
    for thread in threads:
        thread.join()


def test_asyncio(model) -> None:
    async def read(seed: int) -> str:
        streamer = AsyncTextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60)
        thread = start(model, streamer, seed)
        text = "".join([part async for part in streamer])
        await asyncio.to_thread(thread.join)
        return text

    async def read_all() -> list[str]:
        return await asyncio.gather(*(read(seed) for seed in range(2)))

    assert asyncio.run(read_all()) == [text_of(0), text_of(1)]
    assert_speculated(model)


def test_a_call_within_a_running_loop(model) -> None:
    """As in a notebook, whose cells run in one."""

    async def cell() -> Any:
        return model.generate(prompt(), stopping_criteria=take_time(), **GREEDY)

    assert asyncio.run(cell()).tolist() == make_target().generate(prompt(), **GREEDY).tolist()
    assert_speculated(model)
