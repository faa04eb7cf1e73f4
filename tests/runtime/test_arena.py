"""A model's weights in memory that two processes share."""

from __future__ import annotations

import gc
import os
import resource

import psutil
import pytest
import torch
from tiny_models import make_target

from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime.arena import Arena, open_model, share_model
from hf_ssd.runtime.process import AssistantWorker


def round_trip(model: torch.nn.Module) -> torch.nn.Module:
    parcel, arena = share_model(model)
    return open_model(parcel, Arena(os.dup(arena.descriptor), arena.size_bytes))


def test_tied_weights_stay_tied_and_take_memory_once() -> None:
    model = make_target(tie_word_embeddings=True)
    parcel, arena = share_model(model)
    copy = open_model(parcel, Arena(os.dup(arena.descriptor), arena.size_bytes))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert parcel.size_bytes < 1.1 * sum(p.numel() * 4 for p in model.parameters())


def test_views_of_one_storage_stay_views() -> None:
    module = torch.nn.Module()
    base = torch.arange(12.0).view(3, 4)
    module.register_buffer("base", base)
    module.register_buffer("column", base[:, 1])
    module.register_buffer("turned", base.T)
    copy = round_trip(module)
    copy.base[2, 1] = 100.0
    for side in (module, copy):
        assert side.column[2] == side.turned[1, 2] == side.base[2, 1] == 100.0


def test_both_sides_see_changes_in_place() -> None:
    model = torch.nn.Linear(3, 2)
    copy = round_trip(model)
    with torch.no_grad():
        model.weight.fill_(1.5)
        copy.bias.fill_(-2.0)
    assert torch.equal(copy.weight, model.weight)
    assert torch.equal(copy.bias, model.bias)


def test_buffers_dtypes_and_flags_are_kept() -> None:
    module = torch.nn.Module()
    module.register_buffer("flags", torch.tensor([True, False]))
    module.register_buffer("empty", torch.empty(0))
    module.register_buffer("short", torch.randn(5).bfloat16(), persistent=False)
    module.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    module.plain = torch.tensor(3)  # neither parameter nor buffer
    copy = round_trip(module)
    for name in ("flags", "empty", "short", "frozen", "plain"):
        assert torch.equal(getattr(copy, name), getattr(module, name))
        assert getattr(copy, name).dtype == getattr(module, name).dtype
    assert isinstance(copy.frozen, torch.nn.Parameter)
    assert not copy.frozen.requires_grad
    assert list(copy.state_dict()) == list(module.state_dict())


def test_what_cannot_be_shared_is_named() -> None:
    module = torch.nn.Module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="cannot be placed in shared memory"):
        share_model(module)


class TestNoMemoryLeft:
    """A page that is missing when it is first written to would end the program, without an exception."""

    @pytest.fixture
    def limit(self):
        """The system gives no more than a page; a limit on the size of files holds for such memory too."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def test_it_is_known_before_anything_is_moved(self, limit) -> None:
        model = make_target()
        places = [parameter.data_ptr() for parameter in model.parameters()]
        gc.collect()
        before = psutil.Process().num_fds()
        with pytest.raises(OSError, match="File too large"):
            share_model(model)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert psutil.Process().num_fds() == before

    def test_a_worker_that_has_none_says_so(self, limit) -> None:
        with pytest.raises(SpeculatorError, match=r"there is no shared memory for the assistant: .*File too large"):
            AssistantWorker("cpu").start(make_target())


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_memory_is_taken_and_empty(monkeypatch, has_fallocate: bool) -> None:
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        monkeypatch.setattr("hf_ssd.runtime.arena.RESERVED_AT_ONCE", 1000)
    arena = Arena.create(2500)
    assert os.fstat(arena.descriptor).st_size == 2500
    assert os.fstat(arena.descriptor).st_blocks > 0
    assert os.pread(arena.descriptor, 3000, 0) == bytes(2500)
    arena.close_descriptor()


def test_a_copy_that_fails_leaves_the_model_as_it_was(monkeypatch) -> None:
    model = make_target()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    gc.collect()  # what earlier tests have left
    before = psutil.Process().num_fds()

    def fail(self, place):
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(Arena, "tensor", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for a copy"):
        share_model(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    gc.collect()
    assert psutil.Process().num_fds() == before
