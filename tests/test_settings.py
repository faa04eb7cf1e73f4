"""Every `SSDConfig` field moves a counter or an output: HF40739, an option accepted but never reaching the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import make_noisy, prompt

from hf_ssd import SSDConfig
from hf_ssd.drafting import engine
from hf_ssd.drafting.int8 import is_supported
from hf_ssd.drafting.pace import Pace
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.runtime.process import AssistantWorker

INLINE = {"backend": "inline", "num_assistant_tokens": 4}
PROCESS = {"backend": "process", "num_assistant_tokens": 4}


@dataclasses.dataclass(frozen=True)
class Effect:
    """Two values of a field, and what must differ between a call with one and a call with the other."""

    first: Any
    second: Any
    observe: Callable[[SSDStats, list[float]], Any]
    base: dict[str, Any] = dataclasses.field(default_factory=lambda: INLINE)
    prompt_length: int = 6


def hits(stats: SSDStats, timeouts: list[float]) -> Any:
    return tuple(r.origin for r in stats.rounds)


def drafts(stats: SSDStats, timeouts: list[float]) -> Any:
    return tuple((r.num_draft_tokens, r.num_accepted) for r in stats.rounds)


def lengths(stats: SSDStats, timeouts: list[float]) -> Any:
    return tuple(r.num_emitted for r in stats.rounds)


SAMPLING = {**INLINE, "seed": 0, "verification": "token"}

EFFECTS = {
    "verification": Effect("token", "block", lengths, SAMPLING),
    "seed": Effect(1, (2,), lengths, SAMPLING),
    "assistant_temperature": Effect(0.3, 3.0, lengths, SAMPLING),
    "saguaro_coefficient": Effect(0.1, 1.0, lengths, SAMPLING),
    "mode": Effect("ssd", "sd", lambda stats, _: stats.hit_rate is None),
    "num_assistant_tokens": Effect(1, 6, lambda stats, _: max(r.depth for r in stats.rounds)),
    "draft_tree_size": Effect(None, 8, lambda stats, _: any(r.num_draft_tokens > r.depth for r in stats.rounds)),
    # A long prompt, in which most pairs of tokens have occurred before.
    "ngram_drafts": Effect(False, True, drafts, prompt_length=700),
    "backup": Effect("jit", "none", lambda stats, _: {r.origin for r in stats.rounds if r.miss is not None}),
    "cache_budget": Effect(1, 12, lambda stats, _: stats.num_hits),
    "fan_out": Effect([1], [6], lambda stats, _: stats.num_hits),
    "expected_acceptance": Effect(
        0.02, 0.98, hits, {**INLINE, "cache_budget": 2, "fan_out": "geometric", "draft_tree_size": None}
    ),
    "power_law_exponent": Effect(
        0.01, 50.0, hits, {**INLINE, "cache_budget": 5, "fan_out": "geometric", "draft_tree_size": None}
    ),
    "draft_vocab_size": Effect(None, 4, lambda stats, _: stats.acceptance),
    "assistant_quantization": Effect(None, "int8" if is_supported() else "auto", drafts),
    "backend": Effect("inline", "process", lambda stats, _: stats.assistant_threads),
    "assistant_device": Effect("auto", "cuda:99", lambda stats, _: None, PROCESS),  # which there is not
    "target_threads": Effect(1, 2, lambda stats, _: stats.target_threads, {**PROCESS, "assistant_threads": 1}),
    "assistant_threads": Effect(1, 2, lambda stats, _: stats.assistant_threads, {**PROCESS, "target_threads": 1}),
    "timeout_s": Effect(50.0, 70.0, lambda _, timeouts: set(timeouts), PROCESS),
    "token_budget": Effect(None, 8, lambda stats, _: stats.tokens_by_mode.get("ar")),
    # No machine takes so little time per token.
    "sla_ms_per_token": Effect(None, 1e-6, lambda stats, _: len(stats.switches)),
    "memory_budget": Effect(None, 1, lambda stats, _: stats.num_hits),
    "draft_threshold": Effect(0.0, 0.9, drafts, {**INLINE, "mode": "sd", "num_assistant_tokens": 8}),
    "trace": Effect(False, True, lambda stats, _: (bool(stats.verifier_spans), bool(stats.speculator_spans))),
}


def test_every_field_has_an_effect_listed() -> None:
    assert set(EFFECTS) == {field.name for field in dataclasses.fields(SSDConfig)}


@pytest.mark.parametrize("field", EFFECTS)
def test_a_field_has_its_effect(field, target, shared_noisy, monkeypatch) -> None:
    effect = EFFECTS[field]
    if field == "assistant_quantization" and not is_supported():
        pytest.skip("this build of torch has no kernels for 8 bits")
    # What is measured must come from the field, not from the clock.
    monkeypatch.setattr(Pace, "rates", lambda self, acceptance: None)
    monkeypatch.setattr(engine, "MIN_UNMEASURED_CHANCE", 0.02)
    receive = AssistantWorker.receive

    def observe(value: Any) -> Any:
        timeouts: list[float] = []

        def note_timeout(self, row: int, timeout_s: float):
            timeouts.append(timeout_s)
            return receive(self, row, timeout_s)

        monkeypatch.setattr(AssistantWorker, "receive", note_timeout)
        threads = torch.get_num_threads()
        config = SSDConfig(**{**effect.base, field: value})
        try:
            generate_with_ssd(
                target,
                inputs=prompt(effect.prompt_length),
                assistant_model=shared_noisy if effect.base["backend"] == "process" else make_noisy(),
                ssd_config=config,
                max_new_tokens=60,
                do_sample=effect.base is SAMPLING,
            )
        except ValueError as error:
            return str(error)
        assert torch.get_num_threads() == threads
        assert target.ssd_stats.degraded is None
        return effect.observe(target.ssd_stats, timeouts)

    first = observe(effect.first)
    assert first != observe(effect.second)
    if effect.base["backend"] == "inline" and field != "backend":
        assert first == observe(effect.first)
