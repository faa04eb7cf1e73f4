"""Rows, streams and threads around the decoding loop."""

from __future__ import annotations

import pytest
import torch
from plain import INLINE, assert_equals_plain
from streamers import Criterion, Listener
from tiny_models import make_target, padded_batch, prompt, tiny_tokenizer
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer

from hf_ssd import SSDConfig, enable_ssd
from hf_ssd.compat import CACHE_KEY
from hf_ssd.drafting.pace import Pace
from hf_ssd.generation import generate_with_ssd
from hf_ssd.planning import AcceptanceEstimate, Calibration
from hf_ssd.runtime import pool

GREEDY = {"max_new_tokens": 30, "do_sample": False}


def ssd(target, assistant, ssd_config=INLINE, **kwargs):
    return generate_with_ssd(target, assistant_model=assistant, ssd_config=ssd_config, **{**GREEDY, **kwargs})


def worker_pid(assistant) -> int:
    return pool._WORKERS[assistant].pid


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class TestBatches:
    @pytest.mark.parametrize("num_rows", [1, 2, 8, 32])
    def test_left_padded_rows_equal_plain_generate(self, target, noisy, num_rows) -> None:
        """VL26498: wrong positions of padded rows. nano-PEARL 4: failure at batch 32. Rows end early, at an EOS."""
        batch = padded_batch([prompt(3 + row % 7, seed=row) for row in range(num_rows)])
        settings = {**GREEDY, "eos_token_id": [5, 9]}
        plain = target.generate(**batch, **settings)
        assert ssd(target, noisy, **batch, **settings).tolist() == plain.tolist()
        assert num_rows == 1 or (plain == 0).any(), "no row ended early"

    def test_padding_costs_no_acceptance(self, target, noisy, monkeypatch) -> None:
        """Wrong positions on the assistant's side would only show here."""
        # How large trees are must not depend on the clock.
        monkeypatch.setattr(Pace, "rates", lambda self, acceptance: None)
        # Each row would start with what was measured in the one before.
        monkeypatch.setattr(Calibration, "update", lambda self, *args: None)
        monkeypatch.setattr(AcceptanceEstimate, "update", lambda self, *args: None)
        prompts = [prompt(3), prompt(9, seed=1)]
        chains = SSDConfig(backend="inline", num_assistant_tokens=4, draft_tree_size=None)
        singles = []
        for ids in prompts:
            ssd(target, noisy, chains, inputs=ids)
            singles.append([r.num_accepted for r in target.ssd_stats.rounds])
        ssd(target, noisy, chains, **padded_batch(prompts))
        rows = [[r.num_accepted for r in target.ssd_stats.rounds if r.row == row] for row in range(2)]
        assert rows == singles

    def test_several_sequences_differ_and_have_their_own_draws(self, target, noisy, prompt_ids) -> None:
        """TensorRT-LLM 19487: rows that share one random stream."""
        torch.manual_seed(0)
        ids = ssd(target, noisy, inputs=prompt_ids, do_sample=True, top_k=0, num_return_sequences=4)
        assert ids.shape == (4, prompt_ids.shape[1] + 30)
        assert len({tuple(row) for row in ids.tolist()}) == 4

    def test_a_function_of_the_batch_index(self, target, noisy) -> None:
        """`prefix_allowed_tokens_fn` is told which row it is asked about, also when rows are decoded one by one."""

        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            return list(range(2 + 20 * batch_id, 22 + 20 * batch_id))

        batch = padded_batch([prompt(4), prompt(6), prompt(5)])
        settings = {**GREEDY, "prefix_allowed_tokens_fn": allowed}
        plain = target.generate(**batch, **settings)
        assert ssd(target, noisy, **batch, **settings).tolist() == plain.tolist()

    def test_a_criterion_ends_rows_one_by_one(self, target, noisy) -> None:
        class EndsAtMultiplesOfSeven(Criterion):
            def __call__(self, input_ids, scores, **kwargs):
                return input_ids[:, -1] % 7 == 0

        batch = padded_batch([prompt(4), prompt(6), prompt(5)])
        settings = {**GREEDY, "eos_token_id": 1}
        criteria = StoppingCriteriaList([EndsAtMultiplesOfSeven(lambda ids: False)])
        plain = target.generate(**batch, **settings, stopping_criteria=criteria)
        assert ssd(target, noisy, **batch, **settings, stopping_criteria=criteria).tolist() == plain.tolist()

    def test_scores_of_a_batch_are_stacked(self, target, noisy) -> None:
        batch = padded_batch([prompt(4), prompt(6)])
        options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        plain = target.generate(**batch, **GREEDY, **options)
        output = ssd(target, noisy, **batch, **options)
        torch.testing.assert_close(output.scores, plain.scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.logits, plain.logits, atol=1e-4, rtol=1e-4)
        assert output.get(CACHE_KEY) is None  # rows have caches of different lengths
        assert output.ssd_stats.num_tokens == 60


class TestStreamers:
    @pytest.mark.parametrize("config", [INLINE, SSDConfig()], ids=["inline", "process"])
    def test_one_token_per_put_as_in_plain_generate(self, target, shared_noisy, prompt_ids, config) -> None:
        plain, own = Listener(), Listener()
        target.generate(prompt_ids, streamer=plain, **GREEDY)
        ssd(target, shared_noisy, config, inputs=prompt_ids, streamer=own)
        assert own.puts == plain.puts
        assert own.num_ends == plain.num_ends == 1

    def test_text_streamers(self, target, noisy, prompt_ids, capsys) -> None:
        tokenizer = tiny_tokenizer()
        texts = []
        for generate in (target.generate, lambda ids, **kwargs: ssd(target, noisy, inputs=ids, **kwargs)):
            generate(prompt_ids, **{**GREEDY, "streamer": TextStreamer(tokenizer, skip_prompt=True)})
            iterator = TextIteratorStreamer(tokenizer, timeout=5)
            generate(prompt_ids, **{**GREEDY, "streamer": iterator})
            texts.append((capsys.readouterr().out, list(iterator)))
        assert texts[0] == texts[1]
        assert texts[0][0].strip()

    @pytest.mark.parametrize("config", [INLINE, SSDConfig()], ids=["inline", "process"])
    def test_a_stream_ends_when_a_criterion_raises(self, target, shared_noisy, prompt_ids, config) -> None:
        """HF22576: whoever reads the stream would wait for ever."""

        def fails(ids: torch.Tensor) -> bool:
            if ids.shape[1] > 12:
                raise RuntimeError("the criterion broke")
            return False

        streamer = Listener()
        with pytest.raises(RuntimeError, match="the criterion broke"):
            ssd(
                target,
                shared_noisy,
                config,
                inputs=prompt_ids,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([Criterion(fails)]),
            )
        assert streamer.num_ends == 1
        assert_equals_plain(target, shared_noisy, prompt_ids, config, **GREEDY)

    def test_an_interrupt_leaves_the_worker_usable(self, target, shared_noisy, prompt_ids) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        assert_equals_plain(target, shared_noisy, prompt_ids, SSDConfig(), **GREEDY)
        pid = worker_pid(shared_noisy)
        for act_at in (1, 10, 11):  # whatever the worker was about to send then must not answer the next call
            with pytest.raises(KeyboardInterrupt):
                ssd(target, shared_noisy, SSDConfig(), inputs=prompt_ids, streamer=Listener(act_at, interrupt))
            assert_equals_plain(target, shared_noisy, prompt_ids, SSDConfig(), **GREEDY)
        assert worker_pid(shared_noisy) == pid


class TestReentrancy:
    @pytest.mark.parametrize("config", [INLINE, SSDConfig()], ids=["inline", "process"])
    def test_a_criterion_that_generates(self, target, shared_noisy, prompt_ids, config) -> None:
        """It uses the worker that the call around it holds: waiting for that would be for ever."""
        expected = make_target().generate(prompt_ids, **GREEDY).tolist()
        inner = []

        def generates(ids: torch.Tensor) -> bool:
            if ids.shape[1] == 12:
                inner.append(target.generate(prompt_ids, **GREEDY).tolist())
            return False

        enable_ssd(target, assistant_model=shared_noisy, ssd_config=config)
        criteria = StoppingCriteriaList([Criterion(generates)])
        assert target.generate(prompt_ids, stopping_criteria=criteria, **GREEDY).tolist() == expected
        assert inner == [expected]
        assert target.ssd_stats.degraded is None


@pytest.mark.usefixtures("two_threads")
class TestThreads:
    def seen_and_after(self, target, assistant, config, prompt_ids) -> tuple[set[int], int]:
        seen: set[int] = set()

        def look(ids: torch.Tensor) -> bool:
            seen.add(torch.get_num_threads())
            return False

        ssd(
            target,
            assistant,
            config,
            inputs=prompt_ids,
            max_new_tokens=8,
            stopping_criteria=StoppingCriteriaList([Criterion(look)]),
        )
        return seen, torch.get_num_threads()

    def test_a_process_takes_cores_from_the_target_for_the_call(self, target, shared_noisy, prompt_ids) -> None:
        assert self.seen_and_after(target, shared_noisy, SSDConfig(), prompt_ids) == ({1}, 2)
        assert (target.ssd_stats.target_threads, target.ssd_stats.assistant_threads) == (1, 1)

    def test_numbers_of_threads_are_obeyed(self, target, shared_noisy, prompt_ids) -> None:
        config = SSDConfig(target_threads=2, assistant_threads=1)
        assert self.seen_and_after(target, shared_noisy, config, prompt_ids) == ({2}, 2)

    def test_inline_and_plain_calls_have_all_cores(self, target, noisy, prompt_ids) -> None:
        assert self.seen_and_after(target, noisy, INLINE, prompt_ids) == ({2}, 2)
        assert self.seen_and_after(target, noisy, SSDConfig(mode="ar"), prompt_ids) == ({2}, 2)

    def test_they_are_restored_when_a_call_fails(self, target, shared_noisy, prompt_ids) -> None:
        def fail() -> None:
            raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"):
            ssd(target, shared_noisy, SSDConfig(), inputs=prompt_ids, streamer=Listener(3, fail))
        assert torch.get_num_threads() == 2
