"""The ways in: a mixin, `enable_ssd`, `custom_generate`. All lead to the output of transformers' own `generate()`."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from plain import INLINE, assert_equals_plain
from safetensors import safe_open
from streamers import Listener
from tiny_models import make_noisy, make_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, pipeline

from hf_ssd import SSDConfig, SSDGenerationMixin, custom_generate_path, disable_ssd, enable_ssd, make_custom_generate
from hf_ssd.generation import generate_with_ssd


class SSDLlama(SSDGenerationMixin, LlamaForCausalLM):
    pass


def ssd_llama() -> SSDLlama:
    """T, of a class of the user's own."""
    model = SSDLlama(make_target().config).eval()
    model.load_state_dict(make_target().state_dict())
    model.generation_config = make_target().generation_config
    return model


@pytest.fixture
def plain_ids(prompt_ids) -> list:
    return make_target().generate(prompt_ids, max_new_tokens=40, do_sample=False).tolist()


GREEDY = {"max_new_tokens": 40, "do_sample": False}


ITS_OWN_WORD = {"ngram_drafts": False, "backup": "jit"}  # nothing but what the assistant drafts


class TestTwoHundredTokens:
    """HF30042, HF30413: wrong positions after a roll-back show in long texts; each assistant rolls back differently."""

    @pytest.mark.parametrize("mode", ["ssd", "sd"])
    def test_inline(self, target, assistant, prompt_ids, mode) -> None:
        config = SSDConfig(mode=mode, backend="inline")
        stats = assert_equals_plain(target, assistant, prompt_ids, config, max_new_tokens=200)
        assert (stats.hit_rate is not None) == (mode == "ssd")

    @pytest.mark.parametrize("mode", ["ssd", "sd"])
    @pytest.mark.parametrize("backend", ["inline", pytest.param("process", marks=pytest.mark.slow)])
    def test_a_target_that_is_its_own_assistant(self, target, prompt_ids, mode, backend) -> None:
        for size, least in ((None, 1.0), ("auto", 0.9)):  # of a tree it is not always the likeliest token that is sent
            config = SSDConfig(mode=mode, backend=backend, draft_tree_size=size, **ITS_OWN_WORD)
            stats = assert_equals_plain(target, target, prompt_ids, config, max_new_tokens=200)
            assert stats.acceptance >= least

    @pytest.mark.parametrize("mode", ["ssd", pytest.param("sd", marks=pytest.mark.slow)])
    def test_partly_right_in_a_process(self, target, shared_noisy, prompt_ids, mode) -> None:
        stats = assert_equals_plain(target, shared_noisy, prompt_ids, SSDConfig(mode=mode), max_new_tokens=200)
        assert 0.4 < stats.acceptance < 0.95

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["ssd", "sd"])
    def test_never_right_in_a_process(self, target, shared_unrelated, prompt_ids, mode) -> None:
        for size, most in ((None, 0.2), ("auto", 0.4)):  # one of eight guesses is right more often
            config = SSDConfig(mode=mode, draft_tree_size=size, **ITS_OWN_WORD)
            stats = assert_equals_plain(target, shared_unrelated, prompt_ids, config, max_new_tokens=200)
            assert stats.acceptance < most


class TestMixin:
    @pytest.mark.parametrize("ssd_config", [SSDConfig(backend="inline"), {"backend": "inline"}])
    def test_takes_a_config_or_a_dict(self, noisy, prompt_ids, plain_ids, ssd_config) -> None:
        model = ssd_llama()
        ids = model.generate(prompt_ids, assistant_model=noisy, ssd_config=ssd_config, **GREEDY)
        assert ids.tolist() == plain_ids
        assert model.ssd_stats.num_tokens == 40

    def test_without_a_config_generate_is_transformers_own(self, noisy, prompt_ids, plain_ids) -> None:
        model = ssd_llama()
        assert model.generate(prompt_ids, **GREEDY).tolist() == plain_ids
        assert model.generate(prompt_ids, assistant_model=noisy, **GREEDY).tolist() == plain_ids
        assert model.generate(prompt_ids, prompt_lookup_num_tokens=3, **GREEDY).tolist() == plain_ids
        assert model.ssd_stats is None

    def test_arguments_by_position(self, noisy, prompt_ids, plain_ids) -> None:
        config = GenerationConfig(**GREEDY, pad_token_id=0)
        ids = ssd_llama().generate(prompt_ids, config, assistant_model=noisy, ssd_config=INLINE)
        assert ids.tolist() == plain_ids

    def test_a_typo_is_refused(self, noisy, prompt_ids) -> None:
        with pytest.raises(ValueError, match="max_new_token'"):
            ssd_llama().generate(prompt_ids, assistant_model=noisy, ssd_config=INLINE, max_new_token=3)

    def test_a_wrong_config_is_refused(self, noisy, prompt_ids) -> None:
        with pytest.raises(ValueError, match=r"`ssd_config` has unknown keys \['depth'\]"):
            ssd_llama().generate(prompt_ids, assistant_model=noisy, ssd_config={"depth": 3})


class TestEnable:
    def test_plain_generate_uses_it_from_then_on(self, target, noisy, prompt_ids, plain_ids) -> None:
        assert enable_ssd(target, assistant_model=noisy, ssd_config=INLINE) is target
        assert target.generate(prompt_ids, **GREEDY).tolist() == plain_ids
        assert target.ssd_stats.num_rounds > 0

    def test_the_model_looks_the_same(self, target, noisy) -> None:
        before = type(target)
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        now = type(target)
        assert isinstance(target, LlamaForCausalLM)
        for name in ("__name__", "__qualname__", "__module__"):
            assert getattr(now, name) == getattr(before, name)

    def test_twice_is_once_with_the_latest_settings(self, target, noisy, unrelated, prompt_ids) -> None:
        enable_ssd(target, assistant_model=unrelated, ssd_config={"backend": "inline", "mode": "sd"})
        mixed = type(target)
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        assert type(target) is mixed
        target.generate(prompt_ids, **GREEDY)
        assert target.ssd_stats.mode == "ssd"
        assert target.ssd_stats.acceptance > 0.3
        enable_ssd(target, ssd_config={"backend": "inline", "mode": "sd"})  # the assistant may stay out now
        target.generate(prompt_ids, **GREEDY)
        assert target.ssd_stats.mode == "sd"

    def test_disable_leaves_nothing(self, target, noisy, prompt_ids, plain_ids) -> None:
        before, names = type(target), set(vars(target))
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        target.generate(prompt_ids, **GREEDY)
        assert disable_ssd(target) is target
        assert type(target) is before
        assert set(vars(target)) == names
        assert target.generate(prompt_ids, **GREEDY).tolist() == plain_ids

    def test_disable_without_enable_is_harmless(self, target) -> None:
        assert type(disable_ssd(target)) is LlamaForCausalLM
        model = ssd_llama()
        assert type(disable_ssd(model)) is SSDLlama

    def test_without_an_assistant_it_is_refused(self, target) -> None:
        with pytest.raises(ValueError, match=r"`assistant_model` must be given, but got None.*mode=\"ar\""):
            enable_ssd(target)
        assert type(target) is LlamaForCausalLM

    def test_one_call_may_have_other_settings(self, target, noisy, prompt_ids, plain_ids) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        ids = target.generate(prompt_ids, ssd_config={"backend": "inline", "mode": "sd"}, **GREEDY)
        assert ids.tolist() == plain_ids
        assert target.ssd_stats.mode == "sd"
        target.generate(prompt_ids, **GREEDY)
        assert target.ssd_stats.mode == "ssd"

    def test_save_pretrained_writes_the_model_itself(self, target, noisy, tmp_path, prompt_ids, plain_ids) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        target.generate(prompt_ids, **GREEDY)
        target.save_pretrained(tmp_path / "enabled")
        make_target().save_pretrained(tmp_path / "plain")
        names = {path.name for path in (tmp_path / "plain").iterdir()}
        assert {path.name for path in (tmp_path / "enabled").iterdir()} == names
        for name in names - {"model.safetensors"}:
            assert (tmp_path / "enabled" / name).read_text() == (tmp_path / "plain" / name).read_text()
        with safe_open(tmp_path / "enabled" / "model.safetensors", "pt") as file:
            assert set(file.keys()) == set(make_target().state_dict())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
        assert type(loaded) is LlamaForCausalLM
        assert loaded.generate(prompt_ids, **GREEDY).tolist() == plain_ids

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_is_a_plain_model(self, target, noisy, prompt_ids, plain_ids, duplicate) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        target.generate(prompt_ids, **GREEDY)
        twin = duplicate(target)
        assert type(twin) is LlamaForCausalLM
        assert twin.generate(prompt_ids, **GREEDY).tolist() == plain_ids
        assert len(pickle.dumps(target)) < 1.1 * len(pickle.dumps(make_target()))  # no assistant in it
        assert target.generate(prompt_ids, **GREEDY).tolist() == plain_ids
        assert target.ssd_stats.num_rounds > 0  # itself it stays enabled

    def test_a_copy_of_the_users_own_class_keeps_its_assistant(self, noisy, prompt_ids, plain_ids) -> None:
        model = enable_ssd(ssd_llama(), assistant_model=noisy, ssd_config=INLINE)
        twin = copy.deepcopy(model)
        assert twin.generate(prompt_ids, **GREEDY).tolist() == plain_ids
        assert twin.ssd_stats.num_rounds > 0

    def test_a_pipeline_notices_nothing_but_the_stats(self, target, noisy) -> None:
        tokenizer = tiny_tokenizer()
        text, chat = "w5 w9 w20", [{"role": "user", "content": "w5 w9"}]
        expected = [
            pipeline("text-generation", model=make_target(), tokenizer=tokenizer)(x, **GREEDY) for x in (text, chat)
        ]
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        generator = pipeline("text-generation", model=target, tokenizer=tokenizer)
        assert [generator(x, **GREEDY) for x in (text, chat)] == expected
        assert target.ssd_stats.num_tokens == 40

    def test_what_ssd_cannot_do_passes_through(self, target, noisy, prompt_ids) -> None:
        """Whoever calls the model may not know that it is enabled."""
        beams = {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
        expected = target.generate(prompt_ids, **beams).tolist()
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        assert target.generate(prompt_ids, **beams).tolist() == expected
        assert target.ssd_stats.mode == "ar"

    def test_several_threads_at_once(self, target, shared_noisy, prompt_ids, plain_ids) -> None:
        enable_ssd(target, assistant_model=shared_noisy)
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(target.generate(prompt_ids, **GREEDY).tolist()))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [plain_ids] * 3


class TestCustomGenerate:
    def test_by_folder(self, target, noisy, prompt_ids, plain_ids) -> None:
        streamer = Listener()
        ids = target.generate(
            prompt_ids,
            custom_generate=custom_generate_path(),
            trust_remote_code=True,
            assistant_model=noisy,
            ssd_config={"backend": "inline"},
            streamer=streamer,
            **GREEDY,
        )
        assert ids.tolist() == plain_ids
        assert [token for put in streamer.puts for token in put] == plain_ids[0]
        assert target.ssd_stats.num_rounds > 0
        assert type(target) is LlamaForCausalLM

    def test_by_folder_on_an_enabled_model(self, target, noisy, prompt_ids, plain_ids) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        way = {"custom_generate": custom_generate_path(), "trust_remote_code": True}
        assert target.generate(prompt_ids, assistant_model=noisy, **way, **GREEDY).tolist() == plain_ids
        assert target.generate(prompt_ids, **GREEDY).tolist() == plain_ids
        assert target.ssd_stats.num_rounds > 0  # the folder's call did not disable it

    def test_by_callable(self, target, noisy, prompt_ids, plain_ids) -> None:
        streamer = Listener()
        ssd = make_custom_generate(noisy, INLINE, streamer=streamer)
        ids = target.generate(prompt_ids, custom_generate=ssd, streamer=streamer, **GREEDY)
        assert ids.tolist() == plain_ids
        assert [token for put in streamer.puts for token in put] == plain_ids[0]
        assert streamer.num_ends == 1
        assert target.ssd_stats.num_rounds > 0

    def test_by_callable_with_a_dict_output(self, target, noisy, prompt_ids, plain_ids) -> None:
        ssd = make_custom_generate(noisy, INLINE)
        output = target.generate(prompt_ids, custom_generate=ssd, return_dict_in_generate=True, **GREEDY)
        assert output.sequences.tolist() == plain_ids
        assert output.ssd_stats is target.ssd_stats

    def test_any_class_keeps_its_class_also_when_a_call_fails(self, target, noisy, prompt_ids) -> None:
        def fail() -> None:
            assert isinstance(target, SSDGenerationMixin)
            raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"):
            generate_with_ssd(
                target,
                inputs=prompt_ids,
                assistant_model=noisy,
                ssd_config=INLINE,
                streamer=Listener(3, fail),
                **GREEDY,
            )
        assert type(target) is LlamaForCausalLM


class TestPlainMode:
    @pytest.mark.parametrize("settings", [GREEDY, {"max_new_tokens": 40, "do_sample": True, "temperature": 0.8}])
    def test_equals_generate_also_when_sampling(self, target, prompt_ids, settings) -> None:
        """Unless it is to give what the other modes give for a seed, which is the coupled rule's to say."""
        torch.manual_seed(0)
        expected = make_target().generate(prompt_ids, **settings).tolist()
        enable_ssd(target, ssd_config={"mode": "ar", "verification": "token"})
        torch.manual_seed(0)
        assert target.generate(prompt_ids, **settings).tolist() == expected
        stats = target.ssd_stats
        assert (stats.mode, stats.num_tokens, stats.num_rounds) == ("ar", 40, 0)
        assert stats.ttft_ms > 0
        assert stats.tokens_per_s > 0

    def test_a_mode_ar_call_needs_no_assistant_and_passes_everything_on(self, target, noisy, prompt_ids) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        output = target.generate(
            prompt_ids, ssd_config={"mode": "ar"}, return_dict_in_generate=True, output_scores=True, **GREEDY
        )
        assert len(output.scores) == 40
        assert output.ssd_stats.mode == "ar"


class TestNothingIsLeftBehind:
    def test_two_calls_and_both_generation_configs(self, target, noisy, prompt_ids, plain_ids) -> None:
        """HF28759: state left on a model between calls."""
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        before = target.generation_config.to_dict(), noisy.generation_config.to_dict()
        names = set(vars(noisy))
        for _ in range(2):
            assert target.generate(prompt_ids, **GREEDY).tolist() == plain_ids
            torch.manual_seed(0)
            target.generate(prompt_ids, max_new_tokens=5, do_sample=True, temperature=0.5, top_k=3)
        assert (target.generation_config.to_dict(), noisy.generation_config.to_dict()) == before
        assert set(vars(noisy)) == names
        assert type(noisy) is LlamaForCausalLM

    def test_a_greedy_call_leaves_the_random_state(self, target, noisy, prompt_ids) -> None:
        torch.manual_seed(7)
        expected = torch.rand(3).tolist()
        torch.manual_seed(7)
        assert_equals_plain(target, noisy, prompt_ids, max_new_tokens=20)
        assert torch.rand(3).tolist() == expected

    def test_a_seed_repeats_a_text_and_another_changes_it(self, target, noisy, prompt_ids) -> None:
        """VL6038, VL13196. Inline, where drafting does not depend on time."""

        def text(seed: int) -> list:
            torch.manual_seed(seed)
            kwargs = {"max_new_tokens": 20, "do_sample": True, "top_k": 0}
            return generate_with_ssd(
                target, inputs=prompt_ids, assistant_model=noisy, ssd_config=INLINE, **kwargs
            ).tolist()

        assert text(1) == text(1)
        assert text(1) != text(2)

    def test_an_assistant_in_training_mode_or_with_gradients_changes_nothing(
        self, target, prompt_ids, plain_ids
    ) -> None:
        target.train()
        ids = generate_with_ssd(
            target, inputs=prompt_ids, assistant_model=make_noisy().train(), ssd_config=INLINE, **GREEDY
        )
        assert ids.tolist() == plain_ids
        assert not ids.requires_grad


class TestModeAuto:
    def test_tries_the_modes_and_gives_the_same_text(self, target, noisy, prompt_ids) -> None:
        settings = {"max_new_tokens": 300, "do_sample": False}
        expected = target.generate(prompt_ids, **settings).tolist()
        enable_ssd(target, assistant_model=noisy, ssd_config=SSDConfig(mode="auto", backend="inline"))
        assert target.generate(prompt_ids, **settings).tolist() == expected
        stats = target.ssd_stats
        assert stats.mode == "auto"
        assert {"ssd", "ar"} <= stats.tokens_by_mode.keys()
        assert sum(stats.tokens_by_mode.values()) == 299
        assert stats.switches[0].reason == "not measured yet"
        assert stats.to_dict()["num_trials"] > 0

    def test_remembers_calls(self, target, noisy, prompt_ids) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=SSDConfig(mode="auto", backend="inline"))
        target.generate(prompt_ids, max_new_tokens=300, do_sample=False)
        homes = [each.after.mode for each in target.ssd_stats.switches if not each.is_trial]
        target.generate(prompt_ids, max_new_tokens=8, do_sample=False)
        assert target.ssd_stats.rounds[0].mode == (homes[-1] if homes else "ssd")

    def test_a_custom_generate_remembers_its_own(self, target, noisy, prompt_ids, plain_ids) -> None:
        generate = make_custom_generate(noisy, {"mode": "auto", "backend": "inline"})
        for _ in range(3):
            assert target.generate(prompt_ids, custom_generate=generate, **GREEDY).tolist() == plain_ids
            assert target.ssd_stats.mode == "auto"
