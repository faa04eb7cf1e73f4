from __future__ import annotations

import os

import pytest
import torch

from hf_ssd.runtime import placement
from hf_ssd.runtime.placement import (
    InsufficientMemoryError,
    available_cores,
    choose_assistant_device,
    free_memory,
    model_bytes,
    normalize_device,
    place_assistant,
    split_threads,
    target_devices,
)

CPU = torch.device("cpu")
GPU0, GPU1, GPU2 = (torch.device("cuda", index) for index in range(3))
MB = 10**6


class TestChooseAssistantDevice:
    def test_takes_the_unused_accelerator_with_most_free_memory(self):
        free = {GPU0: 900 * MB, GPU1: 100 * MB, GPU2: 200 * MB, CPU: 5000 * MB}
        assert choose_assistant_device(50 * MB, [GPU0], free) == GPU2

    def test_a_target_on_the_cpu_leaves_every_accelerator(self):
        assert choose_assistant_device(50 * MB, [CPU], {GPU0: 60 * MB, CPU: 5000 * MB}) == GPU0

    @pytest.mark.parametrize(("used", "expected"), [([CPU], CPU), ([GPU0], GPU0)])
    def test_shares_the_targets_device_where_none_is_free(self, used, expected):
        free = dict.fromkeys({CPU, *used}, 100 * MB)
        assert choose_assistant_device(50 * MB, used, free) == expected

    def test_shares_where_the_free_accelerator_is_too_small(self):
        assert choose_assistant_device(50 * MB, [GPU0], {GPU0: 100 * MB, GPU1: 10 * MB, CPU: 0}) == GPU0

    def test_shares_an_accelerator_of_a_target_that_is_partly_offloaded(self):
        assert choose_assistant_device(50 * MB, [CPU, GPU0], {GPU0: 100 * MB, CPU: 5000 * MB}) == GPU0

    def test_keeps_an_assistant_on_an_accelerator_of_its_own(self):
        free = {GPU0: 900 * MB, GPU1: 0, GPU2: 800 * MB, CPU: 5000 * MB}
        assert choose_assistant_device(50 * MB, [GPU0], free, current=GPU1) == GPU1

    def test_moves_an_assistant_off_the_targets_accelerator(self):
        assert choose_assistant_device(50 * MB, [GPU0], {GPU0: 900 * MB, GPU1: 60 * MB, CPU: 0}, current=GPU0) == GPU1

    @pytest.mark.parametrize("requested", ["cuda", "cuda:0", GPU0, 0])
    def test_obeys_an_explicit_device(self, requested):
        free = {GPU0: 100 * MB, GPU1: 900 * MB, CPU: 5000 * MB}
        assert choose_assistant_device(50 * MB, [GPU0], free, requested) == GPU0

    @pytest.mark.parametrize("requested", ["cuda:7", "nonsense"])
    def test_refuses_a_device_that_is_not_there(self, requested):
        with pytest.raises(ValueError, match=requested):
            choose_assistant_device(1, [CPU], {GPU0: MB, CPU: MB}, requested)

    def test_names_the_devices_there_are(self):
        with pytest.raises(ValueError, match=r"one of \['auto', 'cuda:0', 'cpu'\], but got \"cuda:7\""):
            choose_assistant_device(1, [CPU], {GPU0: MB, CPU: MB}, "cuda:7")

    @pytest.mark.parametrize("requested", ["auto", "cuda:0"])
    def test_says_what_is_needed_and_what_is_free(self, requested):
        with pytest.raises(InsufficientMemoryError, match=r"needs 50\.0 MB .* 40\.0 MB on cuda:0.*assistant_device"):
            choose_assistant_device(50 * MB, [GPU0], {GPU0: 40 * MB, CPU: 5000 * MB}, requested)

    def test_weights_that_are_in_cpu_memory_need_no_more_of_it(self):
        assert choose_assistant_device(50 * MB, [CPU], {CPU: 0}, current=CPU) == CPU


def test_target_devices_of_a_plain_model(target):
    assert target_devices(target) == (CPU,)


def test_target_devices_follow_the_device_map(target):
    target.hf_device_map = {
        "model.embed_tokens": 0,
        "model.layers.0": "cuda:1",
        "model.layers.1": "cpu",
        "lm_head": "disk",
    }
    assert target_devices(target) == (GPU0, GPU1, CPU)


def test_target_devices_of_a_model_without_weights():
    assert target_devices(torch.nn.Identity()) == (CPU,)


@pytest.mark.parametrize(("device", "expected"), [("cuda", GPU0), (1, GPU1), ("cpu:0", CPU), (GPU2, GPU2)])
def test_normalize_device(device, expected):
    assert normalize_device(device) == expected


def test_model_bytes_counts_tied_weights_once():
    from tiny_models import make_target

    tied, untied = make_target(tie_word_embeddings=True), make_target()
    assert model_bytes(untied) - model_bytes(tied) == 64 * 32 * 4


def test_free_memory_always_knows_the_cpu():
    assert free_memory()[CPU] > 0


def test_free_memory_where_accelerator_and_cpu_share_it(monkeypatch):
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"mps": 7 * MB})
    assert free_memory() == {torch.device("mps", 0): 7 * MB, CPU: 7 * MB}


def test_place_assistant_reads_models_and_memory(target, noisy, monkeypatch):
    monkeypatch.setattr(placement, "free_memory", lambda: {GPU0: 10 * MB, GPU1: 20 * MB, CPU: 0})
    assert place_assistant(noisy, target) == GPU1
    assert place_assistant(noisy, target, "cpu") == CPU
    target.hf_device_map = {"": 1}
    assert place_assistant(noisy, target) == GPU0


class TestSplitThreads:
    @pytest.mark.parametrize(
        ("total", "expected"), [(1, (1, 1)), (2, (1, 1)), (4, (3, 1)), (8, (6, 2)), (16, (12, 4)), (7, (6, 1))]
    )
    def test_assistant_gets_a_quarter(self, total, expected):
        assert split_threads(None, None, total) == expected

    @pytest.mark.parametrize(
        ("target", "assistant", "expected"),
        [
            (14, None, (14, 2)),
            (16, None, (16, 1)),
            (2, None, (2, 4)),
            (None, 10, (6, 10)),
            (None, 16, (1, 16)),
            (3, 5, (3, 5)),
        ],
    )
    def test_obeys_numbers(self, target, assistant, expected):
        assert split_threads(target, assistant, 16) == expected

    def test_warns_of_more_threads_than_cores(self, monkeypatch):
        messages = []
        monkeypatch.setattr(placement.logger, "warning_once", messages.append)
        assert split_threads(4, 2, 4) == (4, 2)
        assert "4 cores" in messages[0]
        split_threads(None, None, 1)
        split_threads(3, 1, 4)
        assert len(messages) == 1


class TestAvailableCores:
    def test_no_more_than_torch_was_told(self):
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            assert available_cores() == 1
        finally:
            torch.set_num_threads(before)

    def test_no_more_than_the_system_grants(self, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
        assert available_cores() == 3

    def test_where_the_system_has_no_affinity(self, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 10)
        assert available_cores() == 10


@pytest.mark.gpu
def test_the_assistant_is_placed_on_the_accelerator_there_is(target, noisy):
    accelerator = normalize_device(torch.accelerator.current_accelerator())
    assert accelerator in free_memory()
    assert place_assistant(noisy, target).type == accelerator.type
    assert place_assistant(noisy, target, "cpu") == CPU
