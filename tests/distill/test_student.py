from __future__ import annotations

import pytest
import torch
from tiny_models import prompt, tiny_llama
from tiny_pair import byte_tokenizer
from tiny_zoo import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hf_ssd.distill import student as student_module
from hf_ssd.distill.projection import Projection, last_hidden
from hf_ssd.distill.student import load_student, make_student, save_student
from hf_ssd.vocabulary import UnsupportedError


def family(name: str) -> PreTrainedModel:
    model_type, settings = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()


class TestLayers:
    def test_it_has_the_targets_first_layers_embedding_and_projection(self) -> None:
        target = tiny_llama(num_hidden_layers=5)
        student = make_student(target, layers=2)
        weights = target.state_dict()
        assert {name.split(".")[2] for name in student.state_dict() if ".layers." in name} == {"0", "1"}
        for name, weight in student.state_dict().items():
            assert torch.equal(weight, weights[name]), name
        trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
        assert "model.layers.1.mlp.up_proj.weight" in trained
        assert not {"lm_head.weight", "model.embed_tokens.weight"} & trained

    def test_with_all_layers_it_is_the_target(self) -> None:
        target = tiny_llama()
        student = make_student(target, layers=2)
        assert torch.equal(student.eval()(prompt(9)).logits, target(prompt(9)).logits)

    def test_a_fifth_of_the_layers_is_the_default(self) -> None:
        assert make_student(tiny_llama(num_hidden_layers=11)).config.num_hidden_layers == 2
        assert make_student(tiny_llama()).config.num_hidden_layers == 1

    def test_layers_of_several_kinds_are_cut_too(self) -> None:
        student = make_student(family("gemma2, mixed layers and capped logits"), layers=1)
        assert student.config.layer_types == ["sliding_attention"]
        assert student(prompt(9)).logits.shape == (1, 9, 64)

    @pytest.mark.parametrize("layers", [0, 3])
    def test_the_target_must_have_them(self, layers: int) -> None:
        with pytest.raises(ValueError, match=rf"`layers` must be between 1 and 2.*got {layers}\."):
            make_student(tiny_llama(), layers=layers)


class TestWidth:
    def test_where_half_of_the_width_is_empty_the_cut_is_the_target(self) -> None:
        target = tiny_llama(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        empty = torch.zeros(32, dtype=torch.bool)
        empty[torch.randperm(32, generator=torch.Generator().manual_seed(3))[:16]] = True
        with torch.no_grad():
            target.get_input_embeddings().weight[:, empty] = 0
            for layer in target.model.layers:
                layer.self_attn.o_proj.weight[empty] = 0
                layer.self_attn.o_proj.weight[:, 16:] = 0  # the second pair of heads says nothing
                layer.mlp.down_proj.weight[empty] = 0
                layer.mlp.down_proj.weight[:, 32:] = 0
        student = make_student(target, layers=2, width=16).eval()
        assert (student.config.num_attention_heads, student.config.num_key_value_heads) == (2, 1)
        torch.testing.assert_close(student(prompt(9)).logits, target(prompt(9)).logits, rtol=1e-3, atol=1e-3)

    def test_all_its_weights_are_trained(self) -> None:
        student = make_student(tiny_llama(), width=16)
        assert all(parameter.requires_grad for parameter in student.parameters())

    def test_it_must_not_be_wider(self) -> None:
        with pytest.raises(ValueError, match=r"`width` must be at most 32.*got 64"):
            make_student(tiny_llama(), width=64)

    def test_another_family_is_refused_by_name(self) -> None:
        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        with pytest.raises(ValueError, match=r"`width` must be left out for a target of type 'gpt2'"):
            make_student(GPT2LMHeadModel(config), width=16)
        assert make_student(GPT2LMHeadModel(config), layers=1).config.num_hidden_layers == 1


class TestFolder:
    def test_what_is_saved_is_what_is_loaded(self, tmp_path) -> None:
        target = tiny_llama(vocab_size=258).to(torch.bfloat16)
        student = make_student(target, layers=1)
        save_student(student, byte_tokenizer(), tmp_path, torch.bfloat16)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.dtype == torch.bfloat16
        assert student.dtype == torch.float32
        assert torch.equal(loaded.get_input_embeddings().weight, target.get_input_embeddings().weight)
        # The rotary frequencies were not rounded with the weights.
        assert torch.equal(loaded.model.rotary_emb.inv_freq, student.model.rotary_emb.inv_freq)

    def test_one_may_go_on_from_an_assistant(self, tmp_path) -> None:
        target = tiny_llama(vocab_size=258)
        student = make_student(target, layers=1)
        with torch.no_grad():
            student.model.norm.weight.mul_(2)
        save_student(student, byte_tokenizer(), tmp_path, torch.float32)
        again = load_student(str(tmp_path), target)
        assert torch.equal(again.model.norm.weight, student.model.norm.weight)
        assert not again.get_input_embeddings().weight.requires_grad
        assert again.model.norm.weight.requires_grad

    def test_of_its_own_embedding_nothing_is_frozen(self, tmp_path) -> None:
        tiny_llama(1, vocab_size=258).save_pretrained(tmp_path)
        assert load_student(str(tmp_path), tiny_llama(vocab_size=258)).get_input_embeddings().weight.requires_grad

    @pytest.mark.parametrize("name", FAMILIES)
    def test_it_gets_more_layers_without_effect(self, tmp_path, name: str) -> None:
        model_type, settings = FAMILIES[name]
        kinds = {"layer_types": settings["layer_types"] * 2} if "layer_types" in settings else {}
        config = AutoConfig.for_model(model_type, **settings | kinds | {"num_hidden_layers": 4})
        target = AutoModelForCausalLM.from_config(config).eval()
        student = make_student(target, layers=1)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.mul_(1.01)  # as if trained
        save_student(student, byte_tokenizer(), tmp_path, torch.float32)
        deeper = load_student(str(tmp_path), target, layers=3)
        assert deeper.config.num_hidden_layers == 3
        torch.testing.assert_close(deeper.eval()(prompt(9)).logits, student.eval()(prompt(9)).logits)
        deeper(prompt(9), labels=prompt(9)).loss.backward()
        learning = [name for name, parameter in deeper.named_parameters() if ".2." in name and parameter.grad.any()]
        assert len(learning) >= 2, "what the last layer writes has no gradient"

    def test_layers_that_do_not_fit_are_refused(self, tmp_path) -> None:
        target = tiny_llama(num_hidden_layers=3)
        save_student(make_student(target, layers=2), byte_tokenizer(), tmp_path / "two", torch.float32)
        save_student(make_student(target, layers=2, width=16), byte_tokenizer(), tmp_path / "narrow", torch.float32)
        for folder, layers, message in (
            ("two", 1, r"`layers` must be at least 2, which the assistant of `init_from` has, but got 1\."),
            ("two", 4, r"`layers` must be between 1 and 3"),
            ("narrow", 3, r"`layers` must be left out for an assistant that is not made of layers like the target's"),
        ):
            with pytest.raises(ValueError, match=message):
                load_student(str(tmp_path / folder), target, layers=layers)

    def test_a_family_whose_new_layers_would_have_an_effect_is_refused(self, tmp_path, monkeypatch) -> None:
        target = tiny_llama(num_hidden_layers=3)
        save_student(make_student(target, layers=1), byte_tokenizer(), tmp_path, torch.float32)
        monkeypatch.setattr(student_module, "OUTPUT_PROJECTIONS", {"another"})
        with pytest.raises(ValueError, match=r"`layers` must be left out with `init_from` for a model of type 'llama'"):
            load_student(str(tmp_path), target, layers=2)

    def test_another_vocabulary_is_refused(self, tmp_path) -> None:
        tiny_llama().save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match=r"`init_from` must hold an assistant of the target's 258 tokens.*knows 64"
        ):
            load_student(str(tmp_path), tiny_llama(vocab_size=258))


class TestProjection:
    @pytest.mark.parametrize(
        ("model_type", "settings"),
        [
            ("llama", {}),
            ("gemma2", {"final_logit_softcapping": 5.0, "head_dim": 8, "query_pre_attn_scalar": 8}),
            ("cohere", {"logit_scale": 0.25}),
            ("granite", {"logits_scaling": 4.0}),
        ],
    )
    def test_it_gives_the_models_own_logits(self, model_type: str, settings: dict) -> None:
        _, common = FAMILIES["mistral, window of 8"]
        config = AutoConfig.for_model(model_type, **{**common, **settings})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).eval()
        projection, tokens = Projection(model), torch.tensor([5, 60, 7])
        with torch.no_grad():
            logits, hidden = model(prompt(9)).logits, last_hidden(model, {"input_ids": prompt(9)})
            torch.testing.assert_close(projection(hidden), logits)
            torch.testing.assert_close(projection(hidden, tokens), logits[..., tokens])

    def test_what_it_does_not_know_is_refused(self) -> None:
        model = tiny_llama()
        model.register_forward_hook(lambda module, args, output: CausalLMOutput(logits=output.logits.sin()))
        with pytest.raises(UnsupportedError, match="LlamaForCausalLM does something that is not known here"):
            Projection(model)
