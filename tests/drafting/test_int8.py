"""The assistant in 8 bits: close to itself, and nothing else touched."""

from __future__ import annotations

import pytest
import tiny_zoo
import torch
from chi_square import p_value
from lookup_model import LookupForCausalLM
from plain import assert_equals_plain
from tiny_models import VOCAB_SIZE, make_noisy, make_target, prompt
from torch import nn

from hf_ssd import SSDConfig
from hf_ssd.drafting import int8, make_assistant, making
from hf_ssd.drafting.draft_vocab import DraftVocabulary
from hf_ssd.drafting.int8 import Int8Linear, is_supported, may_pay, quantize_linears
from hf_ssd.generation import generate_with_ssd

pytestmark = pytest.mark.skipif(not is_supported(), reason="this build of torch has no kernels for 8 bits")


def linear(in_features: int = 96, out_features: int = 80, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


class TestLayer:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(96,), (7, 96), (1, 5, 96)])
    def test_it_is_close_to_what_it_stands_in_for(self, shape: tuple[int, ...], bias: bool) -> None:
        layer = linear(bias=bias)
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        outputs = Int8Linear(layer)(inputs)
        assert outputs.shape == (*shape[:-1], 80)
        assert outputs.dtype == torch.float32
        assert relative_error(outputs, layer(inputs)) < 0.02

    @pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
    def test_at_every_size_of_inputs_and_weights(self, size: float) -> None:
        layer = linear(bias=False)
        inputs = torch.randn((3, 96), generator=torch.Generator().manual_seed(1))
        assert relative_error(Int8Linear(layer)(inputs * size), layer(inputs * size)) < 0.02
        expected = layer(inputs) * size
        layer.weight *= size
        assert relative_error(Int8Linear(layer)(inputs), expected) < 0.02

    def test_one_outlier_among_the_tokens_does_not_blur_the_others(self) -> None:
        layer = linear(bias=False)
        inputs = torch.randn((6, 96), generator=torch.Generator().manual_seed(1))
        inputs[2] *= 1e4
        assert relative_error(Int8Linear(layer)(inputs), layer(inputs)) < 0.02

    def test_one_large_row_of_weights_does_not_blur_the_others(self) -> None:
        layer = linear(bias=False)
        layer.weight[3] *= 1e4
        inputs = torch.randn((6, 96), generator=torch.Generator().manual_seed(1))
        others = [i for i in range(80) if i != 3]
        assert relative_error(Int8Linear(layer)(inputs)[:, others], layer(inputs)[:, others]) < 0.02

    def test_a_token_gives_the_same_alone_and_among_others(self) -> None:
        """Else a drafted branch would depend on what else is in its forward."""
        inputs = torch.randn((6, 96), generator=torch.Generator().manual_seed(1))
        layer = Int8Linear(linear())
        together = layer(inputs)
        for row in range(6):
            assert relative_error(layer(inputs[row]), together[row]) < 0.01

    def test_zeros_give_the_bias(self) -> None:
        layer = linear()
        torch.testing.assert_close(Int8Linear(layer)(torch.zeros(2, 96)), layer.bias.expand(2, -1))
        layer.weight[5] = 0.0
        assert torch.isfinite(Int8Linear(layer)(torch.ones(2, 96))).all()

    def test_bfloat16(self) -> None:
        layer = linear().bfloat16()
        inputs = torch.randn((3, 96), generator=torch.Generator().manual_seed(1)).bfloat16()
        outputs = Int8Linear(layer)(inputs)
        assert outputs.dtype == torch.bfloat16
        assert relative_error(outputs.float(), layer.float()(inputs.float())) < 0.03


class TestAssistant:
    @pytest.mark.parametrize("tied", [False, True])
    def test_the_model_is_left_as_it_is(self, tied: bool) -> None:
        """Its layers, its parameters, what it says: `save_pretrained` and training must not notice."""
        model = make_noisy(tie_word_embeddings=tied)
        modules = list(model.modules())
        parameters = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            before = model(prompt(12)).logits
        assistant = make_assistant(model, "int8")
        assert assistant.is_quantized
        with torch.inference_mode():
            assistant.forward(prompt(8)[0].tolist(), assistant.new_cache())
        assert list(model.modules()) == modules
        assert {name: id(value) for name, value in model.named_parameters()} == {
            name: identity for name, (identity, _) in parameters.items()
        }
        assert all(value.requires_grad for value in model.parameters())
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(model(prompt(12)).logits, before)
        assert not any(isinstance(module, Int8Linear) for module in model.modules())

    @pytest.mark.parametrize("family", [None, *(name for name in tiny_zoo.FAMILIES if not name.startswith("bloom"))])
    def test_it_says_nearly_the_same(self, family: str | None) -> None:
        model = make_noisy() if family is None else tiny_zoo.make(family)
        assistant = make_assistant(model, "int8")
        tokens = prompt(20)
        with torch.inference_mode():
            hidden = assistant.forward(tokens[0].tolist(), assistant.new_cache())
            logits, expected = assistant.logits(hidden), model(tokens).logits[0]
        if family not in ("gpt2",):  # whose layers are no nn.Linear
            assert not torch.equal(logits, expected)
        # With the large weights of these models errors grow fast; most choices are the same all the same.
        assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.7
        assert relative_error(logits, expected) < 0.6

    def test_a_tied_head_is_quantised_and_the_embeddings_are_not(self) -> None:
        model = make_noisy(tie_word_embeddings=True)
        assistant = make_assistant(model, "int8")
        assert isinstance(assistant._projection, Int8Linear)
        assert torch.equal(assistant.model.get_input_embeddings().weight, model.get_input_embeddings().weight)
        hidden = torch.randn((3, 32), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            assert relative_error(assistant.logits(hidden), model.lm_head(hidden)) < 0.02
        assert assistant.head.weight is model.lm_head.weight or torch.equal(assistant.head.weight, model.lm_head.weight)

    def test_a_copy_shares_what_is_not_in_8_bits(self) -> None:
        """Memory: a large embedding must not lie there twice."""
        model = make_noisy()
        assistant = make_assistant(model, "int8")
        assert (
            assistant.model.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        )
        assert assistant.head.weight.data_ptr() == model.lm_head.weight.data_ptr()

    @pytest.mark.parametrize("quantization", ["auto", None])
    def test_a_tiny_model_is_left_alone_unless_asked(self, quantization: str | None) -> None:
        model = make_noisy()
        assert not may_pay(model)
        assistant = make_assistant(model, quantization)
        assert assistant.model is model
        assert not assistant.is_quantized

    @pytest.mark.parametrize(("step_s", "pays"), [(1.0, True), (3.0, False)])
    def test_auto_takes_a_large_one_where_its_steps_become_faster(self, step_s: float, pays: bool, monkeypatch) -> None:
        monkeypatch.setattr(int8, "MIN_AUTO_WEIGHTS", 1000)
        monkeypatch.setattr(int8, "MAX_SLOW_DOWN", float("inf"))
        monkeypatch.setattr(making, "_step_time", lambda each: step_s if each.is_quantized else 2.0)
        assert make_assistant(make_noisy(), "auto").is_quantized is pays
        assert make_assistant(make_noisy(), "int8").is_quantized
        assert not make_assistant(make_noisy(), None).is_quantized

    def test_without_kernels_it_is_refused_by_name_and_auto_does_without(self, monkeypatch) -> None:
        monkeypatch.setattr(int8, "is_supported", lambda: False)
        monkeypatch.setattr(int8, "MIN_AUTO_WEIGHTS", 1000)
        with pytest.raises(ValueError, match=r'`assistant_quantization` must be None or "auto" here.*no oneDNN'):
            make_assistant(make_noisy(), "int8")
        assert not make_assistant(make_noisy(), "auto").is_quantized

    def test_a_layer_of_another_kind_and_a_shared_one(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(inputs)

        shared = linear()
        module = nn.ModuleDict({"a": shared, "b": shared, "c": Scaled(4, 4)})
        quantize_linears(module)
        assert module["a"] is module["b"]
        assert isinstance(module["a"], Int8Linear)
        assert type(module["c"]) is Scaled

    def test_trees_are_taken(self) -> None:
        assert make_assistant(make_noisy(), "int8").takes_trees


@pytest.mark.parametrize("bias", [False, True])
def test_a_draft_vocabulary_in_8_bits(bias: bool) -> None:
    head = linear(32, VOCAB_SIZE, bias=bias)
    hidden = torch.randn((4, 32), generator=torch.Generator().manual_seed(0))
    vocabulary = DraftVocabulary(head, range(0, 40, 2), in_int8=True)
    vocabulary.activate(torch.tensor([1, 2, 3, 3, 50]))
    assert vocabulary.tokens.tolist() == [*range(0, 40, 2), 1, 3, 50]
    assert relative_error(vocabulary.logits(hidden), head(hidden)[:, vocabulary.tokens]) < 0.02


INT8 = SSDConfig(backend="inline", num_assistant_tokens=4, assistant_quantization="int8")


class TestOutput:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"draft_tree_size": None},
            {"mode": "sd"},
            {"draft_vocab_size": 16},
            {"backend": "process", "backup": "jit"},
        ],
    )
    def test_greedy_output_is_plain_generates(self, settings: dict, shared_noisy) -> None:
        config = SSDConfig(**{"backend": "inline", "assistant_quantization": "int8", **settings})
        stats = assert_equals_plain(make_target(), shared_noisy, prompt(6), config, max_new_tokens=40)
        assert stats.tokens_per_round > 1.2

    @pytest.mark.slow
    def test_sampling_is_distributed_as_without_an_assistant(self) -> None:
        """q is what the 8 bits say, and the tokens are drawn from just that."""
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(8, 8, generator=generator)
        target = LookupForCausalLM.of(table)
        assistant = LookupForCausalLM.of(table + torch.randn(8, 8, generator=generator))
        torch.manual_seed(0)
        ids = generate_with_ssd(
            target,
            inputs=torch.tensor([[3, 5, 1]]),
            assistant_model=assistant,
            ssd_config=INT8,
            do_sample=True,
            top_k=0,
            max_new_tokens=4,
            num_return_sequences=600,
        )
        probs = table.double().softmax(dim=1)
        pairs = torch.einsum("i,ij->ij", probs[1], probs)
        counts = (ids[:, 3] * 8 + ids[:, 4]).bincount(minlength=64).view(8, 8)
        assert p_value(counts, pairs) > 1e-3
        assert p_value(ids[:, 5].bincount(minlength=8), pairs.sum(0) @ probs) > 1e-3
        assert 0.2 < target.ssd_stats.acceptance < 0.95
