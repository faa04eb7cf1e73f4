"""Fixtures that all tests share. Each test gets models of its own, as `enable_ssd` changes them."""

from __future__ import annotations

import os

# Before transformers is imported: no test may reach for the hub, and a mistyped folder must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread, here and in what tests start: on busy cores, threads that wait for each other make a tiny model a hundred
# times slower. A test that needs more calls torch.set_num_threads().
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import tiny_models
import torch
from transformers import LlamaForCausalLM


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots", metavar="FOLDER", help="Where tests/demo/test_page.py writes pictures of the page."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def target() -> LlamaForCausalLM:
    """T."""
    return tiny_models.make_target()


@pytest.fixture
def noisy() -> LlamaForCausalLM:
    """D: an assistant that is partly right."""
    return tiny_models.make_noisy()


@pytest.fixture
def unrelated() -> LlamaForCausalLM:
    """Z: an assistant that is hardly ever right."""
    return tiny_models.make_unrelated()


@pytest.fixture
def twin() -> LlamaForCausalLM:
    """A copy of T: an assistant that is always right."""
    return tiny_models.make_target()


@pytest.fixture(params=["noisy", "unrelated", "twin"])
def assistant(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """D, Z and a copy of T in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def shared_noisy() -> LlamaForCausalLM:
    """D, one for all tests that draft in a process: starting its worker takes seconds. Leave it as it is."""
    return tiny_models.make_noisy()


@pytest.fixture(scope="session")
def shared_unrelated() -> LlamaForCausalLM:
    """Z, likewise."""
    return tiny_models.make_unrelated()


@pytest.fixture(scope="session")
def shared_twin() -> LlamaForCausalLM:
    """A copy of T, likewise."""
    return tiny_models.make_target()


@pytest.fixture
def prompt_ids() -> torch.LongTensor:
    """A prompt of six tokens, of shape `(1, 6)`."""
    return tiny_models.prompt()
