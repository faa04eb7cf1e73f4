"""Races of a tiny pair, without the page."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tiny_pair import byte_tokenizer, save_tiny_pair

from demo.models import Models, Sessions
from demo.options import DemoOptions
from demo.race import ALL_CORES, Race, RaceSettings, check_characters, cpu_threads, encode, first_difference
from demo.tokens import Source
from hf_ssd import SSDConfig

PROMPT = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, assistant = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    options = DemoOptions(target=str(target), assistant=str(assistant), dtype="float32", max_prompt_tokens=200)
    models = Models(options)
    models.submit(models.pair).result(100)
    yield models
    models.close()


def run(models: Models, settings: RaceSettings, stop: threading.Event | None = None, messages=PROMPT) -> Race:
    race = Race(models, settings, messages, stop or threading.Event())
    models.submit(race.run).result(100)
    return race


@pytest.mark.parametrize(
    "settings",
    [
        RaceSettings(dtype="float32", max_new_tokens=40),
        RaceSettings(
            dtype="float32",
            max_new_tokens=40,
            sampling={"temperature": 1.0, "top_k": 0, "top_p": 1.0},
            ssd_config=SSDConfig(seed=5),
            ar_threads=ALL_CORES,
        ),
    ],
    ids=["greedy", "coupled"],
)
def test_all_arms_give_the_same_text(models, settings):
    race = run(models, settings)
    assert race.error is None
    assert race.status == "Done."
    ar, sd, ssd = race.runs
    assert len(ar.ids) == 40
    assert ar.ids == sd.ids == ssd.ids
    assert race.differences == ()
    assert [each.stats.mode for each in race.runs] == ["ar", "sd", "ssd"]
    assert ssd.stats.verifier_spans
    assert ssd.stats.speculator_spans
    for each in race.runs:
        assert each.stats.num_tokens == len(each.probabilities) == 40
        assert all(0.0 < probability <= 1.0 for probability in each.probabilities)
        # What the streamer saw is what the call counted.
        assert each.tape.times_ms[0] == pytest.approx(each.stats.ttft_ms, abs=50.0)
    assert ar.probabilities == pytest.approx(ssd.probabilities, abs=1e-4)
    assert Source.PENDING not in {token.source for token in race.tokens(ssd)}
    assert {Source.BONUS, Source.BACKUP} <= {token.source for token in race.tokens(sd)}
    assert "".join(token.text for token in race.tokens(ssd)) == "".join(token.text for token in race.tokens(ar))


def test_rules_that_draw_apart_promise_nothing(models):
    settings = RaceSettings(
        dtype="float32",
        max_new_tokens=40,
        sampling={"temperature": 1.5, "top_k": 0, "top_p": 1.0},
        ssd_config=SSDConfig(seed=5, verification="token"),
    )
    race = run(models, settings)
    assert race.error is None
    assert not settings.promises_identity
    assert race.differences


def test_a_stop_ends_the_arm_that_runs_and_the_next_race_is_whole(models):
    stop = threading.Event()
    race = Race(models, RaceSettings(dtype="float32", max_new_tokens=700), PROMPT, stop)
    done = models.submit(race.run)
    limit = time.monotonic() + 60
    while race.runs[0].num_tokens < 5 and time.monotonic() < limit:
        time.sleep(0.005)
    stop.set()
    done.result(60)
    assert race.error is None
    assert race.status == "Stopped."
    assert 5 <= race.runs[0].num_tokens < 700
    assert race.runs[0].is_over
    assert race.runs[2].tape is None
    assert run(models, RaceSettings(dtype="float32", max_new_tokens=10)).differences == ()


def test_races_wait_for_each_other(models):
    gate = threading.Event()
    first = models.submit(gate.wait)
    races = [Race(models, RaceSettings(dtype="float32", max_new_tokens=4), PROMPT, threading.Event()) for _ in range(3)]
    done = [models.submit(race.run) for race in races]
    assert [models.num_before(each) for each in (first, *done)] == [0, 1, 2, 3]
    assert done[1].cancel()  # it had not begun
    assert models.num_before(done[2]) == 2
    gate.set()
    done[2].result(60)
    assert models.num_before(done[2]) == 0
    assert races[0].status == races[2].status == "Done."
    assert not races[1].is_over


def test_what_goes_wrong_is_kept_for_the_page(models):
    race = run(models, RaceSettings(dtype="float32", sampling={"temperature": -1.0}))
    assert race.is_over
    assert "temperature" in race.error
    race = run(models, RaceSettings(dtype="float32"), messages=[{"role": "user", "content": "long " * 100}])
    assert "must have at most 200 tokens" in race.error
    race = run(models, RaceSettings(dtype="float32"), messages=[{"role": "user", "content": " \n"}])
    assert "must hold some text" in race.error


@pytest.mark.slow
def test_another_precision_is_loaded_when_it_is_asked_for(models):
    race = run(models, RaceSettings(arms=("SSD",), dtype="bfloat16", max_new_tokens=6))
    assert race.error is None
    assert models.dtype == "bfloat16"
    assert models.submit(models.pair).result().target.dtype == torch.bfloat16
    models.submit(lambda: models.pair("float32")).result(60)


def test_models_that_are_not_there_are_an_error():
    models = Models(DemoOptions(target="/nowhere/target", assistant="/nowhere/assistant"))
    with pytest.raises((OSError, ValueError)):
        models.submit(models.pair).result(60)
    assert models.error
    assert not models.is_ready
    models.close()


def test_the_conversation_counts():
    tokenizer = byte_tokenizer()
    messages = [
        {"role": "user", "content": "a" * 50},
        {"role": "assistant", "content": "b" * 50},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(ValueError, match=r"at most 100 tokens, the conversation before it included, but has 1\d\d"):
        encode(tokenizer, messages, 100)
    assert encode(tokenizer, messages[-1:], 100)["input_ids"].shape[1] < 100
    with pytest.raises(ValueError, match=r"at most 100 tokens.*certainly.*1,601 characters"):
        check_characters([{"role": "user", "content": "x" * 1601}], 100)
    plain = byte_tokenizer(chat_template=None)
    assert encode(plain, [{"role": "user", "content": "abc"}], 100)["input_ids"].shape == (1, 3)


@pytest.mark.parametrize(
    ("left", "right", "is_cut", "position"),
    [
        ((1, 2, 3), (1, 2, 3), False, None),
        ((1, 2, 3), (1, 5, 3), False, 1),
        ((1, 2, 3), (1, 2), False, 2),
        ((1, 2, 3), (1, 2), True, None),
        ((1, 2, 3), (4,), True, 0),
    ],
)
def test_the_first_difference(left, right, is_cut, position):
    assert first_difference(left, right, is_cut=is_cut) == position


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before


def test_a_page_stops_its_own_run_only():
    sessions = Sessions()
    mine, other = sessions.begin("mine"), sessions.begin("other")
    assert sessions.stop("mine")
    assert mine.is_set()
    assert not other.is_set()
    sessions.end("mine")
    assert not sessions.stop("mine")
    assert not sessions.stop("nobody")
