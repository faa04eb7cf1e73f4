"""Whole calls with an EAGLE-3 head: the output is the target's own, drafts are accepted, outcomes are prepared for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3.rebuilding import CheckingProcessor, checking
from plain import assert_equals_plain
from test_enumeration import Loop, distance
from tiny_head import make_calm_target, make_head, make_trained_head
from tiny_models import padded_batch, prompt, tiny_llama
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_ssd import SSDConfig, disable_ssd, enable_ssd
from hf_ssd.compat import CACHE_KEY
from hf_ssd.decoders import decoder_config
from hf_ssd.drafting.feature_trunk import FeatureTrunk
from hf_ssd.eagle3 import Eagle3Config, Eagle3Head, TargetFeatures, backlog, capture_features, feature_layers, features
from hf_ssd.generation import generate_with_ssd, make_custom_generate
from hf_ssd.matrix.multimodal import VISION_FAMILIES
from hf_ssd.planning import CallPolicy
from hf_ssd.runtime import staff
from hf_ssd.runtime.pool import close_worker
from hf_ssd.types import Origin, Plan, Switch

INLINE = SSDConfig(backend="inline", num_assistant_tokens=4, ngram_drafts=False)
NUM_DRAWN = 4  # tokens whose draws are enumerated
WAYS: dict[str, dict[str, Any]] = {
    "trees": {},
    "chains": {"draft_tree_size": None},
    "copies": {"ngram_drafts": True},
    "a budget": {"cache_budget": 6},
    "no drafting ahead": {"mode": "sd"},
}
SCRIPTS = [
    [Plan("ssd"), Plan("ar"), Plan("ssd")],
    [Plan("ar"), Plan("ssd")],
    [Plan("ssd"), Plan("sd"), Plan("ssd", max_draft_tokens=3), Plan("sd")],
    [Plan("ssd"), Plan("ssd", 1), Plan("ssd", 2), Plan("ar"), Plan("ssd")],
]


class ScriptedPolicy(CallPolicy):
    """Each plan has a few rounds, the last one the rest."""

    plans: Sequence[Plan] = ()

    def begin_row(self) -> None:
        self._num_rounds = 0
        self.plan = self.plans[0]

    def after_round(self, stats, duration_ms, likelihood=None) -> list[Switch]:
        self._num_rounds += 1
        before, self.plan = self.plan, self.plans[min(self._num_rounds // 4, len(self.plans) - 1)]
        return [] if before == self.plan else [Switch(before, self.plan, "by the script")]


@pytest.fixture
def target() -> PreTrainedModel:
    return make_calm_target()


@pytest.fixture
def head(target) -> Eagle3Head:
    return make_trained_head(target)


@pytest.fixture(scope="module")
def shared() -> Any:
    """A pair whose head keeps its process."""
    target = make_calm_target()
    head = make_trained_head(target)
    yield target, head
    close_worker(head)


@pytest.fixture
def beginnings(monkeypatch) -> list[int]:
    """With each outcome that a head is told: from which place in the row on it reads."""
    seen: list[int] = []
    learn = FeatureTrunk.learn
    monkeypatch.setattr(FeatureTrunk, "learn", lambda self, given: (learn(self, given), seen.append(self._first))[0])
    return seen


def settings(way: str, **fields: object) -> SSDConfig:
    return SSDConfig(**{"backend": "inline", "num_assistant_tokens": 4, "ngram_drafts": False, **WAYS[way], **fields})


class TestGreedily:
    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_plain_generate(self, target, head, way: str) -> None:
        dots: list[None] = []
        with checking(lambda: dots.append(None)):
            stats = assert_equals_plain(target, head, prompt(8), settings(way), max_new_tokens=60)
        assert len(dots) >= 10
        assert stats.tokens_per_round > 1.6
        assert way == "no drafting ahead" or stats.num_hits > 5

    def test_a_head_that_knows_nothing(self, target) -> None:
        stats = assert_equals_plain(target, make_head(target), prompt(8), INLINE, max_new_tokens=40)
        assert stats.acceptance < 0.4

    @pytest.mark.parametrize("way", ["trees", "chains"])
    def test_in_a_process(self, shared, way: str, tmp_path: Path) -> None:
        """With every round's cache compared with a rebuilt one over there."""
        target, head = shared
        path = tmp_path / "checks"
        config = settings(way, backend="process")
        processors = lambda: LogitsProcessorList([CheckingProcessor(path)])  # noqa: E731
        stats = assert_equals_plain(target, head, prompt(8), config, max_new_tokens=60, logits_processor=processors)
        assert len(path.read_text()) >= 10
        assert sum(each.num_accepted for each in stats.rounds) > 5
        assert stats.num_hits > 0

    def test_in_a_thread(self, target, head) -> None:
        stats = assert_equals_plain(target, head, prompt(8), settings("trees", backend="stream"), max_new_tokens=60)
        assert sum(each.num_accepted for each in stats.rounds) > 5

    def test_in_8_bits(self, target, head) -> None:
        config = settings("trees", assistant_quantization="int8")
        stats = assert_equals_plain(target, head, prompt(8), config, max_new_tokens=40)
        assert stats.acceptance > 0.3

    def test_every_way_in(self, target, head) -> None:
        expected = target.generate(prompt(8), max_new_tokens=30, do_sample=False)
        enable_ssd(target, head, INLINE)
        assert target.generate(prompt(8), max_new_tokens=30, do_sample=False).equal(expected)
        assert target.ssd_stats.num_hits > 0
        disable_ssd(target)
        ssd = make_custom_generate(head, INLINE)
        assert target.generate(prompt(8), max_new_tokens=30, do_sample=False, custom_generate=ssd).equal(expected)

    def test_rows_with_padding(self, target, head) -> None:
        inputs = padded_batch([prompt(5), prompt(9, seed=1), prompt(7, seed=2)])
        expected = target.generate(**inputs, max_new_tokens=30, do_sample=False)
        dots: list[None] = []
        for config in (INLINE, settings("trees", backend="stream")):
            with checking(lambda: dots.append(None)):
                found = generate_with_ssd(
                    target, **inputs, assistant_model=head, ssd_config=config, max_new_tokens=30, do_sample=False
                )
            assert found.equal(expected)
            assert target.ssd_stats.degraded is None
            assert target.ssd_stats.acceptance > 0.3
        assert len(dots) >= 20

    def test_a_cache_of_the_callers_own(self, target, head) -> None:
        """Of what is in it the head has no features. It goes on from there."""
        ids, cache, stats = prompt(20), DynamicCache(config=target.config), []
        for turn in range(2):
            expected = target.generate(ids, max_new_tokens=30, do_sample=False)
            arguments = {"assistant_model": head, "ssd_config": INLINE, CACHE_KEY: cache}
            ids = generate_with_ssd(target, inputs=ids, max_new_tokens=30, do_sample=False, **arguments)
            assert ids.equal(expected)
            stats.append(target.ssd_stats.acceptance)
            ids = torch.cat([ids, prompt(5, seed=turn + 1)], dim=1)
        assert min(stats) > 0.3

    @pytest.mark.parametrize("num_rows", [1, 2])
    @pytest.mark.parametrize("plans", SCRIPTS, ids=lambda plans: ", ".join(map(str, plans)))
    def test_who_drafts_changes_within_the_call(
        self, target, head, plans: Sequence[Plan], num_rows: int, beginnings, monkeypatch
    ) -> None:
        """A head that comes back knows the whole row, prompt included: what it missed has been kept for it."""
        monkeypatch.setattr(staff, "CallPolicy", ScriptedPolicy)
        monkeypatch.setattr(ScriptedPolicy, "plans", plans)
        other = make_trained_head(target)
        other.config.eagle_aux_hidden_state_layer_ids = [2, 2, 1]  # no better than any, but other layers
        ids = torch.cat([prompt(8, seed=seed) for seed in range(num_rows)])
        config = SSDConfig(backend="inline", mode="auto", num_assistant_tokens=4, ngram_drafts=False)
        arguments = {"assistant_model": [head, make_calm_target(), other], "ssd_config": config}
        dots: list[None] = []
        with checking(lambda: dots.append(None)):
            found = generate_with_ssd(target, inputs=ids, max_new_tokens=80, do_sample=False, **arguments)
        assert found.equal(target.generate(ids, max_new_tokens=80, do_sample=False))
        stats = target.ssd_stats
        assert stats.degraded is None
        assert stats.num_switches == len(plans) - 1
        assert dots
        assert set(beginnings) == {1}
        last = [each for each in stats.rounds if each.num_draft_tokens][-6 * num_rows :]
        assert plans[-1].assistant == 0
        assert sum(each.num_accepted for each in last) > 6 * num_rows
        assert any(each.origin is Origin.CACHE and each.num_accepted for each in last) or plans[-1].mode == "sd"

    @pytest.mark.parametrize("backend", ["stream", "process"])
    def test_a_head_comes_back_beside_the_target(self, shared, backend: str, beginnings, monkeypatch) -> None:
        target, head = shared
        monkeypatch.setattr(staff, "CallPolicy", ScriptedPolicy)
        monkeypatch.setattr(ScriptedPolicy, "plans", SCRIPTS[0])
        config = SSDConfig(mode="auto", num_assistant_tokens=4, ngram_drafts=False, backend=backend)
        stats = assert_equals_plain(target, head, prompt(8), config, max_new_tokens=80)
        assert [each.mode for each in stats.rounds[:9:4]] == ["ssd", "ar", "ssd"]
        assert sum(each.num_accepted for each in stats.rounds[9:]) > 10
        assert set(beginnings) == ({1} if backend == "stream" else set())

    def test_a_head_that_comes_back_after_long(self, target, head, beginnings, monkeypatch) -> None:
        """Little is kept for it: it begins there."""
        monkeypatch.setattr(staff, "CallPolicy", ScriptedPolicy)
        monkeypatch.setattr(ScriptedPolicy, "plans", [Plan("ar"), Plan("ssd")])
        monkeypatch.setattr(backlog, "MAX_KEPT_BYTES", 3 * head.config.feature_size * 4)
        dots: list[None] = []
        with checking(lambda: dots.append(None)):
            config = SSDConfig(backend="inline", mode="auto", num_assistant_tokens=4, ngram_drafts=False)
            stats = assert_equals_plain(target, head, prompt(8), config, max_new_tokens=60)
        assert len(dots) > 5
        assert set(beginnings) == {8 + 5 - 3}  # it knows the features of four tokens, the latest included
        assert sum(each.num_accepted for each in stats.rounds) > 10

    def test_a_prompt_of_which_only_the_end_can_be_told(self, target, head, monkeypatch) -> None:
        monkeypatch.setattr(features, "MAX_TOLD_BYTES", 10 * head.config.feature_size * 4)
        told: list[int] = []
        learn = FeatureTrunk.learn
        monkeypatch.setattr(FeatureTrunk, "learn", lambda self, given: (told.append(len(given)), learn(self, given))[1])
        dots: list[None] = []
        with checking(lambda: dots.append(None)):
            stats = assert_equals_plain(target, head, prompt(40), INLINE, max_new_tokens=40)
            assert told[0] == 10
            assert stats.acceptance > 0.3
            told.clear()
            batch = padded_batch([prompt(30), prompt(4)])
            expected = target.generate(**batch, max_new_tokens=20, do_sample=False)
            arguments = {"assistant_model": head, "ssd_config": INLINE}
            assert generate_with_ssd(target, **batch, max_new_tokens=20, do_sample=False, **arguments).equal(expected)
            assert told[:2] == [10, 4]


class TestSampling:
    @pytest.mark.parametrize("backend", ["inline", "process"])
    def test_a_seed_gives_what_it_gives_without_a_head(self, shared, backend: str) -> None:
        target, head = shared
        arguments = {"inputs": prompt(8), "do_sample": True, "top_k": 0, "temperature": 0.7, "max_new_tokens": 40}
        expected = generate_with_ssd(target, ssd_config={"mode": "ar", "seed": 3}, **arguments)
        for way in ("trees", "chains"):
            config = settings(way, seed=3, backend=backend)
            found = generate_with_ssd(target, assistant_model=head, ssd_config=config, **arguments)
            assert found.equal(expected)
            stats = target.ssd_stats
            assert stats.degraded is None
            assert sum(each.num_accepted for each in stats.rounds) > 3
            assert stats.num_hits > 0 or backend == "process"

    @pytest.mark.parametrize("rule", ["token", "block"])
    @pytest.mark.parametrize(
        "fields",
        [
            {"num_assistant_tokens": 1, "cache_budget": 1},
            pytest.param({"num_assistant_tokens": 2, "cache_budget": 2}, marks=pytest.mark.slow),
            pytest.param({"num_assistant_tokens": 2, "mode": "sd"}, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_the_rules_that_draw_are_exact(self, rule: str, fields: dict[str, Any], monkeypatch) -> None:
        """All draws of both sides enumerated. One of the three tokens cannot be drafted."""
        target = tiny_llama(0, vocab_size=3, num_hidden_layers=1, initializer_range=0.2).double()
        head = make_head(target.float(), draft_vocab_size=2).double()
        target, loop, ids = target.double(), Loop(monkeypatch), torch.tensor([[2, 1, 1]])
        config = SSDConfig(backend="inline", seed=0, verification=rule, **fields)

        def once() -> tuple[int, ...]:
            arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_DRAWN}
            found = generate_with_ssd(target, inputs=ids, assistant_model=head, ssd_config=config, **arguments)
            for each in target.ssd_stats.rounds:
                loop.seen[each.origin.value] += 1
                loop.seen["accepted"] += each.num_accepted
            return tuple(found[0, 3:].tolist())

        found = loop.enumeration.paths(once)
        expected = {}
        for tokens in itertools.product(range(3), repeat=NUM_DRAWN):
            with torch.no_grad():
                logits = target(torch.cat([ids, torch.tensor([tokens])], dim=1)).logits[0, 2 : 2 + NUM_DRAWN]
            probs = logits.double().softmax(-1)
            expected[tokens] = float(probs[range(NUM_DRAWN), tokens].prod())
        assert distance(found, expected) < 1e-6
        assert loop.seen["accepted"] > 10
        assert loop.seen["cache"] > 10 or config.mode == "sd"


class TestFeatures:
    def test_an_outcome_brings_those_of_the_tokens_that_were_emitted(self, target, head, monkeypatch) -> None:
        rows: list[list[torch.Tensor]] = []
        begin, learn = FeatureTrunk.begin, FeatureTrunk.learn
        monkeypatch.setattr(FeatureTrunk, "begin", lambda self, request: (rows.append([]), begin(self, request))[1])
        monkeypatch.setattr(FeatureTrunk, "learn", lambda self, given: (rows[-1].append(given), learn(self, given))[1])
        ids = generate_with_ssd(
            target, inputs=prompt(8), assistant_model=head, ssd_config=INLINE, max_new_tokens=40, do_sample=False
        )
        told = torch.cat(rows[-1])
        with torch.no_grad(), capture_features(target, feature_layers(target, head)) as features:
            target(ids)
            expected = features()[0]
        assert len(told) > 38
        torch.testing.assert_close(told, expected[: len(told)], atol=1e-4, rtol=1e-4)
        rounds = target.ssd_stats.rounds[: len(rows[-1]) - 1]  # after the last one nothing is told
        assert [len(given) for given in rows[-1][1:]] == [1 + each.num_accepted for each in rounds]

    def test_the_hooks_are_gone_afterwards(self, target, head) -> None:
        def hooks() -> int:
            return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())

        class Refuses(torch.nn.Module):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] > 12:
                    raise RuntimeError("no more")
                return scores

        arguments = {"inputs": prompt(8), "max_new_tokens": 20, "do_sample": False, "ssd_config": INLINE}
        before = hooks()
        generate_with_ssd(target, assistant_model=head, **arguments)
        assert hooks() == before
        with pytest.raises(RuntimeError, match="no more"):
            generate_with_ssd(target, assistant_model=head, logits_processor=[Refuses()], **arguments)
        assert hooks() == before

    def test_hidden_states_for_the_caller_are_plain_ones(self, target, head) -> None:
        arguments = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        plain = target.generate(prompt(8), output_hidden_states=True, **arguments)
        found = generate_with_ssd(
            target, inputs=prompt(8), assistant_model=head, ssd_config=INLINE, output_hidden_states=True, **arguments
        )
        assert len(found.hidden_states) == len(plain.hidden_states)
        for ours, theirs in zip(found.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    def test_nobody_else_pays(self, target, monkeypatch) -> None:
        monkeypatch.setattr(TargetFeatures, "of_row", lambda *args: pytest.fail("features were taken"))
        assert_equals_plain(target, make_calm_target(), prompt(8), INLINE, max_new_tokens=20)

    def test_layers_that_run_without_hooks(self, target, head) -> None:
        """As in a graph that was compiled before: the call goes on without the head."""
        for layer in target.model.layers:
            layer._compiled_call_impl = layer.forward
        expected = target.generate(prompt(8), max_new_tokens=20, do_sample=False)
        found = generate_with_ssd(
            target, inputs=prompt(8), assistant_model=head, ssd_config=INLINE, max_new_tokens=20, do_sample=False
        )
        assert found.equal(expected)
        assert "without hooks" in target.ssd_stats.degraded

    def test_a_prompt_that_is_read_in_chunks(self, target, head) -> None:
        dots: list[None] = []
        with checking(lambda: dots.append(None)):
            stats = assert_equals_plain(target, head, prompt(30), INLINE, max_new_tokens=20, prefill_chunk_size=8)
        assert dots
        assert stats.acceptance > 0.3


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_a_target_that_sees(model_type: str) -> None:
    """The head reads placeholders as tokens: the target's states there know the image."""
    family = next(each for each in VISION_FAMILIES if each.model_type == model_type)
    target, dots = family.make(), list[None]()
    layer = {"hidden_size": decoder_config(target).hidden_size, "vocab_size": decoder_config(target).vocab_size}
    layer |= {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    head = Eagle3Head(Eagle3Config(transformer_layer_config=layer, draft_vocab_size=layer["vocab_size"])).eval()
    head.share_embedding(target)
    inputs = {**family.prompts(1), "max_new_tokens": 24, "do_sample": False}
    with checking(lambda: dots.append(None)):
        found = generate_with_ssd(target, assistant_model=head, ssd_config=INLINE, **inputs)
    assert found.equal(target.generate(**inputs))
    assert target.ssd_stats.degraded is None
    assert len(dots) > 10
