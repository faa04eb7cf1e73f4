"""When an assistant that has failed is tried again, by a clock that the test sets."""

from __future__ import annotations

import pytest
from tiny_models import make_noisy, make_target, prompt

from hf_ssd import SSDConfig
from hf_ssd.generation import generate_with_ssd
from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime import pool
from hf_ssd.runtime.backoff import MAX_DELAY_S, Backoff


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
