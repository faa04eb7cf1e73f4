"""What may hold around a call: gradient and autocast modes, default dtypes and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from callers.enabled import GREEDY, assert_speculated, enabled_target
from streamers import take_time
from tiny_models import make_target, padded_batch, prompt

from hf_ssd import SSDConfig


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "another default device": lambda: torch.device("meta"),  # as with an accelerator; what is made there is lost
}


@pytest.mark.parametrize("name", CONTEXTS)
class TestAround:
    @pytest.mark.parametrize("num_rows", [1, 2])
    def test_greedy_equals_plain(self, name: str, num_rows: int) -> None:
        batch = padded_batch([prompt(4 + row, seed=row) for row in range(num_rows)])
        target, model = make_target(), enabled_target()
        with CONTEXTS[name]():
            expected = target.generate(**batch, **GREEDY).tolist()
            found = model.generate(**batch, **GREEDY).tolist()
        assert found == expected
        assert_speculated(model)
        # A first call in an unusual context must not decide how later ones run.
        assert model.generate(**batch, **GREEDY).tolist() == target.generate(**batch, **GREEDY).tolist()
        assert_speculated(model)
        if num_rows == 1:
            assert any(round_.num_draft_tokens > round_.depth for round_ in model.ssd_stats.rounds), "no trees"

    def test_a_seed_gives_the_tokens_of_mode_ar(self, name: str) -> None:
        model, ids, sampled = enabled_target(), prompt(), {"do_sample": True, "max_new_tokens": 30}
        with CONTEXTS[name]():
            found = model.generate(ids, ssd_config={"backend": "inline", "seed": 3}, **sampled)
            assert_speculated(model)
            expected = model.generate(ids, ssd_config={"mode": "ar", "seed": 3}, **sampled)
        assert found.tolist() == expected.tolist()


def test_in_a_process_too(shared_noisy) -> None:
    """The assistant's process knows nothing of the caller's modes."""
    for name, context in CONTEXTS.items():
        target, model, ids = make_target(), enabled_target(shared_noisy, SSDConfig()), prompt()
        with context():
            expected = target.generate(ids, **GREEDY).tolist()
            assert model.generate(ids, stopping_criteria=take_time(), **GREEDY).tolist() == expected, name
        assert_speculated(model)


def test_outputs_may_be_trained_on() -> None:
    """Only what was made in inference mode may not; `generate()` promises ordinary tensors."""
    model = enabled_target()
    ids = model.generate(prompt(), **GREEDY)
    assert not ids.is_inference()
    model(ids).logits.sum().backward()
    assert next(model.parameters()).grad is not None
