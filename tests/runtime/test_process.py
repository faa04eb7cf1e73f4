"""The assistant's process: kept, shared with, lost, and never left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from broken_models import HasNoMemory, RaisesAtOnce, RaisesLater
from drafting_requests import request
from plain import assert_equals_plain
from streamers import Listener, take_time
from tiny_models import make_noisy, make_target, make_unrelated, prompt
from transformers import LlamaForCausalLM
from waiting import is_gone, wait_until

from hf_ssd import SSDConfig, disable_ssd, enable_ssd
from hf_ssd.generation import generate_with_ssd
from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime import messages, pool
from hf_ssd.runtime.process import AssistantLoadError
from hf_ssd.runtime.speculator import WorkerSpeculator
from hf_ssd.types import Outcome

ROOT = Path(__file__).parents[2]
# Copied tokens are not the assistant's word, so they may be wrong where that is right.
PROCESS = SSDConfig(backend="process", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
GREEDY = {"max_new_tokens": 60, "do_sample": False}


def pid_of(assistant) -> int:
    return pool._WORKERS[assistant].pid


def ssd(target, assistant, config=PROCESS, **kwargs):
    ids = generate_with_ssd(
        target, inputs=prompt(6), assistant_model=assistant, ssd_config=config, **{**GREEDY, **kwargs}
    )
    return ids.tolist()


def plain(target) -> list:
    return target.generate(prompt(6), **GREEDY).tolist()


@pytest.fixture(scope="module")
def own_noisy():
    """D with a worker that a test may harm. The next test's first call starts another, if that is needed."""
    model = make_noisy()
    yield model
    pool.close_worker(model)


class TestKeeping:
    def test_one_worker_serves_all_calls(self, target, shared_noisy) -> None:
        assert_equals_plain(target, shared_noisy, prompt(6), PROCESS, **GREEDY)
        pid = pid_of(shared_noisy)
        assert_equals_plain(make_target(), shared_noisy, prompt(9), PROCESS, **GREEDY)
        assert pid_of(shared_noisy) == pid

    def test_draws_come_with_what_they_were_drawn_from(self, shared_noisy) -> None:
        """An assistant that is the target itself has every draft token accepted, if its distributions arrive whole."""
        target = make_noisy()
        config = SSDConfig(backend="process", verification="token", ngram_drafts=False, backup="jit")
        ssd(target, shared_noisy, config, do_sample=True, temperature=0.8, top_k=20, stopping_criteria=take_time())
        assert target.ssd_stats.degraded is None
        assert target.ssd_stats.acceptance == 1.0

    def test_an_idle_worker_sleeps(self, target, shared_noisy) -> None:
        ssd(target, shared_noisy)
        worker = psutil.Process(pid_of(shared_noisy))
        time.sleep(0.3)  # what was still being drafted when the row ended
        before = sum(worker.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(worker.cpu_times()[:2]) - before < 0.05

    def test_it_ends_with_the_assistant(self, target) -> None:
        assistant = make_noisy()
        ssd(target, assistant)
        pid = pid_of(assistant)
        del assistant
        gc.collect()
        assert wait_until(lambda: is_gone(pid))

    def test_enable_starts_it_in_the_background(self, target, own_noisy) -> None:
        enable_ssd(target, assistant_model=own_noisy, ssd_config=PROCESS)
        pid = pid_of(own_noisy)
        assert not is_gone(pid)
        assert target.generate(prompt(6), **GREEDY).tolist() == plain(make_target())
        assert pid_of(own_noisy) == pid

    def test_no_descriptor_is_left(self, target, own_noisy) -> None:
        before = psutil.Process().num_fds()
        for _ in range(2):
            ssd(target, own_noisy, max_new_tokens=4)
            pool.close_worker(own_noisy)
        gc.collect()
        assert psutil.Process().num_fds() <= before + 1


class TestWeights:
    def test_they_are_one_memory(self, target) -> None:
        """A change in place reaches the worker; other weights need another worker."""
        assistant = make_unrelated()
        assert_equals_plain(target, assistant, prompt(6), PROCESS, **GREEDY)
        assert target.ssd_stats.acceptance < 0.3
        pid = pid_of(assistant)
        with torch.no_grad():
            for own, other in zip(assistant.parameters(), target.parameters(), strict=True):
                own.copy_(other)
        ssd(target, assistant)
        assert target.ssd_stats.acceptance > 0.9
        assert pid_of(assistant) == pid

        for parameter in assistant.parameters():
            parameter.data = parameter.data.clone()
        ssd(target, assistant)
        assert target.ssd_stats.acceptance == 1.0
        assert pid_of(assistant) != pid
        assert wait_until(lambda: is_gone(pid))

    def test_sharing_changes_nothing_about_the_model(self, target, own_noisy) -> None:
        before = {name: weights.clone() for name, weights in own_noisy.state_dict().items()}
        ssd(target, own_noisy)
        after = own_noisy.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(parameter.requires_grad for parameter in own_noisy.parameters())


class TestFailures:
    """HF22576: generation goes on, the output is complete and right, and the next call has a new worker."""

    def assert_survives(self, target, assistant, config=PROCESS, *, action: Callable[[], object] = lambda: None) -> str:
        threads = torch.get_num_threads()
        streamer = Listener(20, action)
        assert ssd(target, assistant, config, streamer=streamer) == plain(target)
        assert streamer.num_ends == 1
        assert torch.get_num_threads() == threads
        cause = target.ssd_stats.degraded
        assert cause
        return cause

    def test_killed_in_the_middle(self, target, own_noisy) -> None:
        ssd(target, own_noisy)
        pid = pid_of(own_noisy)
        cause = self.assert_survives(target, own_noisy, action=lambda: os.kill(pid, signal.SIGKILL))
        assert "has died (exit status -9)" in cause
        assert any(r.num_accepted for r in target.ssd_stats.rounds)  # it had helped until then
        assert_equals_plain(target, own_noisy, prompt(6), PROCESS, **GREEDY)
        assert pid_of(own_noisy) != pid

        pid = pid_of(own_noisy)
        os.kill(pid, signal.SIGKILL)  # and between two calls
        assert wait_until(lambda: is_gone(pid))
        assert_equals_plain(target, own_noisy, prompt(6), PROCESS, **GREEDY)

    def test_stopped_in_the_middle(self, target, own_noisy) -> None:
        ssd(target, own_noisy)
        pid = pid_of(own_noisy)
        config = SSDConfig(backend="process", timeout_s=1.0)
        cause = self.assert_survives(target, own_noisy, config, action=lambda: os.kill(pid, signal.SIGSTOP))
        assert "no answer from the assistant's process for 1 s" in cause
        assert wait_until(lambda: is_gone(pid))  # stopped, it would stay for ever
        assert_equals_plain(target, own_noisy, prompt(6), PROCESS, **GREEDY)

    def test_stopped_while_a_row_goes_on(self, target, own_noisy) -> None:
        ssd(target, own_noisy)
        speculator = WorkerSpeculator(pool._WORKERS[own_noisy], num_threads=1, timeout_s=0.2)
        speculator.start(request(PROCESS))
        os.kill(pid_of(own_noisy), signal.SIGSTOP)
        speculator.resolve(Outcome(0, 5))
        speculator.stop()
        with pytest.raises(SpeculatorError, match=r"for 0\.2 s"):
            speculator.start(request(PROCESS))

    def test_an_assistant_that_raises(self, target) -> None:
        assistant = RaisesLater(make_noisy().config).eval()
        cause = self.assert_survives(target, assistant)
        assert "ArithmeticError: the assistant broke" in cause
        pool.close_worker(assistant)

    def test_an_assistant_that_cannot_be_loaded(self, target) -> None:
        """It drafts in a thread, unless its own process was asked for."""
        assistant = RaisesAtOnce(make_noisy().config)
        expected = plain(target)
        for _ in range(2):
            enable_ssd(target, assistant_model=assistant, ssd_config={"num_assistant_tokens": 4})
            assert target.generate(prompt(6), **GREEDY).tolist() == expected
            stats = target.ssd_stats
            disable_ssd(target)
            assert stats.degraded is None
            assert stats.assistant_threads == 1
        pool.close_worker(assistant)
        with pytest.raises(AssistantLoadError, match="the assistant broke at once"):
            ssd(target, RaisesAtOnce(make_noisy().config))

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["auto", "process"])
    def test_an_assistant_that_its_process_has_no_memory_for(self, target, backend) -> None:
        """There may be some again, so it is no reason to do without a process for ever."""
        assistant = HasNoMemory(make_noisy().config)
        assert ssd(target, assistant, SSDConfig(backend=backend)) == plain(target)
        assert "the assistant's process has no memory for it" in target.ssd_stats.degraded
        assert "Tried to allocate 2.00 GiB" in target.ssd_stats.degraded
        assert assistant not in pool._THREAD_ONLY
        pool.close_worker(assistant)

    def test_rows_after_a_failure_go_on_too(self, target, own_noisy) -> None:
        ssd(target, own_noisy)
        pid = pid_of(own_noisy)
        ids = prompt(6).repeat(3, 1)
        seen: list[int] = []

        def kill_once(batch_id: int, prefix: torch.Tensor) -> list[int]:
            if batch_id == 1 and not seen:
                seen.append(1)
                os.kill(pid, signal.SIGKILL)
            return list(range(64))

        output = generate_with_ssd(
            target,
            inputs=ids,
            assistant_model=own_noisy,
            ssd_config=PROCESS,
            prefix_allowed_tokens_fn=kill_once,
            **GREEDY,
        )
        assert output.tolist() == plain(target) * 3
        assert target.ssd_stats.degraded


class TestFallback:
    def test_a_class_of_main_drafts_in_a_thread_with_one_warning(self, target, monkeypatch) -> None:
        import __main__

        OfMain = type("OfMain", (LlamaForCausalLM,), {"__module__": "__main__"})
        monkeypatch.setattr(__main__, "OfMain", OfMain, raising=False)
        self.assert_in_thread(target, OfMain, monkeypatch)

    def test_a_local_class_drafts_in_a_thread_with_one_warning(self, target, monkeypatch) -> None:
        class Local(LlamaForCausalLM):
            pass

        self.assert_in_thread(target, Local, monkeypatch)

    def assert_in_thread(self, target, model_class, monkeypatch) -> None:
        warnings: list[str] = []
        monkeypatch.setattr(pool.logger, "warning_once", warnings.append)
        assistant = model_class(make_noisy().config).eval()
        assistant.load_state_dict(make_noisy().state_dict())
        for _ in range(2):
            stats = assert_equals_plain(target, assistant, prompt(6), SSDConfig(num_assistant_tokens=4), **GREEDY)
            assert assistant in pool._THREADS
            assert assistant not in pool._WORKERS
            assert stats.assistant_threads == 1
            assert stats.acceptance > 0.3
        assert len(set(warnings)) == 1
        assert "importable module" in warnings[0]
        pool.close_worker(assistant)

    def test_an_explicit_process_says_why_it_cannot(self, target) -> None:
        class Local(LlamaForCausalLM):
            pass

        assistant = Local(make_noisy().config).eval()
        with pytest.raises(SpeculatorError, match="cannot be sent to another process"):
            ssd(target, assistant, PROCESS)


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import torch
from tiny_models import make_noisy, make_target, prompt
from hf_ssd.generation import generate_with_ssd
from hf_ssd.runtime import pool

target, assistant = make_target(), make_noisy()
settings = dict(max_new_tokens={num_tokens}, do_sample=False)

def run(**kwargs):
    return generate_with_ssd(
        target, inputs=prompt(6), assistant_model=assistant, ssd_config=dict(backend="process"), **settings, **kwargs
    )

ids = run()
print(pool._WORKERS[assistant].pid, flush=True)
assert target.ssd_stats.degraded is None
assert ids.tolist() == target.generate(prompt(6), **settings).tolist()
{then}
"""


def script(then: str = "", num_tokens: int = 20) -> str:
    paths = [str(ROOT), str(ROOT / "tests")]
    return SCRIPT.format(paths=paths, num_tokens=num_tokens, then=textwrap.dedent(then))


def launch(*arguments: str, **kwargs: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


class TestPrograms:
    """What runs as a program of its own; each prints the process id of its worker."""

    def first_pid(self, program: subprocess.Popen) -> int:
        line = program.stdout.readline()
        if not line:
            pytest.fail(program.stderr.read())
        return int(line)

    def test_a_script_without_a_main_guard(self, tmp_path) -> None:
        (tmp_path / "script.py").write_text(script("print('done')"))
        program = launch(str(tmp_path / "script.py"), cwd=tmp_path)
        pid = self.first_pid(program)
        out, err = program.communicate(timeout=60)
        assert (program.returncode, out.split()) == (0, ["done"]), err
        assert wait_until(lambda: is_gone(pid))

    @pytest.mark.slow
    def test_python_dash_c_and_a_parent_that_is_killed_while_both_work(self) -> None:
        then = """
            from streamers import Listener
            class Loud(Listener):
                def put(self, value):
                    print("token", flush=True)
            settings["max_new_tokens"] = 900
            run(streamer=Loud())
        """
        program = launch("-c", script(then))
        pid = self.first_pid(program)
        for _ in range(20):
            program.stdout.readline()
        program.kill()
        program.communicate()
        assert wait_until(lambda: is_gone(pid))

    def test_ctrl_c_reaches_the_caller_and_ends_both(self) -> None:
        then = """
            import os, signal, time
            # A shell that runs the tests in the background has them ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                print("ready", flush=True)
                time.sleep(100)
            except KeyboardInterrupt:
                # The worker takes no notice; the next call uses it.
                run()
                print(pool._WORKERS[assistant].pid, target.ssd_stats.degraded, flush=True)
                raise
        """
        program = launch("-c", script(then), start_new_session=True)
        pid = self.first_pid(program)
        assert program.stdout.readline() == "ready\n"
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=60)
        assert out.split() == [str(pid), "None"], err
        assert "KeyboardInterrupt" in err
        assert wait_until(lambda: is_gone(pid))

    @pytest.mark.slow
    def test_forks_of_the_caller(self) -> None:
        """One that exits must not end the worker. One that stays holds the connection open: there only the parent's
        absence tells the worker."""
        then = """
            import os, sys, time
            child = os.fork()
            if child == 0:
                del assistant
                sys.exit(0)
            os.waitpid(child, 0)
            run()
            print(pool._WORKERS[assistant].pid, target.ssd_stats.degraded, flush=True)
            child = os.fork()
            if child == 0:
                time.sleep(100)
            print(child, flush=True)
            os.kill(os.getpid(), 9)
        """
        program = launch("-c", script(then))
        pid = self.first_pid(program)
        assert program.stdout.readline().split() == [str(pid), "None"]
        child = int(program.stdout.readline())
        try:
            assert wait_until(lambda: is_gone(pid))
        finally:
            os.kill(child, signal.SIGKILL)
            program.communicate()


class TestMessages:
    def test_processors_with_a_model_are_not_sent(self, target) -> None:
        class Holder:
            def __init__(self) -> None:
                self.model = target

        assert messages.pickle_processors([Holder()]) == ()
