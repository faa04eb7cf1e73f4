"""PEFT adapters on target and assistant, switched between calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from plain import assert_equals_plain
from tiny_models import make_noisy, make_target, prompt
from transformers import PreTrainedModel

from hf_ssd import SSDConfig, custom_generate_path, disable_ssd, enable_ssd, make_custom_generate
from hf_ssd.checks import UnsupportedError
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.runtime import pool
from hf_ssd.runtime.model_state import ModelState
from hf_ssd.wrappers import unwrap

peft = pytest.importorskip("peft")

# PEFT asks transformers for things by names that are about to go.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")

# Copied tokens are not the assistant's word.
INLINE = SSDConfig(backend="inline", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
GREEDY = {"max_new_tokens": 40, "do_sample": False}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def assert_drafted(stats: SSDStats) -> None:
    assert stats.acceptance > 0.4
    assert stats.num_hits > 2


def with_adapters(model: PreTrainedModel) -> torch.nn.Module:
    """`model` with an adapter that does nothing and one that changes everything; the former is active."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**LORA), adapter_name="nothing")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped.add_adapter("everything", peft.LoraConfig(**LORA, lora_alpha=64, init_lora_weights=False))
    return wrapped.eval()


class TestTarget:
    @pytest.mark.parametrize("adapter", ["nothing", "everything"])
    def test_an_enabled_wrapper(self, noisy, adapter: str) -> None:
        plain, target = with_adapters(make_target()), with_adapters(make_target())
        plain.set_adapter(adapter)
        target.set_adapter(adapter)
        expected = plain.generate(input_ids=prompt(12), **GREEDY)
        assert enable_ssd(target, noisy, INLINE) is target
        assert target.generate(input_ids=prompt(12), **GREEDY).equal(expected)
        assert target.ssd_stats.num_rounds
        if adapter == "nothing":
            assert_drafted(target.ssd_stats)
        with target.disable_adapter():
            ids = target.generate(input_ids=prompt(12), **GREEDY)
        assert ids.equal(make_target().generate(prompt(12), **GREEDY))
        assert_drafted(target.ssd_stats)
        disable_ssd(target)
        assert type(unwrap(target)) is type(make_target())

    def test_an_assistant_with_the_same_adapter(self) -> None:
        target, assistant = with_adapters(make_target()), with_adapters(make_noisy())
        for model in (target, assistant):
            model.set_adapter("everything")
        assert_drafted(assert_equals_plain(unwrap(target), assistant, prompt(12), INLINE, **GREEDY))

    def test_by_custom_generate(self) -> None:
        target, assistant = with_adapters(make_target()), with_adapters(make_noisy())
        expected = target.generate(input_ids=prompt(12), **GREEDY)
        ssd = make_custom_generate(assistant, INLINE)
        assert target.generate(input_ids=prompt(12), custom_generate=ssd, **GREEDY).equal(expected)
        assert_drafted(target.ssd_stats)
        folder = {"custom_generate": custom_generate_path(), "trust_remote_code": True, "ssd_config": INLINE}
        ids = target.generate(input_ids=prompt(12), assistant_model=assistant, **folder, **GREEDY)
        assert ids.equal(expected)
        assert_drafted(target.ssd_stats)

    @pytest.mark.parametrize("role", ["target", "assistant"])
    def test_virtual_tokens_are_refused(self, target, noisy, role: str) -> None:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        models = {"target": target, "assistant": noisy}
        models[role] = peft.get_peft_model(models[role], config)
        with pytest.raises(UnsupportedError, match="`default` is PROMPT_TUNING, which puts virtual tokens"):
            enable_ssd(models["target"], models["assistant"], INLINE)
        with pytest.raises(UnsupportedError, match="PROMPT_TUNING"):
            generate_with_ssd(models["target"], inputs=prompt(6), assistant_model=models["assistant"])


class TestSwitching:
    """The next call drafts with what the assistant has become, in the same process or thread."""

    @pytest.fixture(params=[pytest.param("process", marks=pytest.mark.slow), "stream"])
    def backend(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def assistant(self) -> Iterator[torch.nn.Module]:
        model = with_adapters(make_target())
        yield model
        pool.close_worker(unwrap(model))

    def acceptance(self, assistant: torch.nn.Module, backend: str) -> float:
        # Chains: a tree that grows while there is time may hold the right token by chance.
        config = SSDConfig(
            backend=backend, num_assistant_tokens=4, draft_tree_size=None, ngram_drafts=False, backup="jit"
        )
        value = assert_equals_plain(make_target(), assistant, prompt(12), config, **GREEDY).acceptance
        assert value is not None
        return value

    def test_each_way_is_noticed(self, assistant, backend: str) -> None:
        assert self.acceptance(assistant, backend) == 1.0
        workers = pool._WORKERS if backend == "process" else pool._THREADS
        worker = workers[unwrap(assistant)]
        assistant.set_adapter("everything")
        assert self.acceptance(assistant, backend) < 0.4
        with assistant.disable_adapter():
            assert self.acceptance(assistant, backend) == 1.0
        assert self.acceptance(assistant, backend) < 0.4
        assistant.set_adapter("nothing")
        assert self.acceptance(assistant, backend) == 1.0

        assistant.merge_adapter(["everything"])
        assert self.acceptance(assistant, backend) < 0.4
        assistant.unmerge_adapter()
        assert self.acceptance(assistant, backend) > 0.9  # but for rounding
        with torch.no_grad():
            for name, parameter in assistant.named_parameters():
                if "lora_B.nothing" in name:
                    parameter.add_(1.0)
        assert self.acceptance(assistant, backend) < 0.4
        assert workers[unwrap(assistant)] is worker

        base = assistant.unload()  # other modules, so another worker
        assert self.acceptance(base, backend) > 0.9
        assert pool._WORKERS.get(base, pool._THREADS.get(base)) is not worker


class TestState:
    def test_what_is_switched_is_noticed(self) -> None:
        model = with_adapters(make_target())
        seen = [ModelState.of(model)]
        model.set_adapter("everything")
        seen.append(ModelState.of(model))
        with model.disable_adapter():
            seen.append(ModelState.of(model))
        next(each for each in model.modules() if hasattr(each, "set_scale")).set_scale("everything", 0.5)
        seen.append(ModelState.of(model))
        model.add_weighted_adapter(["nothing", "everything"], [1.0, 0.5], "both")
        seen.append(ModelState.of(model))
        assert all(first != second for index, first in enumerate(seen) for second in seen[index + 1 :])
        assert ModelState.of(model) == seen[-1]


class TestTransformersOwn:
    """Adapters that transformers put into the model itself, without a wrapper."""

    def test_on_either_side(self, target, noisy) -> None:
        config = peft.LoraConfig(**LORA, init_lora_weights=False)
        assistant = make_noisy()
        try:
            for model in (target, assistant):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    model.add_adapter(config)
                model.eval()
        except ValueError as error:
            pytest.skip(str(error))
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, **GREEDY))
        before = ModelState.of(assistant)
        assistant.disable_adapters()
        assert ModelState.of(assistant) != before
        target.disable_adapters()
        assert_drafted(assert_equals_plain(target, noisy, prompt(12), INLINE, **GREEDY))
