"""The target's cache, of each kind that `generate()` makes or is given, and the assistant's from call to call."""

from __future__ import annotations

import contextlib

import pytest
import tiny_zoo
import torch
from drafting_requests import request
from plain import assert_equals_plain
from tiny_models import make_noisy, make_target, padded_batch, prompt
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, StaticLayer

from hf_ssd import SSDConfig, enable_ssd, make_custom_generate
from hf_ssd.checks import UnsupportedError
from hf_ssd.compat import CACHE_KEY
from hf_ssd.drafting import AssistantModel, DraftEngine, GraphedAssistant
from hf_ssd.generation import generate_with_ssd
from hf_ssd.metrics import SSDStats
from hf_ssd.target_trees import masks_of
from hf_ssd.types import Outcome

# Copied tokens are not the assistant's word.
INLINE = SSDConfig(backend="inline", num_assistant_tokens=4, ngram_drafts=False, backup="jit")
STREAM = SSDConfig(backend="stream", num_assistant_tokens=4, ngram_drafts=False, backup="jit", trace=True)
WINDOWS = "mistral, window of 8"

needs_static = pytest.mark.skipif(not StaticLayer.is_croppable, reason="transformers 5.17 cannot crop static caches")


def assert_drafted(stats: SSDStats) -> None:
    assert stats.acceptance > 0.4
    assert stats.num_hits > 2


class TestImplementations:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"cache_implementation": "dynamic"},
            {"cache_config": {"backend": "hqq", "nbits": 4}},  # read by quantised caches only
            {"prefill_chunk_size": 4},
            pytest.param({"cache_implementation": "static"}, marks=needs_static),
            pytest.param({"cache_implementation": "static", "prefill_chunk_size": 4}, marks=needs_static),
        ],
        ids=lambda arguments: "+".join(map(str, arguments.values())),
    )
    def test_each_gives_what_plain_generate_gives(self, target, noisy, arguments) -> None:
        assert_drafted(assert_equals_plain(target, noisy, prompt(12), INLINE, max_new_tokens=40, **arguments))

    @pytest.mark.parametrize("family", [WINDOWS, "gemma3, mixed layers"])
    def test_windows(self, family: str) -> None:
        target, assistant = tiny_zoo.make(family), tiny_zoo.make(family, noise=0.05)
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, max_new_tokens=40))

    @needs_static
    def test_rows_of_a_static_cache_run_one_by_one(self, target, noisy) -> None:
        batch = padded_batch([prompt(12), prompt(7)])
        arguments = {"max_new_tokens": 30, "do_sample": False, "cache_implementation": "static"}
        expected = make_target().generate(**batch, **arguments)
        ids = generate_with_ssd(target, assistant_model=noisy, ssd_config=INLINE, **batch, **arguments)
        assert ids.equal(expected)
        assert_drafted(target.ssd_stats)

    @needs_static
    def test_a_static_cache_that_windows_do_not_cut(self) -> None:
        target, assistant = (tiny_zoo.make(WINDOWS, sliding_window=64, noise=noise) for noise in (0.0, 0.05))
        arguments = {"max_new_tokens": 30, "cache_implementation": "static"}
        assert_drafted(assert_equals_plain(target, assistant, prompt(12), INLINE, **arguments))

    @needs_static
    def test_a_static_cache_that_windows_cut(self) -> None:
        """Refused before the prompt is read; an enabled model runs plainly."""
        target, assistant = tiny_zoo.make(WINDOWS), tiny_zoo.make(WINDOWS, noise=0.05)
        arguments = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
        expected = target.generate(prompt(6), **arguments)
        match = '"static" one of 17 tokens keeps only the latest 8 .* Leave it unset'
        with pytest.raises(UnsupportedError, match=match):
            generate_with_ssd(target, inputs=prompt(6), assistant_model=assistant, ssd_config=INLINE, **arguments)
        with pytest.raises(UnsupportedError, match=match):
            target.generate(prompt(6), custom_generate=make_custom_generate(assistant, INLINE), **arguments)
        enable_ssd(target, assistant, INLINE)
        assert target.generate(prompt(6), **arguments).equal(expected)

    @needs_static
    def test_a_static_cache_is_as_long_as_that_of_the_longest_call(self) -> None:
        target = tiny_zoo.make(WINDOWS, sliding_window=24)
        arguments = {"do_sample": False, "cache_implementation": "static", "assistant_model": target}
        generate_with_ssd(target, inputs=prompt(6), ssd_config=INLINE, max_new_tokens=12, **arguments)
        target.generate(prompt(6), max_new_tokens=30, cache_implementation="static")
        with pytest.raises(UnsupportedError, match="one of 35 tokens keeps only the latest 24"):
            generate_with_ssd(target, inputs=prompt(6), ssd_config=INLINE, max_new_tokens=12, **arguments)

    @pytest.mark.parametrize("backend", ["fp8", "hqq", "quanto"])
    def test_a_quantised_cache_of_the_callers_own(self, target, noisy, backend: str) -> None:
        try:
            cache = cache_utils.QuantizedCache(backend, target.config)
        except (ImportError, ValueError) as error:
            pytest.skip(str(error))
        with pytest.raises(UnsupportedError, match=r"must allow taking tokens back, but .*QuantizedLayer does not"):
            generate_with_ssd(
                target,
                inputs=prompt(6),
                assistant_model=noisy,
                ssd_config=INLINE,
                max_new_tokens=4,
                **{CACHE_KEY: cache},
            )


class _Stream(contextlib.nullcontext):
    def wait_stream(self, stream: object) -> None:
        pass


class TestOffloading:
    """What a cache that is offloaded to the CPU does, on the CPU."""

    @pytest.fixture(autouse=True)
    def _streams(self, monkeypatch) -> None:
        for name in ("torch.Stream", "torch.cuda.Stream", "torch.cuda.default_stream"):
            monkeypatch.setattr(name, lambda *args: _Stream())

    @pytest.mark.parametrize("implementation", ["offloaded", pytest.param("offloaded_static", marks=needs_static)])
    def test_it_verifies_chains(self, target, noisy, monkeypatch, implementation: str) -> None:
        """Entries on their way to another device may be cut off, but not moved, as a tree would have it."""
        moved = []
        kind = StaticLayer if "static" in implementation else DynamicLayer
        monkeypatch.setattr(kind, "offload", lambda layer: moved.append(layer))
        arguments = {"max_new_tokens": 40, "cache_implementation": implementation}
        stats = assert_equals_plain(target, noisy, prompt(12), INLINE, **arguments)
        assert_drafted(stats)
        assert moved
        assert all(each.num_draft_tokens == each.depth for each in stats.rounds)

    def test_its_rows_run_one_by_one(self, target, noisy) -> None:
        batch = padded_batch([prompt(12), prompt(7)])
        arguments = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": "offloaded"}
        expected = make_target().generate(**batch, **arguments)
        ids = generate_with_ssd(target, assistant_model=noisy, ssd_config=INLINE, **batch, **arguments)
        assert ids.equal(expected)
        assert_drafted(target.ssd_stats)


class TestCallersOwn:
    @pytest.mark.parametrize("make", [lambda model: DynamicCache(), lambda model: DynamicCache(config=model.config)])
    @pytest.mark.parametrize("family", ["llama", WINDOWS])
    def test_dynamic(self, make, family: str) -> None:
        target, assistant = (
            (make_target(), make_noisy())
            if family == "llama"
            else (tiny_zoo.make(family), tiny_zoo.make(family, noise=0.05))
        )
        arguments = {"max_new_tokens": 30, "do_sample": False}
        plain_cache, cache = make(target), make(target)
        expected = target.generate(prompt(12), **arguments, **{CACHE_KEY: plain_cache})
        ids = generate_with_ssd(
            target, inputs=prompt(12), assistant_model=assistant, ssd_config=INLINE, **arguments, **{CACHE_KEY: cache}
        )
        assert ids.equal(expected)
        assert cache.get_seq_length() == plain_cache.get_seq_length()
        assert_drafted(target.ssd_stats)

    @needs_static
    @pytest.mark.parametrize("length", [41, 64])  # as many as there are to be, and more
    def test_static(self, target, noisy, length: int) -> None:
        arguments = {"max_new_tokens": 30, "do_sample": False}

        def cache() -> dict:
            return {CACHE_KEY: StaticCache(config=target.config, max_cache_len=length)}

        expected = target.generate(prompt(12), **arguments, **cache())
        ids = generate_with_ssd(
            target, inputs=prompt(12), assistant_model=noisy, ssd_config=INLINE, **arguments, **cache()
        )
        assert ids.equal(expected)
        assert_drafted(target.ssd_stats)


class TestTurns:
    """SG8726: a second turn reads what is new, on both sides, and drafts as well as without the first."""

    def read_by(self, stats: SSDStats) -> int:
        """Tokens that the assistant read before it drafted."""
        return sum(dict(span.args)["tokens"] for span in stats.speculator_spans if span.name == "prefill")

    @pytest.mark.parametrize("has_cache", [True, False])
    def test_both_sides_read_what_is_new(self, target, noisy, has_cache: bool) -> None:
        masks_of(target)  # a trial
        seen: list[int] = []
        target.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.append(args[0].numel()))
        cache = {CACHE_KEY: DynamicCache(config=target.config)} if has_cache else {}
        ids, reads, target_reads = prompt(40), [], []
        for turn in range(3):
            expected = make_target().generate(ids, max_new_tokens=20, do_sample=False)
            seen.clear()
            arguments = {"ssd_config": STREAM, "max_new_tokens": 20, "do_sample": False, **cache}
            ids = generate_with_ssd(target, inputs=ids, assistant_model=noisy, **arguments)
            assert ids.equal(expected)
            assert target.ssd_stats.acceptance > 0.4
            reads.append(self.read_by(target.ssd_stats))
            target_reads.append(seen[0])
            ids = torch.cat([ids, prompt(5, seed=turn + 1)], dim=1)
        assert reads[0] == 40
        # The last tokens of a turn may have come without the assistant.
        assert all(6 <= read <= 25 for read in reads[1:])
        assert target_reads == ([40, 6, 6] if has_cache else [40, 65, 90])

    def test_rows_find_their_own(self, target, noisy) -> None:
        """Of several rows each goes on from the one that began as it does, whichever place it has in the batch."""
        arguments = {"assistant_model": noisy, "ssd_config": STREAM, "max_new_tokens": 12, "do_sample": False}
        rows = [prompt(30, seed=seed) for seed in (1, 2)]
        generate_with_ssd(target, inputs=torch.cat(rows), **arguments)
        ids = torch.cat(rows[::-1])
        assert generate_with_ssd(target, inputs=ids, **arguments).equal(
            make_target().generate(ids, max_new_tokens=12, do_sample=False)
        )
        assert self.read_by(target.ssd_stats) == 2
        assert target.ssd_stats.acceptance > 0.4

    @pytest.mark.parametrize("kind", [AssistantModel, lambda model: GraphedAssistant(model, capture=False)])
    @pytest.mark.parametrize("family", ["llama", WINDOWS])
    @pytest.mark.parametrize("num_new", [1, 20, 90])
    def test_an_engine_drafts_as_a_new_one_does(self, kind, family: str, num_new: int) -> None:
        model = make_noisy() if family == "llama" else tiny_zoo.make(family)
        first = prompt(30)[0].tolist()
        second = [*first[:20], first[20] % 60 + 1, *prompt(num_new, seed=1)[0, 1:].tolist()]
        used, new = DraftEngine(kind(model), overlaps=False), DraftEngine(kind(model), overlaps=False)
        for engine, rows in ((used, (first, second)), (new, (second,))):
            for row in rows:
                asked = request(INLINE, prompt_ids=tuple(row))
                if isinstance(engine.assistant, GraphedAssistant):
                    engine.assistant.prepare(asked)
                assert engine.num_known(row) == (20 if rows[0] is not row else 0)
                engine.start(asked)
                while engine.deepen():
                    pass
                answer = engine.resolve(Outcome(0, row[3]))
        assert answer.tokens
        assert used._trunk.num_cached == new._trunk.num_cached
        for ours, theirs in zip(used._trunk.cache.layers, new._trunk.cache.layers, strict=True):
            torch.testing.assert_close(ours.keys[..., : len(second), :], theirs.keys[..., : len(second), :])
        engine = used
        while engine.deepen():
            pass
        assert engine.resolve(Outcome(0, 5)).tokens  # and it goes on

    def test_a_long_row_does_not_keep_its_memory_for_short_ones(self, noisy) -> None:
        engine = DraftEngine(AssistantModel(make_noisy(max_position_embeddings=20_000)), overlaps=False)
        start = prompt(20)[0].tolist()
        engine.start(request(INLINE, prompt_ids=tuple(start * 500)))
        assert engine._trunk.cache.capacity > 10_000
        assert engine.num_known(start) == 20
        engine.start(request(INLINE, prompt_ids=tuple(start)))
        assert engine._trunk.cache.capacity < 1000


class TestEmbeddings:
    @pytest.mark.parametrize("noise", [0.0, 0.05])
    def test_with_the_tokens_that_the_assistant_reads(self, target, noisy, noise: float) -> None:
        ids = prompt(12)
        embeds = target.get_input_embeddings()(ids).detach()
        embeds = embeds + noise * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))
        stats = assert_equals_plain(target, noisy, ids, INLINE, max_new_tokens=40, inputs_embeds=embeds)
        assert_drafted(stats)

    def test_rows(self, target, noisy) -> None:
        ids = torch.cat([prompt(12), prompt(12, seed=1)])
        embeds = target.get_input_embeddings()(ids).detach()
        assert_drafted(assert_equals_plain(target, noisy, ids, INLINE, max_new_tokens=30, inputs_embeds=embeds))

    def test_others_than_the_tokens_are_refused(self, target, noisy) -> None:
        embeds = target.get_input_embeddings()(prompt(9)).detach()
        with pytest.raises(
            UnsupportedError, match=r"each of `input_ids`, of shape \(1, 12\), but is of shape \(1, 9, 32\)"
        ):
            generate_with_ssd(target, inputs=prompt(12), inputs_embeds=embeds, assistant_model=noisy, ssd_config=INLINE)
        with pytest.raises(UnsupportedError, match="give it `input_ids` as well"):
            target.generate(inputs_embeds=embeds, custom_generate=make_custom_generate(noisy, INLINE))
