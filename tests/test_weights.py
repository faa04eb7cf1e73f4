"""Models as people have them: compiled, offloaded, quantised, in training, and with weights that change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from plain import assert_equals_plain
from tiny_models import make_noisy, make_target, make_unrelated, prompt
from torch import nn
from transformers import PreTrainedModel

from hf_ssd import SSDConfig, disable_ssd, enable_ssd, make_custom_generate
from hf_ssd.checks import UnsupportedError
from hf_ssd.compat import CHECKPOINTING_DROPS_CACHE
from hf_ssd.drafting.int8 import is_plain, is_supported
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.runtime import pool
from hf_ssd.runtime.arena import open_model, pack_again, share_model
from hf_ssd.runtime.model_state import ModelState
from hf_ssd.wrappers import input_device, unwrap

# Copied tokens are not the assistant's word.
INLINE = SSDConfig(backend="inline", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
# Chains: a tree that grows while there is time may hold the right token by chance.
AUTO = SSDConfig(num_assistant_tokens=4, draft_tree_size=None, ngram_drafts=False, backup="jit")
STREAM = SSDConfig.of({**vars(AUTO), "backend": "stream"})
GREEDY = {"max_new_tokens": 40, "do_sample": False}


def assert_drafted(stats: SSDStats) -> None:
    assert stats.acceptance > 0.4
    assert stats.num_hits > 2


def acceptance(target: PreTrainedModel, assistant: PreTrainedModel, config: SSDConfig) -> float:
    value = assert_equals_plain(target, assistant, prompt(12), config, **GREEDY).acceptance
    assert value is not None
    return value


def become(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Copies weights in place."""
    with torch.no_grad():
        for own, given in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(given)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    heard: list[str] = []
    monkeypatch.setattr(pool.logger, "warning_once", heard.append)
    return heard


class TestCompiled:
    """What `torch.compile` leaves around and on a model. Only the slow test has it compile."""

    @pytest.fixture(autouse=True)
    def _stance(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with torch.compiler.set_stance("default" if "slow" in request.keywords else "force_eager"):
            yield

    def test_a_wrapped_target(self, noisy) -> None:
        compiled = torch.compile(make_target(), backend="eager")
        assert unwrap(compiled) is compiled._orig_mod
        expected = make_target().generate(prompt(12), **GREEDY)
        assert enable_ssd(compiled, noisy, INLINE) is compiled
        assert compiled.generate(prompt(12), **GREEDY).equal(expected)
        assert_drafted(compiled.ssd_stats)
        disable_ssd(compiled)
        assert type(compiled._orig_mod).__mro__[0] is type(make_target())

    def test_a_wrapped_assistant(self, target) -> None:
        compiled = torch.compile(make_noisy(), backend="eager")
        assert_drafted(assert_equals_plain(target, compiled, prompt(12), INLINE, **GREEDY))
        expected = make_target().generate(prompt(12), **GREEDY)
        ours = target.generate(prompt(12), custom_generate=make_custom_generate(compiled, INLINE), **GREEDY)
        assert ours.equal(expected)
        enable_ssd(target, compiled, INLINE)
        assert target.generate(prompt(12), **GREEDY).equal(expected)
        assert_drafted(target.ssd_stats)

    @pytest.mark.parametrize("how", ["forward", "compile"])
    def test_a_compiled_forward_of_the_target(self, target, noisy, how: str) -> None:
        compile_forward(target, how)
        assert_drafted(assert_equals_plain(target, noisy, prompt(12), INLINE, **GREEDY))

    @pytest.mark.slow
    def test_a_compiled_target_runs_what_was_compiled(self, target, noisy) -> None:
        graphs: list[object] = []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
            graphs.append(graph)
            return graph.forward

        target.forward = torch.compile(target.forward, backend=backend, dynamic=True)
        assert_drafted(assert_equals_plain(target, noisy, prompt(12), INLINE, **GREEDY))
        assert graphs

    def test_a_compiled_forward_of_the_assistant(self, target) -> None:
        """Its process gets the function that was compiled."""
        assistant = make_target()
        compile_forward(assistant, "forward")
        parcel, arena = share_model(assistant)
        copy = open_model(parcel, arena)
        assert copy.forward.__func__ is type(copy).forward
        assert copy(prompt(6)).logits.equal(target(prompt(6)).logits)

    @pytest.mark.parametrize("how", ["forward", "compile"])
    def test_a_compiled_assistant_drafts(self, target, how: str) -> None:
        assistant = make_noisy()
        compile_forward(assistant, how)
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, **GREEDY))


class TestWrappers:
    @pytest.mark.parametrize(
        "wrap", [lambda model: model, nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))]
    )
    def test_the_model_inside_is_found(self, wrap) -> None:
        model = make_target()
        assert unwrap(wrap(model)) is model

    @pytest.mark.parametrize("other", ["gpt2", None, nn.Linear(2, 2)])
    def test_what_is_no_model_is_left(self, other) -> None:
        assert unwrap(other) is other


def compile_forward(model: PreTrainedModel, how: str) -> None:
    if how == "compile":
        model.compile(backend="eager", dynamic=True)
    else:
        model.forward = torch.compile(model.forward, backend="eager", dynamic=True)


class TestOffloaded:
    """accelerate's hooks load each layer's weights when it is run."""

    def offloaded(self, model: PreTrainedModel, folder: object, *, partly: bool = False) -> PreTrainedModel:
        from accelerate import disk_offload, dispatch_model

        if not partly:
            return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
        places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
        places |= {"model.layers.1": "disk", "lm_head": "cpu"}
        return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)

    @pytest.mark.parametrize("partly", [False, True])
    def test_the_target(self, noisy, tmp_path, partly: bool) -> None:
        target = self.offloaded(make_target(), tmp_path, partly=partly)
        assert any(parameter.is_meta for parameter in target.parameters())
        assert input_device(target) == torch.device("cpu")
        stats = assert_equals_plain(target, noisy, prompt(12), INLINE, **GREEDY)
        assert_drafted(stats)
        assert any(each.num_draft_tokens > each.depth for each in stats.rounds)  # it takes trees

    @pytest.mark.parametrize("partly", [False, True])
    def test_the_assistant_drafts_in_a_thread(self, target, tmp_path, warnings, partly: bool) -> None:
        assistant = self.offloaded(make_target(), tmp_path, partly=partly)
        assert acceptance(target, assistant, INLINE) == 1.0
        assert acceptance(target, assistant, AUTO) == 1.0
        assert acceptance(target, assistant, AUTO) == 1.0
        assert assistant in pool._THREADS
        assert len(warnings) == 1
        assert "drafts in a thread" in warnings[0]
        pool.close_worker(assistant)

    def test_loaded_with_a_device_map(self, target, tmp_path) -> None:
        make_noisy().save_pretrained(tmp_path)
        assistant = type(target).from_pretrained(tmp_path, device_map="auto")
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, **GREEDY))


def checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    # The old name is about to go.
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    return model


class TestTraining:
    def test_an_assistant_in_training_drafts_without_dropout(self, target) -> None:
        assistant = make_noisy(noise=0.0, attention_dropout=0.5).train()
        for config in (INLINE, STREAM):
            assert acceptance(target, assistant, config) == 1.0
        assert assistant.training
        pool.close_worker(assistant)

    def test_an_assistant_with_gradient_checkpointing(self, target, warnings) -> None:
        """The hook that makes its inputs require gradients cannot be sent to a process."""
        assistant = checkpointing(make_noisy(noise=0.0).train())
        assert acceptance(target, assistant, INLINE) == 1.0
        assert acceptance(target, assistant, AUTO) == 1.0
        assert len(warnings) == (assistant in pool._THREADS)
        pool.close_worker(assistant)

    def test_a_target_left_in_training_mode(self, noisy) -> None:
        target = checkpointing(make_target().train())
        if CHECKPOINTING_DROPS_CACHE:
            expected = target.generate(prompt(12), **GREEDY)
            with pytest.raises(UnsupportedError, match="is in training mode with gradient checkpointing"):
                generate_with_ssd(target, inputs=prompt(12), assistant_model=noisy, ssd_config=INLINE)
            enable_ssd(target, noisy, INLINE)
            assert target.generate(prompt(12), **GREEDY).equal(expected)
            return
        assert_drafted(assert_equals_plain(target, noisy, prompt(12), INLINE, **GREEDY))
        assert target.training

    def test_a_targets_dropout_is_its_own_affair(self, noisy) -> None:
        """Plain `generate()` drops out too, so nothing can be compared; once that ends it can, trees and all."""
        target = make_target(attention_dropout=0.3).train()
        ids = generate_with_ssd(target, inputs=prompt(12), assistant_model=noisy, ssd_config=INLINE, **GREEDY)
        assert ids.shape == (1, 52)
        target.eval()
        stats = assert_equals_plain(target, noisy, prompt(12), INLINE, **GREEDY)
        assert_drafted(stats)
        assert any(each.num_draft_tokens > each.depth for each in stats.rounds)


def add(model: PreTrainedModel) -> None:
    model.lm_head.weight.data += 0.01


def add_under_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        model.lm_head.weight.add_(0.01)


def one_number(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 5] = 1.0


def optimiser_step(model: PreTrainedModel) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(prompt(6), labels=prompt(6)).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def load(model: PreTrainedModel) -> None:
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})


class TestChanges:
    @pytest.mark.parametrize("change", [add, add_under_inference_mode, one_number, optimiser_step, load])
    def test_a_change_in_place_is_noticed(self, change: Callable[[PreTrainedModel], None]) -> None:
        model = make_target()
        before = ModelState.of(model)
        assert ModelState.of(model) == before
        change(model)
        after = ModelState.of(model)
        assert after.places == before.places
        assert after.values != before.values

    def test_inference_tensors_are_sampled(self) -> None:
        with torch.inference_mode():
            model = make_target()
        before = ModelState.of(model)
        with torch.inference_mode():
            model.lm_head.weight.mul_(2)
        assert ModelState.of(model) != before

    @pytest.mark.parametrize("cast", ["half", "bfloat16"])
    def test_other_dtypes_are_other_weights(self, cast: str) -> None:
        model = make_target()
        before = ModelState.of(model)
        getattr(model, cast)()
        assert ModelState.of(model).places != before.places

    @pytest.mark.skipif(not is_supported(), reason="this build of torch has no oneDNN")
    def test_a_process_drafts_with_the_new_ones(self, target) -> None:
        """With what it has computed and copied too: keys of the same prompt, and weights in 8 bits."""
        assistant = make_unrelated()
        quantized = SSDConfig.of({**vars(AUTO), "backend": "process", "assistant_quantization": "int8"})
        assert acceptance(target, assistant, AUTO) < 0.3
        assert acceptance(target, assistant, quantized) < 0.3
        pid = pool._WORKERS[assistant].pid
        become(assistant, target)
        assert acceptance(target, assistant, quantized) > 0.8
        assert acceptance(target, assistant, AUTO) == 1.0
        become(assistant, make_unrelated())
        assert acceptance(target, assistant, AUTO) < 0.3
        assert pool._WORKERS[assistant].pid == pid
        pool.close_worker(assistant)

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_thread_drafts_with_the_new_ones(self, tied: bool) -> None:
        target, assistant = (make(tie_word_embeddings=tied) for make in (make_target, make_unrelated))
        assert acceptance(target, assistant, STREAM) < 0.3
        thread = pool._THREADS[assistant]
        become(assistant, target)
        assert acceptance(target, assistant, STREAM) == 1.0
        assert pool._THREADS[assistant] is thread
        pool.close_worker(assistant)

    def test_an_enabled_target_may_change_too(self, noisy) -> None:
        target = enable_ssd(make_target(), noisy, INLINE)
        for change in (lambda model: become(model, make_noisy(noise=0.02)), torch.nn.Module.double):
            change(target)
            plain = make_target().to(target.dtype)
            plain.load_state_dict(target.state_dict())
            assert target.generate(prompt(12), **GREEDY).equal(plain.generate(prompt(12), **GREEDY))
            assert_drafted(target.ssd_stats)

    def test_weights_that_are_elsewhere_by_now_are_not_sent_again(self) -> None:
        model = make_target()
        parcel, _ = share_model(model)
        assert pack_again(model, parcel).places == parcel.places
        model.lm_head.weight = nn.Parameter(model.lm_head.weight[:, ::2].clone())
        with pytest.raises(ValueError, match="not those that were shared"):
            pack_again(model, parcel)


class TestQuantised:
    """torchao's tensors hold others, and those are shared."""

    @pytest.fixture
    def quantise(self) -> Callable[[PreTrainedModel], PreTrainedModel]:
        torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)

        def quantise(model: PreTrainedModel) -> PreTrainedModel:
            torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
            return model

        return quantise

    def test_the_target(self, noisy, quantise) -> None:
        stats = assert_equals_plain(quantise(make_target()), noisy, prompt(12), INLINE, **GREEDY)
        assert_drafted(stats)

    def test_the_assistant_has_a_process(self, quantise, warnings) -> None:
        target, assistant = quantise(make_target()), quantise(make_target())
        assert not is_plain(assistant.lm_head)
        assert acceptance(target, assistant, INLINE) == 1.0
        assert acceptance(target, assistant, SSDConfig.of({**vars(AUTO), "draft_vocab_size": 16})) > 0.9
        assert assistant in pool._WORKERS
        assert warnings == []
        pool.close_worker(assistant)

    def test_weights_of_a_kind_that_nobody_knows(self, target, warnings) -> None:
        """As bitsandbytes has them: a thread can use what a process cannot be sent."""

        class Packed(nn.Parameter):
            pass

        assistant = make_target()
        assistant.lm_head.weight = Packed(assistant.lm_head.weight.data)
        assert acceptance(target, assistant, AUTO) == 1.0
        assert assistant in pool._THREADS
        assert len(warnings) == 1
        assert "a Packed on cpu cannot be placed in shared memory" in warnings[0]
        pool.close_worker(assistant)

    def test_both_sides_see_one_memory(self, quantise) -> None:
        model = quantise(make_target())
        expected = model(prompt(6)).logits
        before = ModelState.of(model)
        parcel, arena = share_model(model)
        copy = open_model(parcel, arena)
        assert copy(prompt(6)).logits.equal(expected)
        assert model(prompt(6)).logits.equal(expected)
        names = model.lm_head.weight.__tensor_flatten__()[0]
        with torch.no_grad():
            getattr(model.lm_head.weight, names[0]).zero_()
        assert not copy(prompt(6)).logits.any()
        assert ModelState.of(model) != before
