"""`generate()` from several threads at once: each gets what it would get alone, and nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from callers.enabled import GREEDY, assert_speculated, enabled_target
from streamers import Criterion, Listener, take_time
from tiny_models import make_noisy, make_target, prompt, tiny_llama
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.chaos.saboteur import Saboteur
from hf_ssd.runtime import pool

NUM_THREADS = 4
TIMEOUT_S = 60


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each gives, all of them having started before any goes on."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(TIMEOUT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as executor:
        return [future.result(TIMEOUT_S) for future in [executor.submit(run, call) for call in calls]]


def plain_ids(seed: int, target: PreTrainedModel | None = None, **kwargs: Any) -> list[list[int]]:
    return (target or make_target()).generate(prompt(4 + seed, seed=seed), **{**GREEDY, **kwargs}).tolist()


@pytest.mark.parametrize("backend", ["process", "stream", "inline"])
class TestOneModel:
    def test_other_prompts_in_each_thread(self, shared_noisy, backend: str) -> None:
        model = enabled_target(shared_noisy, SSDConfig(backend=backend))

        def call(seed: int) -> Any:
            return model.generate(
                prompt(4 + seed, seed=seed),
                stopping_criteria=take_time(),
                return_dict_in_generate=True,
                **{**GREEDY, "max_new_tokens": 20 + seed},
            )

        found = at_once(*(lambda seed=seed: call(seed) for seed in range(NUM_THREADS)))
        for seed, output in enumerate(found):
            assert output.sequences.tolist() == plain_ids(seed, max_new_tokens=20 + seed)
            assert output.ssd_stats.num_tokens == 20 + seed  # its own figures, not another call's
            assert output.ssd_stats.acceptance > 0
            assert output.ssd_stats.degraded is None

    def test_other_seeds_in_each_thread(self, shared_noisy, backend: str) -> None:
        model = enabled_target(shared_noisy, SSDConfig(backend=backend))

        def call(seed: int, mode: str = "ssd") -> list[list[int]]:
            config = {"backend": backend, "seed": seed, "mode": mode}
            return model.generate(prompt(), do_sample=True, max_new_tokens=24, ssd_config=config).tolist()

        expected = [call(seed, "ar") for seed in range(NUM_THREADS)]
        assert len({str(each) for each in expected}) == NUM_THREADS
        assert at_once(*(lambda seed=seed: call(seed) for seed in range(NUM_THREADS))) == expected


@pytest.mark.parametrize("backend", ["process", "stream", "inline"])
def test_one_assistant_of_two_targets(shared_noisy, backend: str) -> None:
    config = SSDConfig(backend=backend)
    targets = [make_target(), tiny_llama(0, noise=0.02)]
    models = [enable_ssd(tiny, assistant_model=shared_noisy, ssd_config=config) for tiny in targets]
    expected = [plain_ids(0, make_target()), plain_ids(0, tiny_llama(0, noise=0.02))]
    assert expected[0] != expected[1]
    calls = [lambda model=model: plain_ids(0, model) for model in models]
    assert at_once(*calls, *calls) == expected * 2
    for model in models:
        assert_speculated(model)


def test_two_assistants_of_one_target() -> None:
    """Its forwards really run at once: no worker keeps them apart."""
    model = enabled_target()
    assistants = [make_noisy(), make_noisy()]

    def call(index: int) -> list[list[int]]:
        kwargs = {"assistant_model": assistants[index], "ssd_config": {"backend": "inline"}, "max_new_tokens": 60}
        return plain_ids(index, model, **kwargs)

    for _ in range(2):
        found = at_once(lambda: call(0), lambda: call(1))
        assert found == [plain_ids(index, max_new_tokens=60) for index in range(2)]


@pytest.mark.parametrize(
    "backends",
    [
        pytest.param(("process", "process"), marks=pytest.mark.slow),
        ("process", "stream"),
        ("stream", "stream"),
    ],
)
def test_several_assistants_at_work_at_once(shared_noisy, shared_unrelated, backends: tuple[str, str]) -> None:
    """Each has a place of its own, so their calls run side by side, and no answer goes to the wrong one."""
    model = enabled_target()
    assistants = dict(zip(("noisy", "unrelated"), (shared_noisy, shared_unrelated), strict=True))

    def call(name: str, backend: str, seed: int) -> tuple[str, Any]:
        output = model.generate(
            prompt(4 + seed, seed=seed),
            assistant_model=assistants[name],
            ssd_config={"backend": backend, "ngram_drafts": False},
            stopping_criteria=take_time(),
            return_dict_in_generate=True,
            **GREEDY,
        )
        return output.sequences.tolist(), output.ssd_stats

    calls = [(name, backend, seed) for seed in range(2) for name, backend in zip(assistants, backends, strict=True)]
    found = at_once(*(lambda each=each: call(*each) for each in calls))
    acceptance: dict[str, list[float]] = {name: [] for name in assistants}
    for (name, _, seed), (ids, stats) in zip(calls, found, strict=True):
        assert ids == plain_ids(seed)
        assert stats.degraded is None
        acceptance[name].append(stats.acceptance or 0.0)
    assert sum(acceptance["noisy"]) > sum(acceptance["unrelated"])


def test_an_assistant_that_fails_fails_for_its_own_call_only(shared_noisy) -> None:
    """Others wait for it, and others yet have another one. Each text is what it would be alone."""
    model, broken = enabled_target(), Saboteur.of(make_noisy(), "raises", num_good_forwards=30)

    def call(assistant: PreTrainedModel, seed: int) -> tuple[list[list[int]], str | None]:
        output = model.generate(
            prompt(4 + seed, seed=seed),
            assistant_model=assistant,
            ssd_config={"backend": "stream"},
            return_dict_in_generate=True,
            **GREEDY,
        )
        return output.sequences.tolist(), output.ssd_stats.degraded

    found = at_once(*(lambda seed=seed: call(broken if seed < 3 else shared_noisy, seed) for seed in range(5)))
    assert [ids for ids, _ in found] == [plain_ids(seed) for seed in range(5)]
    causes = [cause for _, cause in found]
    assert any(cause is not None and "the assistant broke" in cause for cause in causes[:3])
    assert causes[3:] == [None, None]
    pool.close_worker(broken)


def test_what_is_passed_through_beside_what_is_not(shared_noisy) -> None:
    model = enabled_target(shared_noisy, SSDConfig())
    found = at_once(lambda: plain_ids(0, model), lambda: plain_ids(1, model, num_beams=3), lambda: plain_ids(2, model))
    assert found == [plain_ids(0), plain_ids(1, num_beams=3), plain_ids(2)]


@pytest.mark.slow
def test_the_fastest_mode_is_learnt_from_each_threads_own_calls() -> None:
    model = enabled_target(ssd_config=SSDConfig(mode="auto", backend="inline"))
    settings = {**GREEDY, "max_new_tokens": 120}
    trials = []
    for _ in range(2):
        outputs = at_once(
            *(
                lambda seed=seed: model.generate(prompt(4 + seed, seed=seed), return_dict_in_generate=True, **settings)
                for seed in range(NUM_THREADS)
            )
        )
        for seed, output in enumerate(outputs):
            assert output.sequences.tolist() == plain_ids(seed, max_new_tokens=120)
            assert sum(output.ssd_stats.tokens_by_mode.values()) == 119
        trials.append([{(switch.after.mode, switch.reason) for switch in each.ssd_stats.switches} for each in outputs])
    # What the first calls found out about plain decoding the later ones know.
    assert all(("ar", "not measured yet") in each for each in trials[0])
    assert not any(("ar", "not measured yet") in each for each in trials[1])


class TestCPUThreads:
    """torch hands the number that was set last to each new thread: a server's next request would be left with it."""

    @pytest.fixture(autouse=True)
    def two_threads(self) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(before)

    @pytest.mark.parametrize("backend", ["process", "stream"])
    def test_a_thread_that_starts_during_a_call_has_all(self, shared_noisy, backend: str) -> None:
        model = enabled_target(shared_noisy, SSDConfig(backend=backend))
        seen = []

        def look(ids: torch.Tensor) -> bool:
            with ThreadPoolExecutor(1) as executor:
                seen.append((torch.get_num_threads(), executor.submit(torch.get_num_threads).result()))
            return False

        model.generate(prompt(), stopping_criteria=StoppingCriteriaList([Criterion(look)]), **GREEDY)
        assert set(seen) == {(1, 2)}  # of two cores one is the assistant's
        assert torch.get_num_threads() == 2

    def test_a_call_that_starts_during_another(self, shared_noisy) -> None:
        model, other = enabled_target(shared_noisy, SSDConfig()), enabled_target()
        found: list[Any] = []

        def call() -> None:
            other.generate(prompt(), **GREEDY)
            found.append((other.ssd_stats.target_threads, torch.get_num_threads()))

        def start() -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        model.generate(prompt(), streamer=Listener(5, start), **GREEDY)
        assert found == [(2, 2)]  # inline, the target keeps all that there are
