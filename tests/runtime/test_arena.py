"""A model's weights in memory that two processes share."""

from __future__ import annotations

import os

import pytest
import torch
from tiny_models import make_target

from hf_ssd.runtime.arena import Arena, open_model, share_model


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
