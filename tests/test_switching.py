"""Switches within a call: whatever is switched when, the text is that of plain decoding."""

from __future__ import annotations

import logging as standard_logging
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny_zoo
import torch
from broken_models import RaisesLater, RaisesOnceTold
from plain import assert_equals_plain
from tiny_models import make_noisy, make_target, make_unrelated, padded_batch, prompt
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_ssd import SSDConfig, enable_ssd, generation
from hf_ssd.drafting import engine
from hf_ssd.drafting.pace import Pace
from hf_ssd.generation import generate_with_ssd, make_custom_generate
from hf_ssd.matrix.encoders import ENCODER_FAMILIES
from hf_ssd.monitoring import EventKind, Monitor
from hf_ssd.planning import CallPolicy, PlanMemory
from hf_ssd.protocol import SpeculatorError
from hf_ssd.runtime import pool, staff
from hf_ssd.runtime.inline import InlineSpeculator
from hf_ssd.trace import chrome_trace
from hf_ssd.types import Origin, Plan, RoundStats, Switch

AUTO = SSDConfig(mode="auto", backend="inline", num_assistant_tokens=4)
PROCESS = SSDConfig(mode="auto")
PLANS = (Plan("ssd"), Plan("sd"), Plan("ar"), Plan("ssd", max_draft_tokens=2), Plan("ssd", cache_budget=3))


class RandomPolicy(CallPolicy):
    """Goes on in any way after any round."""

    plans: Sequence[Plan] = PLANS
    seed = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(self.seed)

    def begin_row(self) -> None:
        self.plan = self._random.choice(self.plans)

    def after_round(self, stats, duration_ms, likelihood=None) -> list[Switch]:
        before = self.plan
        if self._random.random() < 0.4:
            self.plan = self._random.choice(self.plans)
        return [] if self.plan == before else [Switch(before, self.plan, "by chance")]


@pytest.fixture(params=range(2))
def by_chance(request, monkeypatch) -> None:
    monkeypatch.setattr(staff, "CallPolicy", RandomPolicy)
    monkeypatch.setattr(RandomPolicy, "seed", request.param)


def assert_drafted(rounds: Sequence[RoundStats]) -> None:
    """Drafts were accepted, some of them in speculations that had been prepared; and there were rounds without."""
    assert {"ssd", "sd", "ar"} <= {r.mode for r in rounds}
    assert sum(r.num_accepted for r in rounds) > 0
    assert any(r.origin is Origin.CACHE and r.num_accepted for r in rounds)
    assert all(r.num_draft_tokens == 0 for r in rounds if r.mode == "ar")


@pytest.mark.usefixtures("by_chance")
class TestByChance:
    @pytest.mark.parametrize("config", [AUTO, SSDConfig(mode="auto", backend="inline", draft_tree_size=None)])
    def test_greedy(self, target, noisy, config) -> None:
        stats = assert_equals_plain(target, noisy, prompt(7), config, max_new_tokens=90)
        assert_drafted(stats.rounds)
        assert stats.num_switches > 7

    def test_coupled(self, target, noisy) -> None:
        settings = {"do_sample": True, "temperature": 1.2, "top_p": 0.95, "max_new_tokens": 90}
        texts = []
        for config in (AUTO, SSDConfig(mode="ar")):
            config = SSDConfig.from_dict({**config.to_dict(), "seed": 11})
            texts.append(
                generate_with_ssd(target, inputs=prompt(7), assistant_model=noisy, ssd_config=config, **settings)
            )
            if config.mode == "auto":
                assert_drafted(target.ssd_stats.rounds)
        assert texts[0].tolist() == texts[1].tolist()

    def test_processors_that_read_the_text(self, target, noisy) -> None:
        settings = {"max_new_tokens": 80, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 60}
        stats = assert_equals_plain(target, noisy, prompt(7), AUTO, eos_token_id=5, **settings)
        assert stats.num_switches > 5

    def test_rows_together(self, target, noisy) -> None:
        batch = padded_batch([prompt(3 + row, seed=row) for row in range(4)])
        settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": [5, 9]}
        plain = target.generate(**batch, **settings)
        ids = generate_with_ssd(target, assistant_model=noisy, ssd_config=AUTO, **batch, **settings)
        assert ids.tolist() == plain.tolist()
        assert sum(r.num_accepted for r in target.ssd_stats.rounds) > 0
        assert target.ssd_stats.num_switches > 1

    def test_a_sliding_window(self) -> None:
        target, assistant = (tiny_zoo.make("mistral, window of 8", noise=noise) for noise in (0.0, 0.02))
        stats = assert_equals_plain(target, assistant, prompt(7), AUTO, max_new_tokens=70)
        assert stats.acceptance > 0
        assert stats.num_switches > 5

    def test_an_encoder(self) -> None:
        family = next(each for each in ENCODER_FAMILIES if each.model_type == "mbart")
        stats = assert_equals_plain(family.make(), family.make_assistant(), prompt(9), AUTO, max_new_tokens=40)
        assert stats.num_switches > 3

    def test_rows_one_after_the_other_take_one_engine(self, monkeypatch) -> None:
        made = []
        monkeypatch.setattr(InlineSpeculator, "another", lambda self: made.append(self) or self)
        family = next(each for each in ENCODER_FAMILIES if each.model_type == "mbart")
        batch = {"inputs": torch.cat([prompt(9, seed=row) for row in range(3)])}
        target, kwargs = family.make(), {"max_new_tokens": 30, "do_sample": False}
        plain = target.generate(**batch, **kwargs)
        ids = generate_with_ssd(target, assistant_model=family.make_assistant(), ssd_config=AUTO, **batch, **kwargs)
        assert ids.equal(plain)
        assert target.ssd_stats.acceptance > 0
        assert not made

    def test_several_assistants(self, target, monkeypatch) -> None:
        plans = [Plan("ssd", 0), Plan("ssd", 1), Plan("sd", 1), Plan("ar")]
        monkeypatch.setattr(RandomPolicy, "plans", plans)
        assistants = [make_noisy(), make_unrelated()]
        stats = assert_equals_plain(target, assistants, prompt(7), AUTO, max_new_tokens=90)
        assert {switch.after for switch in stats.switches} == set(plans)
        assert any(r.origin is Origin.CACHE and r.num_accepted for r in stats.rounds)


@pytest.mark.parametrize("backend", ["process", "stream"])
def test_beside_the_target(target, shared_noisy, monkeypatch, backend) -> None:
    monkeypatch.setattr(staff, "CallPolicy", RandomPolicy)
    config = SSDConfig(mode="auto", backend=backend)
    stats = assert_equals_plain(target, shared_noisy, prompt(7), config, max_new_tokens=100)
    assert {"ssd", "sd", "ar"} <= {r.mode for r in stats.rounds}
    assert stats.acceptance > 0


@pytest.mark.slow
def test_tokens_follow_the_targets_distribution_under_the_token_rule(target, noisy, monkeypatch) -> None:
    """A round after a switch verifies nothing, and draws from the target: frequencies are those of plain sampling."""
    monkeypatch.setattr(staff, "CallPolicy", RandomPolicy)
    settings = {"do_sample": True, "top_k": 4, "max_new_tokens": 4, "num_return_sequences": 400}
    counts = []
    for config in (SSDConfig(mode="auto", backend="inline", verification="token", seed=3), None):
        torch.manual_seed(0)
        if config is None:
            ids = target.generate(prompt(5), **settings)
        else:
            ids = generate_with_ssd(target, inputs=prompt(5), assistant_model=noisy, ssd_config=config, **settings)
        counts.append(torch.bincount(ids[:, -3:].flatten(), minlength=64) / ids[:, -3:].numel())
    assert (counts[0] - counts[1]).abs().max() < 0.06


class ScriptedPolicy(CallPolicy):
    """Has a plan for each round, and keeps the last one."""

    plans: Sequence[Plan] = ()

    def begin_row(self) -> None:
        self._left = list(self.plans)
        self.plan = self._left.pop(0)

    def after_round(self, stats, duration_ms, likelihood=None) -> list[Switch]:
        before = self.plan
        self.plan = self._left.pop(0) if self._left else before
        return [] if self.plan == before else [Switch(before, self.plan, "by the script")]


class TwoTokens(LogitsProcessor):
    """Leaves tokens 1 and 2, alike."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = torch.full_like(scores, float("-inf"))
        scores[:, 1:3] = 0.0
        return scores


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_after_a_pause_are_drawn_anew(target, noisy, monkeypatch, rule) -> None:
    """The first draft token after a start, and the first after the next: all are accepted, so none may tell another."""
    monkeypatch.setattr(staff, "CallPolicy", ScriptedPolicy)
    monkeypatch.setattr(ScriptedPolicy, "plans", [Plan("sd"), Plan("ar"), Plan("sd")])
    num_rows = 100
    config = SSDConfig(mode="auto", backend="inline", verification=rule, seed=3, num_assistant_tokens=1)
    ids = generate_with_ssd(
        target,
        inputs=prompt(5),
        assistant_model=noisy,
        ssd_config=config,
        do_sample=True,
        max_new_tokens=8,
        num_return_sequences=num_rows,
        logits_processor=LogitsProcessorList([TwoTokens()]),
    )
    rounds = [r for r in target.ssd_stats.rounds if r.row == 0]
    assert [(r.num_accepted, r.num_emitted) for r in rounds[:4]] == [(1, 2), (0, 1), (0, 1), (1, 2)]
    first, second = ids[:, 6], ids[:, 10]
    assert abs(int((first == second).sum()) - num_rows / 2) < 20  # four standard deviations


class TestLimits:
    def test_a_token_budget(self, target, noisy) -> None:
        config = SSDConfig(backend="inline", num_assistant_tokens=4, token_budget=20)
        stats = assert_equals_plain(target, noisy, prompt(7), config, max_new_tokens=70)
        (switch,) = stats.switches
        assert switch.after == Plan("ar")
        assert 20 <= switch.num_tokens <= 26
        rounds = [r.mode for r in stats.rounds]
        assert rounds == sorted(rounds, reverse=True)  # "ssd", then "ar"
        assert "`token_budget`" in switch.reason

    def test_a_token_budget_is_each_rows_own(self, target, noisy) -> None:
        config = SSDConfig(backend="inline", token_budget=10)
        batch = padded_batch([prompt(4), prompt(6)])
        plain = target.generate(**batch, max_new_tokens=40, do_sample=False)
        kwargs = {"max_new_tokens": 40, "do_sample": False, "assistant_model": noisy, "ssd_config": config}
        assert generate_with_ssd(target, **batch, **kwargs).tolist() == plain.tolist()
        assert target.ssd_stats.tokens_by_mode["ar"] > 40

    def test_a_latency_target_that_cannot_be_met_stops_drafting_or_is_given_up(self, target, noisy) -> None:
        config = SSDConfig(backend="inline", num_assistant_tokens=4, sla_ms_per_token=1e-6)
        stats = assert_equals_plain(target, noisy, prompt(7), config, max_new_tokens=160)
        assert stats.switches[0].after == Plan("ssd", max_draft_tokens=2)
        assert "are allowed" in stats.switches[0].reason
        before, limited, num_tokens = [], [], 1
        until = [switch.num_tokens for switch in (*stats.switches, stats)][1]
        for r in stats.rounds:
            if num_tokens < stats.switches[0].num_tokens:
                before.append(r.depth)
            elif num_tokens < until:
                limited.append(r.depth)
            num_tokens += r.num_emitted
        assert max(before) > 2
        assert len(limited) > 10
        assert max(limited) == 2

    def test_an_assistant_that_is_lost_once_the_budget_is_spent_changes_nothing(self) -> None:
        policy = CallPolicy(SSDConfig(token_budget=10), num_assistants=2)
        stats = RoundStats(0, 0, 10, Origin.NONE)
        assert [switch.after for switch in policy.after_round([stats], 1.0)] == [Plan("ar")]
        assert policy.lose(0) == []
        assert policy.plan == Plan("ar")

    def test_a_latency_target_that_is_met_changes_nothing(self, target, noisy) -> None:
        config = SSDConfig(backend="inline", num_assistant_tokens=4, sla_ms_per_token=1e6)
        assert assert_equals_plain(target, noisy, prompt(7), config, max_new_tokens=60).switches == ()

    def test_little_memory_prepares_only_the_likeliest(self, target, noisy, monkeypatch) -> None:
        # Not by the clock, which decides otherwise on a busy machine.
        monkeypatch.setattr(Pace, "rates", lambda self, acceptance: None)
        monkeypatch.setattr(engine, "MIN_UNMEASURED_CHANCE", 0.02)
        hit_rates = []
        bytes_of_a_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
        for budget in (None, 8 * bytes_of_a_token, 1):
            config = SSDConfig(backend="inline", num_assistant_tokens=4, memory_budget=budget)
            stats = assert_equals_plain(target, noisy, prompt(7), config, max_new_tokens=100)
            hit_rates.append(stats.hit_rate)
        assert hit_rates[0] > hit_rates[1] > hit_rates[2], hit_rates
        assert hit_rates[2] < 0.2  # what was drafted just in time and not sent may still be the outcome

    def test_a_threshold_ends_drafts_early_and_keeps_the_token(self, target, noisy) -> None:
        depths = []
        for threshold in (0.0, 0.5, 0.9):
            config = SSDConfig(mode="sd", backend="inline", num_assistant_tokens=8, draft_threshold=threshold)
            stats = assert_equals_plain(target, noisy, prompt(7), config, max_new_tokens=100)
            depths.append(sum(r.depth for r in stats.rounds) / stats.num_rounds)
            # What falls under it is the last token, which is sent.
            assert min(r.depth for r in stats.rounds[:-2]) >= 1
        assert depths[0] > depths[1] > depths[2]


class TestAssistants:
    def test_the_better_one_serves_and_is_remembered(self, target, twin, unrelated) -> None:
        """The twin is always right, so that it needs a fifth of the rounds of the other."""
        enable_ssd(target, [unrelated, twin], SSDConfig(backend="inline", num_assistant_tokens=4))
        expected = make_target().generate(prompt(7), max_new_tokens=200, do_sample=False)
        assert target.generate(prompt(7), max_new_tokens=200, do_sample=False).equal(expected)
        assert Switch(Plan("ssd", 0), Plan("ssd", 1), "not measured yet", True) in [
            replace(switch, num_tokens=0, time_ns=0) for switch in target.ssd_stats.switches
        ]
        assert [switch.after for switch in target.ssd_stats.switches if not switch.is_trial] == [Plan("ssd", 1)]
        assert target.generate(prompt(7), max_new_tokens=20, do_sample=False).equal(expected[:, :27])
        assert target.ssd_stats.switches == ()
        assert target.ssd_stats.acceptance == 1.0

    def test_one_that_breaks_leaves_the_others(self, target, noisy) -> None:
        broken = RaisesLater(noisy.config).eval()
        RaisesLater.num_forwards_left = 40
        kwargs = {"max_new_tokens": 120, "do_sample": False}
        plain = target.generate(prompt(7), **kwargs)
        config = SSDConfig(backend="inline", num_assistant_tokens=4)
        ids = generate_with_ssd(target, inputs=prompt(7), assistant_model=[broken, noisy], ssd_config=config, **kwargs)
        assert ids.equal(plain)
        stats = target.ssd_stats
        assert "the assistant broke" in stats.degraded
        (switch,) = [each for each in stats.switches if each.reason == "its assistant is lost"]
        assert switch.after == Plan("ssd", 1)
        after = [r for r in stats.rounds[-20:] if r.origin is Origin.CACHE]
        assert sum(r.num_accepted for r in after) > 0

    def test_one_that_cannot_be_had_is_left_out_once_there_are_tokens(self, target, noisy, monkeypatch) -> None:
        wrong = make_unrelated()

        def speculator_for(assistant, *args, **kwargs):
            if assistant is wrong:
                raise MemoryError("no room for the assistant")
            return real(assistant, *args, **kwargs)

        real = staff.speculator_for
        monkeypatch.setattr(staff, "speculator_for", speculator_for)
        plain = target.generate(prompt(7), max_new_tokens=120, do_sample=False)
        kwargs = {"max_new_tokens": 120, "do_sample": False, "ssd_config": SSDConfig(backend="inline")}
        ids = generate_with_ssd(target, inputs=prompt(7), assistant_model=[noisy, wrong], **kwargs)
        assert ids.equal(plain)
        assert "no room for the assistant" in target.ssd_stats.degraded
        assert target.ssd_stats.rounds[-1].mode == "ssd"
        with pytest.raises(MemoryError, match="no room for the assistant"):
            generate_with_ssd(target, inputs=prompt(7), assistant_model=[wrong, noisy], **kwargs)

    def test_one_that_is_remembered_and_cannot_be_had_leaves_the_others(self, target, twin, noisy, monkeypatch) -> None:
        config = SSDConfig(backend="inline", num_assistant_tokens=4)
        memory = PlanMemory(home=Plan("ssd", 1))
        monkeypatch.setattr(generation, "_memory_of", lambda *args: memory)
        kwargs = {"max_new_tokens": 60, "do_sample": False}
        plain = target.generate(prompt(7), **kwargs)

        def speculator_for(assistant, *args, **kwargs):
            if assistant is twin:
                raise MemoryError("no room for the assistant")
            return real(assistant, *args, **kwargs)

        real = staff.speculator_for
        monkeypatch.setattr(staff, "speculator_for", speculator_for)
        ids = generate_with_ssd(target, inputs=prompt(7), assistant_model=[noisy, twin], ssd_config=config, **kwargs)
        assert ids.equal(plain)
        stats = target.ssd_stats
        assert "no room for the assistant" in stats.degraded
        assert [switch.after for switch in stats.switches] == [Plan("ssd", 0)]
        assert any(r.origin is Origin.CACHE and r.num_accepted for r in stats.rounds)

    def test_one_that_cannot_be_stopped_is_the_one_that_is_lost(self, target, noisy, twin, monkeypatch) -> None:
        lost = []

        def stop(self) -> None:
            if self._model is noisy:
                raise SpeculatorError("it cannot be stopped")

        monkeypatch.setattr(staff, "CallPolicy", ScriptedPolicy)
        monkeypatch.setattr(ScriptedPolicy, "plans", [*[Plan("ssd", 0)] * 3, Plan("ssd", 1)])
        monkeypatch.setattr(ScriptedPolicy, "lose", lambda self, assistant: lost.append(assistant) or [])
        monkeypatch.setattr(InlineSpeculator, "stop", stop)
        plain = target.generate(prompt(7), max_new_tokens=60, do_sample=False)
        kwargs = {"max_new_tokens": 60, "do_sample": False, "ssd_config": AUTO}
        assert generate_with_ssd(target, inputs=prompt(7), assistant_model=[noisy, twin], **kwargs).equal(plain)
        assert lost == [0]
        assert sum(r.num_accepted for r in target.ssd_stats.rounds[-3:]) > 0

    def test_calls_that_lose_their_assistants_do_not_wait_for_each_others(self, target, monkeypatch) -> None:
        """Each has what the other would go on with, as both break."""
        assistants = [RaisesOnceTold(target.config).eval() for _ in range(2)]
        both_draft = threading.Barrier(2, action=lambda: setattr(RaisesOnceTold, "is_told", True))
        monkeypatch.setattr(RaisesOnceTold, "is_told", False)
        expected = target.generate(prompt(7), max_new_tokens=40, do_sample=False)
        found = []

        class Meet(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
                if input_ids.shape[1] == 12:
                    both_draft.wait(timeout=20)
                return torch.zeros(len(input_ids), dtype=torch.bool)

        def call(assistants) -> None:
            output = generate_with_ssd(
                target,
                inputs=prompt(7),
                assistant_model=assistants,
                ssd_config=SSDConfig(backend="stream"),
                max_new_tokens=40,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Meet()]),
                return_dict_in_generate=True,
            )
            found.append(output)

        orders = (assistants, assistants[::-1])
        threads = [threading.Thread(target=call, args=(order,), daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert len(found) == 2
        assert all(output.sequences.equal(expected) for output in found)
        assert all("the assistant broke" in output.ssd_stats.degraded for output in found)
        assert not any(map(pool.is_busy, assistants))

    def test_one_that_is_lost_is_free_for_other_calls_at_once(self, target, noisy, monkeypatch) -> None:
        broken = RaisesOnceTold(target.config).eval()
        monkeypatch.setattr(RaisesOnceTold, "is_told", False)
        busy = []

        class Look(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
                RaisesOnceTold.is_told = input_ids.shape[1] >= 20
                busy.append((pool.is_busy(broken), pool.is_busy(noisy)))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        kwargs = {"max_new_tokens": 60, "do_sample": False}
        plain = target.generate(prompt(7), **kwargs)
        ids = generate_with_ssd(
            target,
            inputs=prompt(7),
            assistant_model=[broken, noisy],
            ssd_config=SSDConfig(backend="stream"),
            stopping_criteria=StoppingCriteriaList([Look()]),
            **kwargs,
        )
        assert ids.equal(plain)
        assert busy[0] == (True, False)
        assert busy[-1] == (False, True)
        with pool.start_worker(noisy, target, SSDConfig(backend="stream")).reserve() as has_it:
            assert has_it
            worker = pool._THREADS[noisy]
            assert pool.is_busy(noisy)
            monkeypatch.setattr(worker, "_owner", worker._owner + 1)  # as in a fork
            assert not pool.is_busy(noisy)

    def test_texts_are_the_same_whichever_serves(self, target, noisy, unrelated) -> None:
        settings = {"do_sample": True, "max_new_tokens": 60, "inputs": prompt(7)}
        config = SSDConfig(backend="inline", seed=5)
        texts = [
            generate_with_ssd(target, assistant_model=each, ssd_config=config, **settings).tolist()
            for each in (noisy, unrelated, [noisy, unrelated], [unrelated, noisy])
        ]
        assert all(text == texts[0] for text in texts)

    def test_a_call_that_does_without_them_is_plain(self, target, noisy, unrelated) -> None:
        kwargs = {"max_new_tokens": 20, "num_beams": 2, "do_sample": False}
        plain = target.generate(prompt(7), **kwargs)
        enable_ssd(target, noisy, AUTO)
        assert target.generate(prompt(7), assistant_model=[unrelated, noisy], **kwargs).equal(plain)

    def test_custom_generate_remembers_of_each_target(self, target, noisy) -> None:
        generate = make_custom_generate(noisy, AUTO)
        for each in (target, make_target()):
            each.generate(prompt(7), max_new_tokens=30, do_sample=False, custom_generate=generate)
            (memory,) = generation._MEMORIES._kinds[each].values()
            assert memory.home is not None
        fixed = make_custom_generate(noisy, {"backend": "inline"})
        other = make_target()
        other.generate(prompt(7), max_new_tokens=30, do_sample=False, custom_generate=fixed)
        assert other not in generation._MEMORIES._kinds

    def test_custom_generate_takes_several(self, target, noisy, unrelated) -> None:
        plain = target.generate(prompt(7), max_new_tokens=30, do_sample=False)
        generate = make_custom_generate([unrelated, noisy], {"backend": "inline"})
        assert target.generate(prompt(7), max_new_tokens=30, do_sample=False, custom_generate=generate).equal(plain)

    def test_what_is_refused(self, target, noisy, unrelated) -> None:
        with pytest.raises(ValueError, match="`assistant_model` must hold at least one model"):
            enable_ssd(target, [])
        with pytest.raises(ValueError, match="`assistant_tokenizer` must be a list of 2"):
            enable_ssd(target, [noisy, unrelated], tokenizer=object(), assistant_tokenizer=object())


class TestWhatIsTold:
    def test_monitor_log_and_trace(self, target, noisy, monkeypatch, caplog) -> None:
        monkeypatch.setattr(staff, "CallPolicy", RandomPolicy)
        events = []
        monitor = Monitor(sinks=[events.append])
        config = SSDConfig(mode="auto", backend="inline", trace=True)
        enable_ssd(target, noisy, config, monitor=monitor)
        logger = standard_logging.getLogger("hf_ssd.runtime.conductor")
        with caplog.at_level(standard_logging.INFO, logger.name):
            target.generate(prompt(7), max_new_tokens=60, do_sample=False)
        stats = target.ssd_stats
        switches = [event for event in events if event.kind is EventKind.SWITCH]
        assert len(switches) == stats.num_switches == monitor.num_events[EventKind.SWITCH]
        assert switches[0].figures == {
            "before": str(stats.switches[0].before),
            "after": str(stats.switches[0].after),
            "num_tokens": stats.switches[0].num_tokens,
            "is_trial": False,
        }
        assert "by chance" in switches[0].reason
        own = {record.getMessage() for record in caplog.records if record.name == logger.name}
        assert own == {f"{each.num_tokens} tokens, {each}." for each in stats.switches}
        spans = [event for event in chrome_trace(stats)["traceEvents"] if event["name"] == "switch"]
        assert [span["args"]["after"] for span in spans] == [str(switch.after) for switch in stats.switches]
        assert monitor.num_calls == {"auto": 1}

    def test_figures(self, target, noisy, monkeypatch) -> None:
        monkeypatch.setattr(staff, "CallPolicy", RandomPolicy)
        stats = assert_equals_plain(target, noisy, prompt(7), AUTO, max_new_tokens=100)
        figures = stats.to_dict()
        assert sum(figures["tokens_by_mode"].values()) == 99
        assert figures["num_switches"] == len(stats.switches)
        assert "tokens by mode: " in str(stats)
        ahead = [r for r in stats.rounds if r.mode == "ssd"]
        looked_up = [r for r in ahead if r.miss is not None or r.origin is Origin.CACHE]
        assert stats.hit_rate == sum(r.origin is Origin.CACHE for r in ahead) / len(looked_up)
        assert stats.num_hits + stats.num_misses == len(looked_up)
        assert any(r.num_accepted for r in stats.rounds if r.mode == "sd")


def test_the_assistant_rests_in_plain_rounds_and_the_target_has_its_cores(target, shared_noisy, monkeypatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(staff, "CallPolicy", RandomPolicy)
    seen = []

    def look(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        seen.append((self._policy.plan.mode, torch.get_num_threads()))
        return result

    real = staff.PolicyConductor.after_round
    monkeypatch.setattr(staff.PolicyConductor, "after_round", look)
    try:
        assert_equals_plain(target, shared_noisy, prompt(7), PROCESS, max_new_tokens=200)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {("ssd", 1), ("sd", 1), ("ar", 2)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sla_ms_per_token": 0}, "`sla_ms_per_token` must be a positive number of milliseconds, but got 0"),
        ({"sla_ms_per_token": float("nan")}, "must be a positive number of milliseconds, but got nan"),
        ({"sla_ms_per_token": float("inf")}, "must be a positive number of milliseconds, but got inf"),
        ({"token_budget": 0}, "`token_budget` must be at least 1, but got 0"),
        ({"memory_budget": -1}, "`memory_budget` must be at least 1, but got -1"),
        ({"draft_threshold": 1.0}, "`draft_threshold` must be at least 0 and below 1, but got 1.0"),
        ({"draft_threshold": -0.1}, "`draft_threshold` must be at least 0 and below 1, but got -0.1"),
    ],
)
def test_nonsense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SSDConfig(**settings)


@pytest.mark.parametrize("name", ["sla_ms_per_token", "token_budget", "memory_budget", "draft_threshold"])
def test_words_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be a (whole )?number, but got 'few'"):
        SSDConfig(**{name: "few"})
