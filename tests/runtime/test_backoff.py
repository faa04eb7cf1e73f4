"""When an assistant that has failed is tried again, by a clock that the test sets."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tiny_models import make_noisy, make_target, prompt

from hf_ssd import SSDConfig
from hf_ssd.generation import generate_with_ssd
from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime import pool
from hf_ssd.runtime.backoff import MAX_DELAY_S, Backoff
from hf_ssd.runtime.process import AssistantLoadError


def test_the_first_failure_is_forgiven_and_each_one_after_it_takes_twice_as_long():
    now = [100.0]
    backoff = Backoff(lambda: now[0])
    waits = []
    for _ in range(10):
        backoff.failed()
        waits.append(backoff.wait_s)
    assert waits[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert max(waits) == MAX_DELAY_S
    now[0] += MAX_DELAY_S
    assert backoff.wait_s == 0
    backoff.succeeded()
    backoff.failed()
    assert backoff.wait_s == 0


def test_an_assistant_that_cannot_be_started_is_left_alone_for_a_while(monkeypatch):
    """Each call is whole; the process is not tried at every one, and is again when the time has come."""
    target, assistant = make_target(), make_noisy()
    expected = target.generate(prompt(), max_new_tokens=8)
    now, starts = [0.0], []
    monkeypatch.setitem(pool._BACKOFFS, assistant, Backoff(lambda: now[0]))

    def no_start(self, model):
        starts.append(now[0])
        raise SpeculatorError("no more processes")

    monkeypatch.setattr(pool.AssistantWorker, "start", no_start)
    causes = []
    for second in (0, 0, 0, 0.5, 1.5, 1.6, 3.7):
        now[0] = second
        config = SSDConfig(backend="process")
        ids = generate_with_ssd(
            target, input_ids=prompt(), assistant_model=assistant, ssd_config=config, max_new_tokens=8
        )
        assert ids.tolist() == expected.tolist()
        causes.append(target.ssd_stats.degraded)
    assert starts == [0, 0, 1.5, 3.7]
    assert causes[2] == "the assistant has failed 2 times in a row, and is tried again in 1 s"
    assert causes[4] == "no more processes"


@pytest.mark.parametrize("backend", ["process", "stream"])
def test_a_call_that_went_well_is_forgotten(target, shared_noisy, backend):
    config = SSDConfig(backend=backend)
    pool._BACKOFFS[shared_noisy] = Backoff()
    pool._BACKOFFS[shared_noisy].failed()
    generate_with_ssd(target, input_ids=prompt(), assistant_model=shared_noisy, ssd_config=config, max_new_tokens=8)
    assert target.ssd_stats.degraded is None
    assert pool._BACKOFFS[shared_noisy].num_failures == 0


def test_the_callers_own_exception_is_no_failure_of_the_assistant(target, shared_noisy):
    def interrupt(input_ids, scores, **kwargs):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            generate_with_ssd(
                target,
                input_ids=prompt(),
                assistant_model=shared_noisy,
                ssd_config=SSDConfig(backend="stream"),
                max_new_tokens=8,
                stopping_criteria=[interrupt],
            )
    backoff = pool._BACKOFFS.get(shared_noisy)
    assert backoff is None or backoff.num_failures == 0


@pytest.mark.parametrize(("backend", "where"), [("process", "socket.socketpair"), ("stream", "threading.Thread.start")])
def test_a_system_that_has_nothing_left_costs_the_drafts_only(monkeypatch, backend, where):
    target, assistant = make_target(), make_noisy()
    expected = target.generate(prompt(), max_new_tokens=8)

    def fail(*args, **kwargs):
        raise OSError(24, "Too many open files") if backend == "process" else RuntimeError("can't start new thread")

    monkeypatch.setattr(where, fail)
    ids = generate_with_ssd(
        target, input_ids=prompt(), assistant_model=assistant, ssd_config={"backend": backend}, max_new_tokens=8
    )
    assert ids.tolist() == expected.tolist()
    assert "cannot be" in target.ssd_stats.degraded


def test_a_lost_assistant_of_another_device_costs_the_drafts_only(monkeypatch):
    target, assistant = make_target(), make_noisy()

    def no_load(self):
        self.close()
        raise AssistantLoadError("CUDA out of memory")

    monkeypatch.setattr(pool.AssistantWorker, "wait_ready", no_load)
    monkeypatch.setattr(pool, "place_assistant", lambda *args: "cuda:0")
    ids = generate_with_ssd(
        target,
        input_ids=prompt(),
        assistant_model=assistant,
        ssd_config={"assistant_device": "cuda:0"},
        max_new_tokens=8,
    )
    assert ids.tolist() == target.generate(prompt(), max_new_tokens=8).tolist()
    assert target.ssd_stats.mode == "ar" or "CUDA out of memory" in target.ssd_stats.degraded


def test_a_call_that_waits_for_another_does_not_keep_a_third_from_its_worker(target):
    """Weights are replaced while a call runs; its criterion generates with another assistant while a second waits."""
    assistant, other = make_noisy(), make_noisy()
    waiting: list[threading.Thread] = []
    done: list[str] = []

    def generate(assistant, **kwargs):
        generate_with_ssd(
            make_target(),
            input_ids=prompt(),
            assistant_model=assistant,
            ssd_config={"backend": "stream"},
            max_new_tokens=6,
            **kwargs,
        )

    def meddle(input_ids, scores, **kwargs):
        if not waiting:
            for parameter in assistant.parameters():
                parameter.data = parameter.data.clone()
            waiting.append(threading.Thread(target=lambda: (generate(assistant), done.append("waited")), daemon=True))
            waiting[0].start()
            time.sleep(0.5)
            generate(other)
            done.append("nested")
        return torch.zeros(1, dtype=torch.bool)

    first = threading.Thread(target=lambda: generate(assistant, stopping_criteria=[meddle]), daemon=True)
    first.start()
    first.join(60)
    waiting[0].join(60)
    assert done == ["nested", "waited"]
