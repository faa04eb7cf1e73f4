"""The assistant's thread: right, beside the target, and never in the way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from broken_models import RaisesLater
from drafting_requests import request
from plain import assert_equals_plain
from streamers import Criterion, Listener, take_time
from tiny_models import make_noisy, make_target, padded_batch, prompt
from transformers import LlamaForCausalLM, StoppingCriteriaList
from waiting import wait_until

from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.generation import generate_with_ssd
from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime import pool
from hf_ssd.runtime.speculator import WorkerSpeculator
from hf_ssd.runtime.stream import StreamWorker
from hf_ssd.trace import measure_overlap

ROOT = Path(__file__).parents[2]
# Copied tokens are not the assistant's word, so they may be wrong where that is right.
STREAM = SSDConfig(backend="stream", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
GREEDY = {"max_new_tokens": 60, "do_sample": False}


class Gated(LlamaForCausalLM):
    """Stands still in each forward while its gate is closed, and notes who calls it."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.gate.set()
        self.num_threads: set[int] = set()

    def forward(self, *args, **kwargs):
        self.num_threads.add(torch.get_num_threads())
        self.gate.wait(60)
        return super().forward(*args, **kwargs)

    @property
    def base_model(self):
        return self  # run whole, through the forward above


def make_gated() -> Gated:
    model = Gated(make_noisy().config).eval()
    model.load_state_dict(make_noisy().state_dict())
    return model


def ssd(target, assistant, config=STREAM, **kwargs) -> list:
    arguments = {"inputs": prompt(6), **GREEDY, **kwargs}
    return generate_with_ssd(target, assistant_model=assistant, ssd_config=config, **arguments).tolist()


def plain(target, **kwargs) -> list:
    return target.generate(prompt(6), **{**GREEDY, **kwargs}).tolist()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_ssd assistant"]


@pytest.fixture
def assistant(noisy) -> Iterator[LlamaForCausalLM]:
    yield noisy
    pool.close_worker(noisy)


@pytest.fixture
def gated() -> Iterator[Gated]:
    model = make_gated()
    yield model
    model.gate.set()
    pool.close_worker(model)


class TestOutput:
    @pytest.mark.parametrize("mode", ["ssd", "sd"])
    @pytest.mark.parametrize("make", [make_noisy, make_target])
    def test_greedy_equals_plain(self, target, mode, make) -> None:
        # Copied tokens are not the assistant's word, so they may be wrong where that is right.
        config = SSDConfig(backend="stream", mode=mode, num_assistant_tokens=4, ngram_drafts=False, backup="jit")
        assistant = make()
        stats = assert_equals_plain(
            target, assistant, prompt(6), config, max_new_tokens=60, stopping_criteria=take_time
        )
        assert mode == "sd" or stats.num_hits
        assert stats.acceptance == 1.0 or make is make_noisy
        assert (stats.assistant_threads, stats.assistant_device) == (1, "cpu")

    def test_rows_of_a_batch(self, target, assistant) -> None:
        batch = padded_batch([prompt(3 + row, seed=row) for row in range(4)])
        expected = target.generate(**batch, **GREEDY).tolist()
        kwargs = {**batch, "inputs": batch["input_ids"]}
        del kwargs["input_ids"]
        assert ssd(target, assistant, **kwargs) == expected

    @pytest.mark.parametrize("settings", [{}, {"draft_tree_size": None}, {"backup": "ngram"}])
    def test_a_target_that_is_its_own_assistant(self, target, settings) -> None:
        """Both sides run at once, and each has its own way to attend."""
        batch = padded_batch([prompt(2 + row, seed=row) for row in range(3)])
        expected = target.generate(**batch, **GREEDY).tolist()
        kwargs = {**batch, "inputs": batch["input_ids"]}
        del kwargs["input_ids"]
        for _ in range(6):
            assert ssd(target, target, SSDConfig(backend="stream", **settings), **kwargs) == expected
            assert target.ssd_stats.degraded is None
        pool.close_worker(target)

    def test_draws_come_with_what_they_were_drawn_from(self, target, twin) -> None:
        """An assistant that is the target itself has every draft token accepted, if its distributions arrive."""
        torch.manual_seed(0)
        ssd(target, twin, do_sample=True, temperature=0.8, top_k=20)
        stats = target.ssd_stats
        assert stats.degraded is None
        assert stats.acceptance == 1.0
        pool.close_worker(twin)

    def test_processors_with_a_memory_are_copied(self, target, assistant) -> None:
        class Forbids:
            """Forbids what it let through two calls before."""

            def __init__(self) -> None:
                self.seen: list[int] = []

            def __call__(self, input_ids, scores):
                scores = scores.clone()
                scores[:, input_ids[:, -2]] = float("-inf")
                self.seen.append(input_ids.shape[1])
                return scores

        processor = Forbids()
        generate = {"logits_processor": [processor], **GREEDY}
        expected = target.generate(prompt(6), **generate).tolist()
        num_calls, processor.seen = len(processor.seen), []
        assert ssd(target, assistant, logits_processor=[processor]) == expected
        assert len(processor.seen) <= num_calls + sum(r.num_draft_tokens for r in target.ssd_stats.rounds)

    def test_both_sides_work_at_once(self, target, assistant) -> None:
        def overlap_ms() -> float:
            ssd(target, assistant, SSDConfig(backend="stream", trace=True), max_new_tokens=200)
            return measure_overlap(target.ssd_stats).overlap_ms

        # Other tests may have the second core for a while.
        assert any(overlap_ms() > 0 for _ in range(20))


class TestKeeping:
    def test_one_thread_serves_all_calls_and_leaves_with_the_assistant(self, target) -> None:
        before = threads()
        assistant = make_noisy()
        enable_ssd(target, assistant_model=assistant, ssd_config=STREAM)
        (thread,) = set(threads()) - set(before)
        for _ in range(2):
            assert target.generate(prompt(6), **GREEDY).tolist() == plain(make_target())
        assert set(threads()) - set(before) == {thread}
        del target._ssd_attachment, assistant
        gc.collect()
        assert wait_until(lambda: not thread.is_alive())

    def test_an_idle_thread_sleeps(self, target, assistant) -> None:
        ssd(target, assistant)
        time.sleep(0.2)  # what was still being drafted when the row ended
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05

    def test_weights_may_change(self, target, assistant) -> None:
        ssd(target, assistant)
        worker = pool._THREADS[assistant]
        with torch.no_grad():
            for own, other in zip(assistant.parameters(), target.parameters(), strict=True):
                own.copy_(other)
        ssd(target, assistant)
        assert target.ssd_stats.acceptance == 1.0
        assert pool._THREADS[assistant] is worker
        for parameter in assistant.parameters():
            parameter.data = parameter.data.clone()
        ssd(target, assistant)
        assert pool._THREADS[assistant] is not worker
        assert not worker.is_alive

    def test_it_stays_where_it_is(self, target, assistant) -> None:
        config = SSDConfig(backend="stream", assistant_device="cpu")
        assert ssd(target, assistant, config) == plain(target)
        config = SSDConfig(backend="stream", assistant_device="cuda:7")
        with pytest.raises(ValueError, match=r"`assistant_device` must be \"auto\".*cuda:7.*backend=\"process\""):
            ssd(target, assistant, config)

    def test_each_side_has_its_own_number_of_threads(self, target, gated) -> None:
        before = torch.get_num_threads()
        ssd(target, gated, max_new_tokens=2)  # it is tried on as many threads as there are
        gated.num_threads.clear()
        seen: set[int] = set()
        criterion = Criterion(lambda ids: seen.add(torch.get_num_threads()))
        config = SSDConfig(backend="stream", target_threads=1, assistant_threads=2)
        ssd(target, gated, config, max_new_tokens=6, stopping_criteria=StoppingCriteriaList([criterion]))
        assert (seen, gated.num_threads) == ({1}, {2})
        assert torch.get_num_threads() == before


class TestFailures:
    def test_an_assistant_that_raises(self, target) -> None:
        class Raises(RaisesLater):
            pass

        assistant = Raises(make_noisy().config).eval()
        assert ssd(target, assistant) == plain(target)
        assert "ArithmeticError: the assistant broke" in target.ssd_stats.degraded
        assert "Traceback" in target.ssd_stats.degraded
        Raises.num_forwards_left = 10**9
        assert ssd(target, assistant) == plain(target)
        assert target.ssd_stats.degraded is None
        pool.close_worker(assistant)

    def test_an_assistant_that_cannot_be_tried(self, target, noisy, monkeypatch) -> None:
        def fail(model, quantization):
            raise ArithmeticError("cannot be tried")

        monkeypatch.setattr("hf_ssd.runtime.server.make_fast_assistant", fail)
        before = set(threads())
        for _ in range(2):
            assert ssd(target, noisy) == plain(target)
            assert "ArithmeticError: cannot be tried" in target.ssd_stats.degraded
            assert wait_until(lambda: set(threads()) <= before)

    def test_one_that_hangs_is_given_up(self, target, gated) -> None:
        ssd(target, gated)
        worker = pool._THREADS[gated]
        streamer = Listener(20, gated.gate.clear)
        config = SSDConfig(backend="stream", timeout_s=0.5)
        assert ssd(target, gated, config, streamer=streamer) == plain(target)
        assert target.ssd_stats.degraded == "no answer from the assistant's thread for 0.5 s"
        assert streamer.num_ends == 1
        assert not worker.is_alive
        gated.gate.set()
        assert wait_until(lambda: not worker._thread.is_alive()), "it came back and should have left"
        assert ssd(target, gated) == plain(target)
        assert target.ssd_stats.degraded is None
        assert pool._THREADS[gated] is not worker

    def test_one_that_hangs_is_given_up_when_a_row_goes_on_too(self, target, gated) -> None:
        ssd(target, gated)
        speculator = WorkerSpeculator(pool._THREADS[gated], num_threads=1, timeout_s=0.2)
        gated.gate.clear()
        speculator.start(request(STREAM))  # which hangs while it reads the prompt
        speculator.stop()
        with pytest.raises(SpeculatorError, match=r"for 0\.2 s"):
            speculator.start(request(STREAM))

    def test_ctrl_c_while_it_is_waited_for(self, target, gated) -> None:
        ssd(target, gated)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        try:
            with pytest.raises(KeyboardInterrupt):
                ssd(target, gated, streamer=Listener(20, lambda: (gated.gate.clear(), timer.start())))
        finally:
            timer.join()
            signal.signal(signal.SIGINT, handler)
        gated.gate.set()
        assert ssd(target, gated) == plain(target)
        assert target.ssd_stats.degraded is None

    def test_a_call_that_was_broken_off_leaves_no_answers(self, target, assistant) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        expected = plain(target)
        for act_at in (1, 10, 11, 12):
            with pytest.raises(KeyboardInterrupt):
                ssd(target, assistant, streamer=Listener(act_at, interrupt))
            assert ssd(target, assistant) == expected
            assert target.ssd_stats.degraded is None
        assert len({id(pool._THREADS[assistant])}) == 1

    def test_a_closed_worker_says_so(self) -> None:
        with StreamWorkerOf(make_noisy()) as worker:
            worker.wait_ready()
        with pytest.raises(SpeculatorError, match="the assistant's thread has ended"):
            worker.end_row(0)


class StreamWorkerOf:
    """A worker for the time of a block."""

    def __init__(self, model) -> None:
        self.worker = StreamWorker("cpu")
        self.worker.start(model)

    def __enter__(self) -> StreamWorker:
        return self.worker

    def __exit__(self, *exc: object) -> None:
        self.worker.close()


class TestSharing:
    def test_two_calls_at_once(self, assistant) -> None:
        """They share the assistant, one after the other, and neither gets the other's answers."""
        targets = [make_target(), make_target()]
        ids = [prompt(6), prompt(9, seed=1)]
        expected = [target.generate(each, **GREEDY).tolist() for target, each in zip(targets, ids, strict=True)]
        found: dict[int, list] = {}

        def run(i: int) -> None:
            found[i] = [ssd(targets[i], assistant, inputs=ids[i]) for _ in range(3)]

        callers = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert [found[i] for i in range(2)] == [[each] * 3 for each in expected]
        assert all(target.ssd_stats.degraded is None for target in targets)

    def test_a_criterion_that_generates(self, target, assistant) -> None:
        """It wants the worker that the call around it holds: waiting for that would be for ever."""
        expected = plain(make_target())
        inner = []

        def generates(ids: torch.Tensor) -> bool:
            if ids.shape[1] == 12:
                inner.append(target.generate(prompt(6), **GREEDY).tolist())
            return False

        enable_ssd(target, assistant_model=assistant, ssd_config=STREAM)
        criteria = StoppingCriteriaList([Criterion(generates)])
        assert target.generate(prompt(6), stopping_criteria=criteria, **GREEDY).tolist() == expected
        assert inner == [expected]

    def test_a_process_and_a_thread_of_one_assistant(self, target, shared_noisy) -> None:
        expected = plain(target)
        for backend in ("process", "stream", "process"):
            assert ssd(target, shared_noisy, SSDConfig(backend=backend)) == expected
            assert target.ssd_stats.degraded is None


@pytest.mark.slow
def test_a_program_ends_though_its_assistant_is_drafting(tmp_path) -> None:
    script = f"""
        import sys
        sys.path[:0] = {[str(ROOT), str(ROOT / "tests")]!r}
        from streamers import Listener
        from tiny_models import make_noisy, make_target, prompt
        from hf_ssd.generation import generate_with_ssd

        target, assistant = make_target(), make_noisy()
        generate_with_ssd(
            target, inputs=prompt(6), assistant_model=assistant, ssd_config=dict(backend="stream"),
            max_new_tokens=50, streamer=Listener(20, lambda: sys.exit(7)),
        )
    """
    program = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (program.returncode, program.stderr) == (7, "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestCuda:
    @pytest.mark.parametrize("backend", ["stream", "process"])
    def test_greedy_equals_plain(self, backend) -> None:
        target, assistant = make_target().to("cuda"), make_noisy().to("cuda")
        config = SSDConfig(backend=backend, num_assistant_tokens=4)
        for _ in range(3):
            stats = assert_equals_plain(target, assistant, prompt(6).to("cuda"), config, max_new_tokens=200)
            assert stats.num_hits
        pool.close_worker(assistant)

    @pytest.mark.parametrize("backend", ["stream", "process"])
    def test_distributions_arrive_whole(self, backend) -> None:
        """Read before they are there, or after their memory was used anew, they would cost acceptance."""
        target, twin = make_target().to("cuda"), make_target().to("cuda")
        for _ in range(3):
            generate_with_ssd(
                target,
                inputs=prompt(6).to("cuda"),
                assistant_model=twin,
                ssd_config=SSDConfig(backend=backend),
                do_sample=True,
                max_new_tokens=200,
            )
            assert target.ssd_stats.degraded is None
            assert target.ssd_stats.acceptance > 0.98  # graphs round differently
        pool.close_worker(twin)


def test_answers_that_nobody_waits_for_are_not_kept(target, noisy) -> None:
    """A criterion ends the row while an outcome is open."""
    for _ in range(4):
        generate_with_ssd(
            target,
            inputs=prompt(6),
            assistant_model=noisy,
            ssd_config=SSDConfig(backend="stream"),
            max_new_tokens=30,
            stopping_criteria=[lambda ids, scores, **kwargs: torch.tensor([ids.shape[1] >= 12])],
        )
    assert pool._THREADS[noisy]._replies == {}
    pool.close_worker(noisy)
