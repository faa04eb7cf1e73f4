from __future__ import annotations

from types import MappingProxyType

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from hf_ssd import SSDConfig, embedded, pairs
from hf_ssd.pairs import check_memory, embedded_pair, load_pair, module_sizes
from hf_ssd.runtime.placement import InsufficientMemoryError, model_bytes
from hf_ssd.vocabulary import VocabularyMismatchError

CPU = torch.device("cpu")
GPU0, GPU1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def folders(tmp_path, target, noisy) -> tuple[str, str]:
    """T and D as folders, each with its tokenizer."""
    for name, model in (("target", target), ("assistant", noisy)):
        model.save_pretrained(tmp_path / name)
        tiny_models.tiny_tokenizer().save_pretrained(tmp_path / name)
    return str(tmp_path / "target"), str(tmp_path / "assistant")


@pytest.fixture
def enabled(monkeypatch) -> list[dict]:
    """What `load_pair` hands to `enable_ssd`."""
    calls: list[dict] = []
    monkeypatch.setattr(pairs, "enable_ssd", lambda model, **kwargs: calls.append({"model": model, **kwargs}))
    return calls


@pytest.fixture
def no_loading(monkeypatch) -> None:
    def from_pretrained(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)


class TestLoadPair:
    def test_generate_uses_ssd_at_once_and_returns_what_the_target_returns(self, folders, target, prompt_ids):
        pair = load_pair(*folders, ssd_config={"backend": "inline"})
        expected = target.generate(prompt_ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(pair.target.generate(prompt_ids, max_new_tokens=24, do_sample=False), expected)
        assert pair.target.ssd_stats.num_tokens == 24

    def test_settings_reach_the_target(self, folders, enabled):
        pair = load_pair(*folders, ssd_config={"cache_budget": 3}, dtype=torch.bfloat16, attn_implementation="eager")
        (call,) = enabled
        assert call["model"] is pair.target
        assert call["assistant_model"] is pair.assistant
        assert call["ssd_config"].cache_budget == 3
        assert pair.target.dtype == pair.assistant.dtype == torch.bfloat16
        assert pair.target.config._attn_implementation == "eager"
        assert pair.tokenizer("w5 w6")["input_ids"] == [5, 6]
        assert pair.assistant_tokenizer is None  # it is the target's

    @pytest.mark.parametrize(
        ("argument", "setting", "expected"),
        [("auto", "auto", GPU1), ("cuda:0", "cpu", GPU0), ("auto", "cuda:0", GPU0), (1, "auto", GPU1)],
    )
    def test_the_assistants_worker_goes_where_it_is_told(
        self, folders, enabled, monkeypatch, argument, setting, expected
    ):
        monkeypatch.setattr(pairs, "free_memory", lambda: {GPU0: 10**8, GPU1: 10**9, CPU: 10**9})
        pair = load_pair(*folders, assistant_device=argument, ssd_config=SSDConfig(assistant_device=setting))
        assert enabled[0]["ssd_config"].assistant_device == str(expected)
        assert pair.assistant.device == CPU

    def test_an_assistant_without_tokenizer_is_accepted(self, folders, enabled, tmp_path):
        for path in (tmp_path / "assistant").glob("*token*"):
            path.unlink()
        load_pair(*folders)
        assert len(enabled) == 1

    def test_another_vocabulary_size_is_refused_before_loading(self, folders, no_loading, tmp_path):
        tiny_models.make_noisy(vocab_size=32).save_pretrained(tmp_path / "small")
        with pytest.raises(VocabularyMismatchError, match=r"small knows 32 tokens and the target 64"):
            load_pair(folders[0], str(tmp_path / "small"))

    def test_other_tokens_are_refused_before_loading(self, folders, no_loading, tmp_path):
        tiny_models.tiny_tokenizer(prefix="other").save_pretrained(tmp_path / "assistant")
        with pytest.raises(VocabularyMismatchError, match="only 2 of 62 tokens are the same"):
            load_pair(*folders)

    def test_too_little_memory_is_said_before_loading(self, folders, no_loading, monkeypatch):
        monkeypatch.setattr(pairs, "free_memory", lambda: {CPU: 1000})
        with pytest.raises(
            InsufficientMemoryError, match=r"The target needs 0\.\d MB of memory, but free on cpu is 0\.0 MB"
        ):
            load_pair(*folders)

    def test_an_unknown_device_is_refused_before_loading(self, folders, no_loading):
        with pytest.raises(ValueError, match=r"`assistant_device` must be one of .*\"cuda:97\""):
            load_pair(*folders, assistant_device="cuda:97")

    def test_an_unknown_setting_is_refused(self, folders, no_loading):
        with pytest.raises(ValueError, match="nonsense"):
            load_pair(*folders, ssd_config={"nonsense": 1})


class TestModuleSizes:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "auto"])
    def test_are_those_of_the_loaded_model(self, tied, dtype):
        model = tiny_models.make_target(tie_word_embeddings=tied)
        # Buffers (the rotary frequencies) stay in float32.
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        weights = model_bytes(model) - buffers
        sizes = module_sizes(model.config, dtype)
        assert abs(sizes[""] - (weights // 2 if dtype == torch.bfloat16 else weights)) <= buffers
        assert sizes["model"] < sizes[""] or tied

    def test_are_unknown_for_a_quantised_checkpoint(self):
        config = tiny_models.make_target().config
        config.quantization_config = {"quant_method": "gptq", "bits": 4}
        assert module_sizes(config, "auto") == {}


class TestCheckMemory:
    SIZES = MappingProxyType({"": 100, "model": 80, "lm_head": 20})

    def test_target_and_assistant_share_a_device(self):
        check_memory(self.SIZES, 50, None, {CPU: 150})
        with pytest.raises(InsufficientMemoryError, match="assistant needs"):
            check_memory(self.SIZES, 51, None, {CPU: 150})

    def test_target_alone(self):
        with pytest.raises(InsufficientMemoryError, match="target needs"):
            check_memory(self.SIZES, 50, "cuda:0", {GPU0: 99, GPU1: 900, CPU: 900})

    def test_a_map_is_summed_up_by_device(self):
        device_map = {"model": 0, "lm_head": "cuda:1"}
        check_memory(self.SIZES, 50, device_map, {GPU0: 80, GPU1: 70, CPU: 0})
        with pytest.raises(InsufficientMemoryError, match="cuda:1"):
            check_memory(self.SIZES, 50, device_map, {GPU0: 80, GPU1: 19, CPU: 0})
        check_memory(self.SIZES, 50, {"model": 0, "lm_head": "disk"}, {GPU0: 130, CPU: 0})

    def test_an_automatic_map_may_use_all_devices(self):
        check_memory(self.SIZES, 50, "auto", {GPU0: 80, GPU1: 40, CPU: 30})
        with pytest.raises(InsufficientMemoryError, match="Target and assistant need"):
            check_memory(self.SIZES, 50, "auto", {GPU0: 80, GPU1: 40, CPU: 29})

    def test_a_target_of_unknown_size_is_let_through(self):
        check_memory({}, 50, "cuda:0", {GPU0: 60, CPU: 0})


@pytest.mark.slow
class TestEmbeddedPair:
    def test_is_ready_to_use_and_left_as_it_is(self, enabled):
        target, assistant, tokenizer = embedded_pair()
        assert enabled == []
        assert target.dtype == assistant.dtype == torch.bfloat16
        assert assistant.get_input_embeddings().weight.shape == target.get_input_embeddings().weight.shape
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = target.generate(**inputs, max_new_tokens=32, do_sample=False)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert "Paris" in text

    def test_enables_ssd_when_asked_to(self, enabled):
        pair = embedded_pair(torch.float32, ssd_config={"mode": "sd"})
        assert enabled[0]["ssd_config"] == SSDConfig(mode="sd")
        assert enabled[0]["model"] is pair.target
        assert pair.target.dtype == torch.float32

    def test_its_folders_are_a_pair_for_load_pair(self, enabled):
        load_pair(str(embedded.target_folder()), str(embedded.assistant_folder()))
        assert len(enabled) == 1
