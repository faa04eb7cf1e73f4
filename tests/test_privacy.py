"""Logs and events hold neither prompts nor what was generated, at the most talkative level and when things go wrong."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from streamers import Listener
from tiny_models import make_noisy, make_target
from tiny_pair import byte_tokenizer
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.chaos.saboteur import Saboteur
from hf_ssd.monitoring import JsonlSink, Monitor, log_sink
from hf_ssd.runtime import pool, process

CANARY = "xq-CANARY-zj"
TOKENIZER = byte_tokenizer()
IDS = torch.tensor([TOKENIZER(CANARY)["input_ids"]])
LOUD = "import logging; logging.basicConfig(level=logging.DEBUG); from transformers.utils import logging as ours; "


@pytest.fixture(autouse=True)
def loud(monkeypatch) -> Iterator[None]:
    """Everything is logged, by the assistant's process too."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_debug()
    levels = {name: logging.getLogger(name).level for name in ("", "hf_ssd")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.DEBUG)
    first, last = process.BOOTSTRAP.rsplit("; ", 1)
    monkeypatch.setattr(process, "BOOTSTRAP", f"{first}; {LOUD}ours.set_verbosity_debug(); {last}")
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    transformers_logging.set_verbosity(before)


def secrets_of(ids: torch.Tensor) -> list[str]:
    """How the canary, or any four tokens of a text in a row, would look where somebody has written them down."""
    tokens = ids.flatten().tolist()
    runs = [tokens[start : start + 4] for start in range(len(tokens) - 3)]
    return [CANARY, *(separator.join(map(str, run)) for run in runs for separator in (", ", ",", " "))]


class Ear:
    """What a run has said, by way of logging, standard output and error, and a monitor's file."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "events.jsonl"
        self.monitor = Monitor(sinks=[log_sink, JsonlSink(self.path)])
        self._caplog, self._capfd = caplog, capfd

    def check(self, ids: torch.Tensor, *expected: str) -> None:
        said = self._caplog.text + "".join(self._capfd.readouterr()) + self.path.read_text()
        for word in expected:
            assert word in said, "nothing is heard of it, so nothing is tested"
        for secret in secrets_of(ids):
            assert secret not in said


@pytest.fixture
def ear(tmp_path, caplog, capfd) -> Ear:
    caplog.set_level(logging.DEBUG)
    return Ear(tmp_path, caplog, capfd)


def assistant_of(mischief: str | None) -> PreTrainedModel:
    model = make_noisy(vocab_size=len(TOKENIZER))
    return model if mischief is None else Saboteur.of(model, mischief, num_good_forwards=10)


def generate(ear: Ear, assistant: PreTrainedModel, config: SSDConfig, **kwargs: Any) -> torch.Tensor:
    target = make_target(vocab_size=len(TOKENIZER))
    expected = target.generate(IDS, max_new_tokens=30, do_sample=False, **kwargs)
    enable_ssd(target, assistant_model=assistant, ssd_config=config, monitor=ear.monitor)
    ids = target.generate(IDS, max_new_tokens=30, do_sample=False, **kwargs)
    assert ids.tolist() == expected.tolist()
    pool.close_worker(assistant)
    return ids


@pytest.mark.parametrize("backend", ["stream", "inline"])
@pytest.mark.parametrize("mischief", [None, "raises", "is out of device memory"])
def test_calls_that_go_well_and_that_do_not(ear: Ear, backend: str, mischief: str | None) -> None:
    ids = generate(ear, assistant_of(mischief), SSDConfig(backend=backend))
    cause = ["Traceback"] if backend == "stream" else []
    ear.check(ids, '"kind": "call"', *([] if mischief is None else ["goes on without the assistant", *cause]))


def test_calls_that_are_passed_on_or_refused(ear: Ear) -> None:
    ids = generate(ear, assistant_of(None), SSDConfig(backend="inline"), num_beams=2)
    ear.check(ids)


@pytest.mark.slow
@pytest.mark.parametrize("mischief", [None, "raises", "leaves", "answers with rubbish", "answers from another version"])
def test_calls_with_a_process(ear: Ear, mischief: str | None) -> None:
    ids = generate(ear, assistant_of(mischief), SSDConfig(backend="process"))
    ear.check(ids, '"kind": "call"', *([] if mischief is None else ["goes on without the assistant"]))


@pytest.mark.slow
def test_a_process_that_is_killed_or_sent_rubbish(ear: Ear) -> None:
    target, assistant = make_target(vocab_size=len(TOKENIZER)), assistant_of(None)
    expected = target.generate(IDS, max_new_tokens=30, do_sample=False)
    enable_ssd(target, assistant_model=assistant, ssd_config=SSDConfig(backend="process"), monitor=ear.monitor)

    def worker() -> process.AssistantWorker:
        found = pool.worker_process(assistant)
        assert found is not None
        return found

    for action in (
        lambda: os.kill(worker().pid or 0, signal.SIGKILL),
        lambda: worker().connection.send_bytes(b"\x80rubbish"),
    ):
        ids = target.generate(IDS, max_new_tokens=30, do_sample=False, streamer=Listener(10, action))
        assert ids.tolist() == expected.tolist()
        assert target.ssd_stats.degraded
    pool.close_worker(assistant)
    ear.check(ids, "has died", "The assistant's process gives up")
