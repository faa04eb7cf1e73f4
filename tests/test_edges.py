"""Corners that reviews found: each test holds a kind of fault, not the case it was seen in."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain import INLINE, assert_equals_plain
from tiny_models import make_noisy, make_target, prompt
from tiny_zoo import make
from transformers import StaticCache, SynthIDTextWatermarkingConfig
from transformers.cache_utils import StaticLayer

from hf_ssd import SSDConfig, custom_generate_path, enable_ssd, make_custom_generate
from hf_ssd.checks import UnsupportedError
from hf_ssd.compat import CACHE_KEY
from hf_ssd.drafting.draft_vocab import frequent_tokens
from hf_ssd.drafting.proposer import DraftDistribution
from hf_ssd.generation import generate_with_ssd
from hf_ssd.runtime import pool

ROOT = Path(__file__).parents[1]
PROCESS = SSDConfig(backend="process", num_assistant_tokens=4)


class TestDraftProbabilities:
    def test_a_token_listed_twice_counts_once(self, tmp_path: Path) -> None:
        """Otherwise a draft token's probability would be that of one of its columns, and the output biased."""
        (tmp_path / "frequent_tokens.json").write_text(json.dumps([5, 5, 9, 9, 9, "x", None, 2.5, 99]))
        assert frequent_tokens(str(tmp_path), 4, 16) == [5, 9, 0, 1]

    def test_a_dense_distribution_keeps_all_its_mass(self) -> None:
        sparse = DraftDistribution(torch.tensor([3, 1]), torch.tensor([0.25, 0.75]))
        assert sparse.to_dense(4).tolist() == [0.0, 0.75, 0.0, 0.25]


class TestPositions:
    @pytest.mark.parametrize("length", range(8, 30, 3))
    def test_no_branch_goes_past_the_last_learned_position(self, length: int) -> None:
        """Rotary positions would hide it; a table of positions is an error to read beyond."""
        target = make("gpt2")
        assistant = make("gpt2", noise=0.05, n_positions=32)
        ids = torch.arange(length)[None] % 60
        assert_equals_plain(target, assistant, ids, INLINE, max_new_tokens=40)


class TestWanted:
    @pytest.mark.parametrize("backend", ["inline", "process"])
    def test_no_more_is_drafted_than_is_wanted(self, target, shared_noisy, backend: str) -> None:
        """Otherwise a large `num_assistant_tokens` would keep the target waiting for what is thrown away."""
        config = SSDConfig(backend=backend, num_assistant_tokens=500)
        stats = assert_equals_plain(target, shared_noisy, prompt(6), config, max_new_tokens=6)
        assert all(each.depth <= 4 for each in stats.rounds)
        assert sum(each.num_draft_steps for each in stats.rounds) < 40


class TestStateful:
    def test_watermarks_with_a_memory_are_refused(self, target, noisy) -> None:
        watermark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
        arguments = {"watermarking_config": watermark, "do_sample": True}
        with pytest.raises(UnsupportedError, match="SynthID"):
            generate_with_ssd(target, inputs=prompt(6), assistant_model=noisy, ssd_config={}, **arguments)


class TestModes:
    def test_mode_ar_of_a_callable_drafts_nothing(self, target, noisy) -> None:
        expected = target.generate(prompt(6), max_new_tokens=12, do_sample=False)
        callable_ = make_custom_generate(noisy, {"mode": "ar"})
        assert torch.equal(
            target.generate(prompt(6), max_new_tokens=12, do_sample=False, custom_generate=callable_), expected
        )
        assert sum(each.num_draft_tokens for each in target.ssd_stats.rounds) == 0

    def test_the_inline_backend_obeys_or_refuses(self, target, noisy) -> None:
        config = SSDConfig(backend="inline", assistant_device="cuda:7")
        with pytest.raises(ValueError, match=r"`assistant_device`.*cuda:7"):
            generate_with_ssd(target, inputs=prompt(6), assistant_model=noisy, ssd_config=config, max_new_tokens=4)
        config = SSDConfig(backend="inline", target_threads=2)
        generate_with_ssd(target, inputs=prompt(6), assistant_model=noisy, ssd_config=config, max_new_tokens=4)
        assert target.ssd_stats.target_threads == 2
        assert torch.get_num_threads() == 1


class TestEnabling:
    def test_a_failed_enable_changes_nothing(self, target, noisy) -> None:
        model_class = type(target)
        with pytest.raises(ValueError, match="`assistant_device` must be one of"):
            enable_ssd(target, assistant_model=noisy, ssd_config={"assistant_device": "cuda:5"})
        assert type(target) is model_class
        assert not hasattr(target, "_ssd_attachment")

    def test_a_call_that_falls_back_keeps_its_own_arguments(self, target, noisy) -> None:
        """transformers' own assisted generation, asked for in a way that SSD does not support, still happens."""
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        with pytest.raises(ValueError, match="num_return_sequences"):  # transformers' word on assistants
            target.generate(
                prompt(6), assistant_model=noisy, max_new_tokens=4, do_sample=True, num_return_sequences=2, max_time=9.0
            )

    def test_surplus_arguments_are_refused(self, target, noisy) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        with pytest.raises(TypeError, match="multiple values"):
            target.generate(prompt(6), inputs=prompt(6))

    def test_the_folder_takes_the_settings_of_an_enabled_model(self, target, noisy) -> None:
        enable_ssd(target, assistant_model=noisy, ssd_config=SSDConfig(mode="sd", backend="inline"))
        arguments = {"custom_generate": custom_generate_path(), "trust_remote_code": True, "max_new_tokens": 6}
        target.generate(prompt(6), **arguments)
        assert target.ssd_stats.mode == "sd"
        assert target.ssd_stats.assistant_threads is None

    def test_a_cache_that_cannot_be_rolled_back(self, target, noisy, monkeypatch) -> None:
        """As a static one in transformers 5.17: an enabled model does without SSD, an explicit call is told."""
        monkeypatch.setattr(StaticLayer, "is_croppable", False)
        arguments = {"max_new_tokens": 6, "do_sample": False}
        expected = target.generate(prompt(6), **arguments)

        def cache() -> dict:
            return {CACHE_KEY: StaticCache(config=target.config, max_cache_len=32)}

        with pytest.raises(UnsupportedError, match="StaticLayer"):
            generate_with_ssd(
                target, inputs=prompt(6), assistant_model=noisy, ssd_config=INLINE, **cache(), **arguments
            )
        enable_ssd(target, assistant_model=noisy, ssd_config=INLINE)
        assert torch.equal(target.generate(prompt(6), **cache(), **arguments), expected)


class TestRows:
    def test_plain_figures_count_the_tokens_of_all_rows(self, target) -> None:
        enable_ssd(target, ssd_config={"mode": "ar"})
        first = int(target.generate(prompt(6), max_new_tokens=1, do_sample=False)[0, -1])
        target.generate(prompt(6).repeat(3, 1), max_new_tokens=10, do_sample=False)
        assert target.ssd_stats.num_tokens == 30
        target.generate(prompt(6).repeat(3, 1), max_new_tokens=10, do_sample=False, eos_token_id=first)
        assert target.ssd_stats.num_tokens == 3

    @pytest.mark.parametrize(
        "arguments", [{"max_time": 5.0}, {"return_dict_in_generate": True, "output_hidden_states": True}]
    )
    def test_what_rows_in_turn_cannot_give_is_refused(self, target, noisy, arguments) -> None:
        with pytest.raises(UnsupportedError, match="for 2 rows"):
            generate_with_ssd(
                target, inputs=prompt(6).repeat(2, 1), assistant_model=noisy, ssd_config=INLINE, **arguments
            )

    def test_attentions_under_sdpa_are_what_plain_generate_gives(self, target, noisy) -> None:
        arguments = {
            "max_new_tokens": 8,
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_attentions": True,
        }
        plain = target.generate(prompt(6), **arguments)
        ours = generate_with_ssd(target, inputs=prompt(6), assistant_model=noisy, ssd_config=INLINE, **arguments)
        assert len(ours.attentions) == len(plain.attentions)
        assert [len(step) for step in ours.attentions] == [len(step) for step in plain.attentions]


class TestWorker:
    def test_large_answers_that_nobody_waits_for(self) -> None:
        """A row's last answer may exceed what a socket holds; caller and worker must not wait for each other then."""
        target, assistant = make("gpt2", vocab_size=60_000), make("gpt2", vocab_size=60_000, noise=0.01)
        eos = []
        for _ in range(3):
            arguments = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": eos or None}
            ids = generate_with_ssd(
                target, inputs=prompt(6), assistant_model=assistant, ssd_config=PROCESS, **arguments
            )
            eos = [int(ids[0, 9])]  # the next row may end in mid-speculation
            assert target.ssd_stats.degraded is None
        pool.close_worker(assistant)

    def test_a_device_has_many_names(self, target, shared_noisy) -> None:
        """Each spelling of a device must find the worker that is there."""
        pids = set()
        for device in ("auto", "cpu", "cpu:0"):
            config = SSDConfig(backend="process", assistant_device=device)
            generate_with_ssd(
                target, inputs=prompt(6), assistant_model=shared_noisy, ssd_config=config, max_new_tokens=4
            )
            pids.add(pool._WORKERS[shared_noisy].pid)
        assert len(pids) == 1

    @pytest.mark.slow
    def test_modules_in_the_working_folder_do_no_harm(self, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
        (tmp_path / "scripts").mkdir()
        script = tmp_path / "scripts" / "main.py"
        script.write_text(
            f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
            "from tiny_models import make_noisy, make_target, prompt\n"
            "from hf_ssd import enable_ssd\n"
            "target = enable_ssd(make_target(), assistant_model=make_noisy(), ssd_config={'backend': 'process'})\n"
            "target.generate(prompt(6), max_new_tokens=8)\n"
            "print(target.ssd_stats.degraded)\n"
        )
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            env=dict(os.environ),
        )
        assert done.stdout.strip() == "None", done.stderr

    @pytest.mark.slow
    def test_weights_replaced_between_calls_bring_a_new_worker(self) -> None:
        target, assistant = make_target(), make_noisy()
        generate_with_ssd(target, inputs=prompt(6), assistant_model=assistant, ssd_config=PROCESS, max_new_tokens=8)
        first = pool._WORKERS[assistant]
        assistant.load_state_dict({name: value.clone() for name, value in target.state_dict().items()}, assign=True)
        own_word = dataclasses.replace(PROCESS, ngram_drafts=False, backup="jit")
        generate_with_ssd(target, inputs=prompt(6), assistant_model=assistant, ssd_config=own_word, max_new_tokens=30)
        assert pool._WORKERS[assistant] is not first
        assert not first.is_alive
        assert target.ssd_stats.acceptance == 1.0
        pool.close_worker(assistant)
