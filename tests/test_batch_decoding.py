"""Rows that share the target's forwards: each gets what it gets alone, at its own pace."""

from __future__ import annotations

import random

import pytest
import tiny_zoo
import torch
from drafting_requests import request
from tiny_models import make_noisy, make_target, padded_batch, prompt
from transformers.cache_utils import DynamicCache

from hf_ssd import SSDConfig, batch_decoding
from hf_ssd.batch_decoding import BatchDecoder
from hf_ssd.drafting import AssistantModel, DraftEngine, work_together
from hf_ssd.generation import generate_with_ssd
from hf_ssd.kv_cache import compact_rows, select_rows
from hf_ssd.runtime import pool
from hf_ssd.types import Origin, Outcome

EOS = [7, 11]
JIT, COPIED, NOTHING = Origin.JUST_IN_TIME, Origin.NGRAM, Origin.NONE


def together(target, assistant, prompts, *, seeds=None, **kwargs) -> list[list[int]]:
    """The new tokens of each row of a left-padded batch."""
    settings = {"backend": "inline", "num_assistant_tokens": 4, "seed": seeds, **kwargs.pop("settings", {})}
    batch = padded_batch(prompts)
    inputs = {"inputs": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    ids = generate_with_ssd(
        target, assistant_model=assistant, ssd_config=SSDConfig(**settings), **inputs, do_sample=seeds is not None,
        top_k=0, **kwargs,
    )  # fmt: skip
    return ids[:, batch["input_ids"].shape[1] :].tolist()


def alone(target, ids, *, seed=None, **kwargs) -> list[int]:
    if seed is None:
        new = target.generate(ids, do_sample=False, **kwargs)
    else:
        config = SSDConfig(mode="ar", seed=seed)
        new = generate_with_ssd(target, inputs=ids, ssd_config=config, do_sample=True, top_k=0, **kwargs)
    return new[0, ids.shape[1] :].tolist()


def assert_as_alone(rows: list[list[int]], target, prompts, *, seeds=None, **kwargs) -> None:
    for index, (row, ids) in enumerate(zip(rows, prompts, strict=True)):
        expected = alone(target, ids, seed=None if seeds is None else seeds[index], **kwargs)
        assert row[: len(expected)] == expected, index
        assert not any(row[len(expected) :]), "what follows the end is padding"


@pytest.mark.parametrize("num_rows", [2, 3, 8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "coupled"])
def test_every_row_is_as_alone(target, noisy, num_rows: int, is_sampled: bool) -> None:
    prompts = [prompt(1 + (5 * row) % 17, seed=row) for row in range(num_rows)]
    seeds = tuple(range(num_rows)) if is_sampled else None
    kwargs = {"max_new_tokens": 40, "eos_token_id": EOS}
    for mode in ("ssd", "sd"):
        rows = together(target, noisy, prompts, seeds=seeds, settings={"mode": mode}, **kwargs)
        assert_as_alone(rows, target, prompts, seeds=seeds, **kwargs)
    assert len({len(row) - row.count(0) for row in rows}) > 1 or num_rows == 2, "no row ended early"


@pytest.mark.parametrize("backup", ["jit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "none"))])
@pytest.mark.parametrize("is_sampled", [pytest.param(False, marks=pytest.mark.slow), True], ids=["greedy", "coupled"])
def test_whatever_answers_a_miss(target, noisy, backup: str, is_sampled: bool) -> None:
    prompts = [prompt(1 + (5 * row) % 17, seed=row) for row in range(5)]
    seeds = tuple(range(5)) if is_sampled else None
    kwargs = {"max_new_tokens": 60, "eos_token_id": EOS}
    for backend in ("inline", "process"):
        rows = together(target, noisy, prompts, seeds=seeds, settings={"backup": backup, "backend": backend}, **kwargs)
        stats = target.ssd_stats
        answers = {round_.origin for round_ in stats.rounds if round_.miss is not None}
        assert answers <= {"jit": {JIT, NOTHING}, "ngram": {COPIED, NOTHING}, "none": {NOTHING}}[backup]
        assert answers
        assert stats.num_hits
        assert_as_alone(rows, target, prompts, seeds=seeds, **kwargs)


def test_a_row_that_hits_keeps_its_draft_while_others_draft_just_in_time(target, noisy) -> None:
    """The reference engine: one miss redrafted every row, and its hits were lost."""
    prompts = [prompt(3 + row, seed=row) for row in range(6)]
    together(target, noisy, prompts, settings={"backup": "jit", "cache_budget": 8}, max_new_tokens=40)
    by_row = [[each for each in target.ssd_stats.rounds if each.row == row] for row in range(6)]
    # Rows are verified together, so the rounds of one number are one.
    mixed = [rounds for rounds in zip(*by_row, strict=False) if {Origin.CACHE, JIT} <= {each.origin for each in rounds}]
    assert len(mixed) > 3
    kept = [each for rounds in mixed for each in rounds if each.origin is Origin.CACHE]
    assert all(each.miss is None and each.num_draft_tokens for each in kept)


@pytest.mark.parametrize("backend", ["process", "stream"])
def test_beside_an_assistant_that_drafts_for_all_rows(target, noisy, backend: str) -> None:
    prompts = [prompt(3 + row, seed=row) for row in range(5)]
    kwargs = {"max_new_tokens": 60, "eos_token_id": EOS}
    rows = together(target, noisy, prompts, settings={"backend": backend}, **kwargs)
    assert_as_alone(rows, target, prompts, **kwargs)
    assert target.ssd_stats.degraded is None
    assert {round_.row for round_ in target.ssd_stats.rounds} == set(range(5))
    pool.close_worker(noisy)


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_positions_do_not_drift(noisy, attention: str) -> None:
    target = make_target(attn_implementation=attention)
    prompts = [prompt(3), prompt(20, seed=1), prompt(9, seed=2)]
    rows = together(target, noisy, prompts, max_new_tokens=512)
    assert_as_alone(rows, target, prompts, max_new_tokens=512)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("mistral, window of 8", "eager"),
        ("mistral, window of 8", "sdpa"),
        ("gemma2, mixed layers and capped logits", "eager"),  # it knows no other
        ("gemma3, mixed layers", "sdpa"),
    ],
)
def test_windows_hold_in_a_batch(family: str, attention: str, monkeypatch) -> None:
    """Rows with windows share forwards too, and are moved together whenever they came apart."""
    target, assistant = (tiny_zoo.make(family, noise=noise, attn_implementation=attention) for noise in (0.0, 0.05))
    moves = []
    monkeypatch.setattr(batch_decoding, "compact_rows", lambda *args: moves.append(1) or compact_rows(*args))
    prompts = [prompt(length, seed=length) for length in (3, 20, 9, 1)]
    rows = together(target, assistant, prompts, max_new_tokens=60)
    rounds = target.ssd_stats.rounds
    assert_as_alone(rows, target, prompts, max_new_tokens=60)
    assert len(moves) > 5
    assert {round_.num_accepted for round_ in rounds} >= {0, 1, 2}


@pytest.mark.parametrize("family", [None, "mistral, window of 8"], ids=["llama", "windows"])
@pytest.mark.parametrize("zeros", [[(0, 5, 8), (2, 9, 10)], [(0, 11, 14), (1, 13, 14)]], ids=["inside", "on the right"])
def test_masks_with_zeros_elsewhere_than_on_the_left(target, noisy, family, zeros) -> None:
    """Plain generate() counts positions from the mask; rows run one after the other then."""
    models = (target, noisy) if family is None else (tiny_zoo.make(family, noise=noise) for noise in (0.0, 0.05))
    target, assistant = models
    ids = torch.cat([prompt(14, seed=seed) for seed in range(4)])
    mask = torch.ones_like(ids)
    for row, start, end in zeros:
        mask[row, start:end] = 0
    kwargs = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    expected = target.generate(ids, **kwargs)
    found = generate_with_ssd(
        target, inputs=ids, assistant_model=assistant, ssd_config=SSDConfig(backend="inline"), **kwargs
    )
    assert found.tolist() == expected.tolist()


def test_a_row_is_accepted_as_much_as_alone(target, noisy) -> None:
    prompts = [prompt(5, seed=row) for row in range(6)]
    together(target, noisy, prompts, max_new_tokens=200, settings={"mode": "sd"})
    by_row = [[r for r in target.ssd_stats.rounds if r.row == row] for row in range(6)]
    for ids, rounds in zip(prompts, by_row, strict=True):
        config = SSDConfig(backend="inline", mode="sd", num_assistant_tokens=4, draft_tree_size=None)
        generate_with_ssd(
            target, inputs=ids, assistant_model=noisy, ssd_config=config, max_new_tokens=200, do_sample=False
        )
        own, single = (sum(r.num_accepted for r in of) / len(of) for of in (rounds, target.ssd_stats.rounds))
        assert own == pytest.approx(single, rel=0.15)


def test_scores_and_logits_are_each_rows_own(target, noisy) -> None:
    prompts = [prompt(4), prompt(9, seed=1)]
    batch = padded_batch(prompts)
    out = generate_with_ssd(
        target,
        inputs=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        assistant_model=noisy,
        ssd_config=SSDConfig(backend="inline", num_assistant_tokens=4),
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, ids in enumerate(prompts):
        single = target.generate(
            ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        torch.testing.assert_close(
            torch.stack([step[row] for step in out.scores]), torch.cat(single.scores), atol=1e-4, rtol=1e-4
        )


@pytest.mark.slow
def test_rows_are_moved_together_when_holes_have_cost_enough(target, monkeypatch) -> None:
    """And never have more holes than that: memory stays bounded."""
    moves, shares = [], []
    keep = BatchDecoder._keep

    def note(self, num_kept) -> None:
        keep(self, num_kept)
        shares.append(float(self._mask.sum(dim=1).max()) / self._mask.shape[1])

    monkeypatch.setattr(BatchDecoder, "_keep", note)
    monkeypatch.setattr(
        batch_decoding, "compact_rows", lambda *args: moves.append(args[1].shape) or compact_rows(*args)
    )
    prompts = [prompt(4), prompt(4, seed=1), prompt(4, seed=2)]
    rows = together(target, make_noisy(noise=0.1), prompts, max_new_tokens=300)
    assert_as_alone(rows, target, prompts, max_new_tokens=300)
    assert 2 < len(moves) < 60
    assert min(shares) > 0.4
    assert sum(shares) / len(shares) > 0.8


class TestCache:
    def cache(self, num_rows: int, num_slots: int) -> DynamicCache:
        cache = DynamicCache()
        entries = torch.arange(num_rows * num_slots, dtype=torch.float).view(num_rows, 1, num_slots, 1)
        for layer in range(2):
            cache.update(entries + 1000 * layer, -entries, layer)
        return cache

    def test_tokens_move_together_in_order(self) -> None:
        cache, mask = self.cache(2, 5), torch.tensor([[1, 0, 1, 0, 1], [0, 0, 1, 1, 0]])
        assert compact_rows(cache, mask).tolist() == [[1, 1, 1], [0, 1, 1]]
        for layer, base in enumerate((0, 1000)):
            assert cache.layers[layer].keys[0].flatten().tolist() == [base, base + 2, base + 4]
            assert cache.layers[layer].keys[1].flatten().tolist()[1:] == [base + 7, base + 8]
            assert cache.layers[layer].values[0].flatten().tolist() == [0, -2, -4]

    def test_rows_are_selected(self) -> None:
        cache, mask = self.cache(3, 2), torch.tensor([[1, 1], [0, 1], [1, 0]])
        assert select_rows(cache, mask, [2, 0]).tolist() == [[1, 0], [1, 1]]
        assert cache.layers[1].keys.flatten().tolist() == [1004, 1005, 1000, 1001]


class TestHoles:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_attention_does_not_see_them(self, attention: str) -> None:
        """Whatever lies in a hole, the output is the same."""
        target = make_target(attn_implementation=attention)
        prompts = [prompt(4), prompt(9, seed=1)]
        expected = together(target, make_noisy(), prompts, max_new_tokens=60)
        keep = BatchDecoder._keep

        def spoil(self, num_kept) -> None:
            keep(self, num_kept)
            if not self._active:
                return
            holes = self._mask == 0
            with torch.inference_mode():
                for layer in self._cache.layers:
                    layer.keys[holes[:, None].expand(layer.keys.shape[:3])] = 1e4
                    layer.values[holes[:, None].expand(layer.values.shape[:3])] = 1e4

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchDecoder, "_keep", spoil)
            assert together(target, make_noisy(), prompts, max_new_tokens=60) == expected


class TestTogether:
    """Engines that share forwards draft what each drafts alone."""

    @pytest.mark.parametrize("packs", [True, False], ids=["packed", "one by one"])
    def test_as_alone(self, packs: bool) -> None:
        assistant = AssistantModel(make_noisy())
        assert assistant.packs_rows
        assistant.packs_rows = packs
        config = SSDConfig(backend="inline", num_assistant_tokens=4, draft_tree_size=None)
        prompts = [tuple(prompt(3 + 2 * row, seed=row)[0].tolist()) for row in range(4)]

        def engines() -> list[DraftEngine]:
            made = [DraftEngine(assistant, overlaps=False) for _ in prompts]
            for engine, ids in zip(made, prompts, strict=True):
                engine.start(request(config, prompt_ids=ids, takes_trees=False))
            return made

        rng = random.Random(0)
        group, singles = engines(), engines()
        for _ in range(8):
            while any(work_together(assistant, [engine.deepening() for engine in group])):
                pass
            for engine in singles:
                while engine.deepen():
                    pass
            outcomes = []
            for engine in singles:
                node = rng.randint(0, len(engine._sent))
                place = [engine._root, *engine._sent][node]
                likely = [child.token for child in place.children if not child.is_sent]
                sent = {child.token for child in place.sent_children}
                other = next(token for token in range(64) if token not in sent)
                outcomes.append(Outcome(node, rng.choice(likely) if likely and rng.random() < 0.7 else other))
            found = work_together(assistant, [engine.resolving(o) for engine, o in zip(group, outcomes, strict=True)])
            expected = [engine.resolve(outcome) for engine, outcome in zip(singles, outcomes, strict=True)]
            assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert [each.origin for each in found] == [each.origin for each in expected]
