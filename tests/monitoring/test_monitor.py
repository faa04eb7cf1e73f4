"""What a monitor says, to whom, and that it never stands in the way of a call."""

from __future__ import annotations

import copy
import json
import pickle
import stat

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from rounds import make_round
from tiny_models import make_noisy, make_target
from transformers import LlamaForCausalLM

from hf_ssd import SSDConfig, SSDGenerationMixin, disable_ssd, enable_ssd, make_custom_generate
from hf_ssd.metrics import SSDStats
from hf_ssd.monitoring import Event, EventKind, JsonlSink, Monitor
from hf_ssd.monitoring.prometheus import MonitorCollector, prometheus_text

PROMPT = torch.tensor([[5, 9, 2, 7]])


def test_a_low_hit_rate_is_told_once_and_is_over_only_at_the_target():
    events: list[Event] = []
    monitor = Monitor([events.append], window=40)
    for hit in [True] * 40 + [False] * 30 + [True] * 25:  # down to 0.25, up to 0.625: above the floor, below the target
        monitor.on_round(make_round(hit=hit))
    low = [event.kind for event in events if event.kind in (EventKind.HIT_RATE_LOW, EventKind.HIT_RATE_BACK)]
    assert low == [EventKind.HIT_RATE_LOW]
    assert monitor.is_low
    for _ in range(10):
        monitor.on_round(make_round(hit=True))
    assert not monitor.is_low
    assert monitor.num_events[EventKind.HIT_RATE_BACK] == 1


def test_a_few_rounds_are_not_judged():
    monitor = Monitor()
    for _ in range(10):
        monitor.on_round(make_round(hit=False))
    assert not monitor.num_events


def test_a_drift_of_acceptance_is_told_once():
    monitor = Monitor(window=64)
    for accepted in [2] * 200 + [0] * 100:
        monitor.on_round(make_round(hit=True, accepted=accepted))
    assert monitor.num_events == {EventKind.ACCEPTANCE_DRIFT: 1}


@pytest.mark.parametrize("arguments", [{"window": 0}, {"hit_rate_floor": 0.8}, {"hit_rate_target": 1.2}])
def test_bad_settings_are_refused(arguments):
    with pytest.raises(ValueError, match="must be at"):
        Monitor(**arguments)


@pytest.mark.parametrize("backend", ["inline", "stream"])
def test_it_hears_of_every_round_and_call(backend):
    events: list[Event] = []
    monitor = Monitor([events.append])
    model = enable_ssd(make_target(), make_noisy(), SSDConfig(backend=backend), monitor=monitor)
    for prompts in (PROMPT, PROMPT.expand(3, -1)):
        before = monitor.figures().num_rounds
        model.generate(prompts, max_new_tokens=12)
        assert monitor.figures().num_rounds - before == model.ssd_stats.num_rounds > 0
        assert events[-1].kind is EventKind.CALL
        assert events[-1].figures == model.ssd_stats.to_dict()
    assert monitor.num_calls == {"ssd": 2}
    assert monitor.num_tokens == 12 + 36


def test_one_monitor_watches_several_models_and_leaves_with_disable_ssd():
    monitor = Monitor()
    models = [enable_ssd(make_target(), make_noisy(), SSDConfig(backend="inline"), monitor=monitor) for _ in range(2)]
    for model in models:
        model.generate(PROMPT, max_new_tokens=4)
    assert monitor.num_calls == {"ssd": 2}
    disable_ssd(models[0]).generate(PROMPT, max_new_tokens=4)
    assert monitor.num_calls == {"ssd": 2}
    assert not hasattr(models[0], "ssd_monitor")


def test_copies_and_pickles_of_a_watched_model_are_not_watched():
    model = enable_ssd(make_target(), make_noisy(), SSDConfig(backend="inline"), monitor=Monitor())
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert getattr(twin, "ssd_monitor", None) is None


def test_a_class_with_the_mixin_can_be_copied_and_pickled_while_it_is_watched():
    class Mixed(SSDGenerationMixin, LlamaForCausalLM):
        pass

    model = Mixed(make_target().config)
    model.ssd_monitor = Monitor()
    assert copy.deepcopy(model).ssd_monitor is model.ssd_monitor
    assert pickle.loads(pickle.dumps(model.ssd_monitor)) is None


def test_it_hears_of_custom_generate():
    model, monitor = make_target(), Monitor()
    model.ssd_monitor = monitor
    custom = make_custom_generate(make_noisy(), SSDConfig(backend="inline"))
    model.generate(PROMPT, max_new_tokens=6, custom_generate=custom)
    assert monitor.num_calls == {"ssd": 1}


def test_a_sink_that_fails_is_left_out_and_the_text_is_whole(caplog):
    def full_disk(event: Event) -> None:
        raise OSError(28, "No space left on device")

    heard: list[Event] = []
    model = make_target()
    expected = model.generate(PROMPT, max_new_tokens=8)
    enable_ssd(model, make_noisy(), SSDConfig(backend="inline"), monitor=Monitor([full_disk, heard.append]))
    for _ in range(2):
        assert torch.equal(model.generate(PROMPT, max_new_tokens=8), expected)
    assert len(heard) == 2


def test_a_degraded_call_is_told_with_its_cause():
    events: list[Event] = []
    Monitor([events.append]).on_call(SSDStats("ssd", num_tokens=7, degraded="no answer for 60 s"))
    assert [event.kind for event in events] == [EventKind.DEGRADED, EventKind.CALL]
    assert events[0].reason == "no answer for 60 s"
    assert events[0].is_warning


def test_json_lines_hold_every_event_and_no_text(tmp_path):
    path = tmp_path / "logs" / "ssd.jsonl"
    model = enable_ssd(make_target(), make_noisy(), SSDConfig(backend="inline"), monitor=Monitor([JsonlSink(path)]))
    model.generate(PROMPT, max_new_tokens=9)
    model.generate(PROMPT, max_new_tokens=9, ssd_config={"mode": "ar"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["figures"]["mode"]) for line in lines] == [("call", "ssd"), ("call", "ar")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Figures only: lists are rates by position, never token ids.
    assert all(0 <= rate <= 1 for line in lines for rate in line["figures"]["acceptance_by_position"])


def test_prometheus_text_has_the_figures():
    monitor = Monitor()
    for hit in (True, True, False, True):
        monitor.on_round(make_round(hit=hit))
    monitor.on_call(SSDStats("ssd", num_tokens=8))
    lines = prometheus_text(monitor).splitlines()
    assert "hf_ssd_hit_rate 0.75" in lines
    assert 'hf_ssd_calls_total{mode="ssd"} 1.0' in lines
    assert "hf_ssd_tokens_total 8.0" in lines
    assert 'hf_ssd_round_seconds{outcome="miss",quantile="0.95"} 0.01' in lines


def test_two_models_share_a_registry_by_labels():
    registry = CollectorRegistry()
    for name in ("small", "large"):
        monitor = Monitor()
        monitor.on_call(SSDStats("ssd", num_tokens=3))
        registry.register(MonitorCollector(monitor, {"model": name}))
    text = generate_latest(registry).decode()
    assert 'hf_ssd_tokens_total{model="small"} 3.0' in text
    assert 'hf_ssd_tokens_total{model="large"} 3.0' in text
