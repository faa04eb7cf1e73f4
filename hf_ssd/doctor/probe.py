"""A short measurement: the built-in prompts through plain generation, SD and SSD, taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..bench import compare, results
from ..bench.arms import Arm, Runner, build_arms
from ..bench.encoding import encode
from ..bench.prompts import KINDS, select_prompts
from ..bench.rounds import summarise_rounds
from ..bench.schedule import Progress, run_schedule
from ..bench.settings import AR_ALL_CORES, SD, SSD
from ..config import SSDConfig
from ..pairs import Pair
from ..runtime.placement import available_cores, split_threads


@dataclass(frozen=True)
class Probe:
    """What the probe measured. Speeds are in tokens per second after the first token, times means per round.

    Args:
        num_prompts: Texts that each way generated.
        max_new_tokens: Most tokens of each.
        ar_tokens_per_s: Plain `generate()`, on all cores.
        sd_tokens_per_s: Mode `"sd"`.
        ssd_tokens_per_s: Mode `"ssd"`.
        speed_up: SSD's speed over that of plain generation: what to expect.
        perfect_speed_up: The same if every round were a hit and nobody waited; `None` if none was a hit.
        tokens_per_round: Tokens that a target forward gave.
        acceptance: Accepted share of the draft tokens.
        hit_rate: Share of outcomes that were prepared for.
        verify_ms: The target's forward.
        wait_ms: How long the target waited for the assistant.
        draft_step_ms: A step of the assistant, in which all branches grow.
        num_identical: Texts of SSD that are those of plain generation.
        assistant_device: Where the assistant ran.
        degraded: Why it went on without the assistant, if it did.
    """

    num_prompts: int
    max_new_tokens: int
    ar_tokens_per_s: float
    sd_tokens_per_s: float
    ssd_tokens_per_s: float
    speed_up: float
    perfect_speed_up: float | None
    tokens_per_round: float | None
    acceptance: float | None
    hit_rate: float | None
    verify_ms: float | None
    wait_ms: float | None
    draft_step_ms: float | None
    num_identical: int
    assistant_device: str | None
    degraded: str | None


def probe_pair(pair: Pair, max_new_tokens: int, report: Progress) -> Probe:
    """Measures a pair on one built-in prompt of each kind."""
    arms = _arms((AR_ALL_CORES, SD, SSD))
    prompts = select_prompts(KINDS, len(KINDS))
    inputs = [encode(pair.tokenizer, prompt) for prompt in prompts]
    with Runner(pair.target, pair.assistant, compare.generation_kwargs(pair, {"do_sample": False})) as runner:
        calls = run_schedule(
            runner, list(arms.values()), inputs, repeats=1, max_new_tokens=max_new_tokens, seed=0, report=report
        )
    speeds = {name: results.decode_tokens_per_s(calls[arm]) or 0.0 for name, arm in arms.items()}
    stats = [call.stats for call in calls[arms[SSD]].values() if call.stats is not None]
    figures = summarise_rounds(stats)
    base = speeds[AR_ALL_CORES]
    differences = results.find_differences(calls[arms[SSD]], calls[arms[AR_ALL_CORES]])
    return Probe(
        num_prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        ar_tokens_per_s=base,
        sd_tokens_per_s=speeds[SD],
        ssd_tokens_per_s=speeds[SSD],
        speed_up=speeds[SSD] / base if base else 0.0,
        perfect_speed_up=figures.perfect.tokens_per_s / base if figures.perfect and base else None,
        tokens_per_round=figures.tokens_per_round,
        acceptance=figures.acceptance,
        hit_rate=figures.hit_rate,
        verify_ms=figures.verify_ms,
        wait_ms=figures.wait_ms,
        draft_step_ms=figures.draft_step_ms,
        num_identical=len(prompts) - len(differences),
        assistant_device=next((each.assistant_device for each in stats if each.assistant_device), None),
        degraded=next((each.degraded for each in stats if each.degraded), None),
    )


def time_target(target: PreTrainedModel, tokenizer: Any, max_new_tokens: int, report: Progress) -> float | None:
    """Tokens per second of the target alone, on all cores, after the first token."""
    pair = Pair(target, target, tokenizer)
    arm = _arms((AR_ALL_CORES,))[AR_ALL_CORES]
    inputs = [encode(tokenizer, prompt) for prompt in select_prompts(KINDS, 1)]
    runner = Runner(*pair[:2], compare.generation_kwargs(pair, {"do_sample": False}))
    calls = run_schedule(runner, [arm], inputs, repeats=1, max_new_tokens=max_new_tokens, seed=0, report=report)
    return results.decode_tokens_per_s(calls[arm])


def _arms(names: Sequence[str]) -> dict[str, Arm]:
    cores = available_cores()
    return {arm.name: arm for arm in build_arms(names, SSDConfig(), *split_threads(None, None, cores), cores)}
