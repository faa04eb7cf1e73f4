from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hf_ssd.bench.arms import Arm, Call, Method
from hf_ssd.bench.prompts import KINDS, Prompt, select_prompts
from hf_ssd.bench.report import explain_identity, explain_speed, print_report
from hf_ssd.bench.results import (
    Comparison,
    Difference,
    compare_arms,
    decode_tokens_per_s,
    fastest_variants,
    find_differences,
    summarise_arm,
    summarise_prompts,
    tokens_per_s,
)
from hf_ssd.config import SSDConfig
from hf_ssd.metrics import SSDStats
from hf_ssd.types import Miss, Origin, RoundStats


def call(
    num_tokens: int, seconds: float, first: float = 0.5, num_first: int = 1, emissions: int | None = None, **rest
) -> Call:
    return Call(tuple(range(num_tokens)), seconds, first, num_first, emissions or num_tokens, **rest)


CALLS = {
    (0, 0): call(10, 2.0),
    (0, 1): call(20, 3.0),
    (1, 0): call(10, 1.0),
    (1, 1): call(20, 2.0),
    (2, 0): call(10, 9.0),
}


def test_speed_is_total_tokens_over_total_time_and_the_median_over_repeats() -> None:
    assert tokens_per_s(CALLS) == 30 / 5  # the others: 30 / 3 and 10 / 9
    assert decode_tokens_per_s(CALLS) == 28 / 4


def test_tokens_that_came_with_the_first_do_not_count_as_decoded() -> None:
    assert decode_tokens_per_s({(0, 0): call(10, 2.5, first=0.5, num_first=4)}) == 3.0
    assert decode_tokens_per_s({(0, 0): call(1, 0.5)}) is None


def test_the_fastest_variant_counts_and_all_are_stated() -> None:
    slow, fast = (Arm("hf_assisted", Method.ASSISTED, 1, num_assistant_tokens=number) for number in (None, 3))
    calls = {slow: {(0, 0): call(10, 2.0)}, fast: {(0, 0): call(10, 1.0, num_first=4, emissions=4)}}
    assert fastest_variants(calls) == {"hf_assisted": fast}
    result = summarise_arm(fast, calls[fast], {"defaults": 5.0, "K=3": 10.0})
    assert result.settings["variant"] == "K=3"
    assert result.settings["tried_tokens_per_s"] == {"defaults": 5.0, "K=3": 10.0}
    assert result.tokens_per_round == 2  # 6 tokens in the 3 forwards after the first


def test_figures_of_ssd_come_from_the_rounds_of_all_calls() -> None:
    hit = RoundStats(4, 4, 5, Origin.CACHE, depth=4, verify_ms=10.0, wait_ms=0.0)
    miss = RoundStats(2, 0, 1, Origin.JUST_IN_TIME, Miss.TOKEN, depth=2, verify_ms=20.0, wait_ms=6.0)
    stats = [SSDStats("ssd", (hit,)), SSDStats("ssd", (hit, miss), degraded="the worker died")]
    arm = Arm("ssd", Method.OURS, 3, 1, config=SSDConfig())
    result = summarise_arm(arm, {(0, i): call(10, 1.0, stats=s) for i, s in enumerate(stats)}, {})
    assert result.tokens_per_round == pytest.approx(11 / 3)
    assert result.hit_rate == pytest.approx(2 / 3)
    assert result.wait_ms == 2.0
    assert result.threads == {"target": 3, "assistant": 1, "total": 4}
    assert result.degraded == "the worker died"


def test_differences_are_found_at_the_first_token_and_at_an_early_end() -> None:
    reference = {(0, i): Call((1, 2, 3, 4), 1.0, 0.1, 1, 4) for i in range(4)}
    texts = {
        (0, 0): (1, 2, 3, 4),
        (1, 0): (1, 2, 3, 4),
        (0, 1): (1, 9, 3, 4),
        (0, 2): (1, 2),
        (0, 3): (1, 2, 3, 4),
        (1, 3): (7,),
    }
    calls = {key: Call(tokens, 1.0, 0.1, 1, 4) for key, tokens in texts.items()}
    assert find_differences(calls, reference) == (Difference(1, 1), Difference(2, 2), Difference(3, 0))


def comparison(speeds: dict[str, float], dtype: str = "bfloat16", gaps: tuple[float, ...] = ()) -> Comparison:
    config = SSDConfig()
    arms = {
        name: summarise_arm(
            Arm(name, Method.OURS, 1, config=config) if name in ("sd", "ssd") else Arm(name, Method.PLAIN, 1),
            {(0, 0): call(10, 10 / s, first=0.1)},
            {},
        )
        for name, s in speeds.items()
    }
    if "ssd" in arms:
        arms["ssd"] = replace(
            arms["ssd"],
            identical_to_ar=(4 - len(gaps), 4),
            first_differences=tuple(Difference(i, 3, gap) for i, gap in enumerate(gaps)),
        )
    return Comparison({}, dtype, {"do_sample": False}, {}, compare_arms(arms), ())


def test_the_report_is_plain_about_winning_and_losing() -> None:
    speeds = {"ar": 10.0, "ar_all_cores": 20.0, "hf_assisted": 10.0, "hf_assisted_all_cores": 15.0, "ssd": 15.0}
    against_hf, against_ar, advice = explain_speed(comparison(speeds))
    assert "1.50x (faster) when that gets the target's cores, 1.00x (equal) when it gets all cores" in against_hf
    assert "1.50x (faster) when that gets the target's cores, 0.75x (slower) when it gets all cores" in against_ar
    assert "plain transformers can be faster" in advice
    assert explain_speed(comparison({"ar": 10.0})) == []
    assert len(explain_speed(comparison({"ar": 10.0, "ssd": 15.0}))) == 1


@pytest.mark.parametrize(
    ("dtype", "gaps", "words"),
    [
        ("bfloat16", (), "SSD 4 of 4"),
        ("bfloat16", (0.0, 0.125), "near-ties"),
        ("bfloat16", (0.125, 3.0), "Please report it"),
        ("float32", (0.5,), "please report it"),
        ("float32", (1e-6,), "near-ties"),
    ],
)
def test_the_report_explains_differing_texts(dtype: str, gaps: tuple[float, ...], words: str) -> None:
    assert words in " ".join(explain_identity(comparison({"ar": 1.0, "ssd": 1.0}, dtype, gaps)))


def test_prompt_speeds_are_medians_over_the_repeats() -> None:
    calls = {"ar": {(0, 0): call(10, 1.0), (1, 0): call(10, 2.0), (2, 0): call(10, 5.0)}}
    (result,) = summarise_prompts([Prompt("code", "x")], [7], calls)
    assert (result.num_prompt_tokens, result.num_new_tokens, result.tokens_per_s) == (7, 10, {"ar": 5.0})


def test_built_in_prompts_take_kinds_in_turn() -> None:
    prompts = select_prompts()
    assert len(prompts) >= 16
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert [prompt.kind for prompt in prompts[:8]] == list(KINDS) * 2
    assert all(sum(prompt.kind == kind for prompt in prompts) >= 4 for kind in KINDS)
    assert {prompt.kind for prompt in select_prompts(["code", "maths"], 5)} == {"code", "maths"}
    assert len(select_prompts(["code"], 8)) == 8


@pytest.mark.parametrize("width", [80, 104])
def test_the_table_fits_the_terminal(width: int) -> None:
    speeds = {"ar": 10.0, "hf_assisted": 10.0, "ssd": 1500.0}
    machine = {"processor": "P", "available_cores": 2, "torch": "2", "transformers": "5"}
    generation = {"do_sample": False, "max_new_tokens": 64, "repeats": 1}
    pair = {"target": "a/target", "assistant": "an/assistant"}
    report = replace(comparison(speeds, gaps=(0.1,)), pair=pair, generation=generation, environment=machine)
    console = Console(width=width, file=io.StringIO())
    print_report(report, console)
    (row,) = [line for line in console.file.getvalue().splitlines() if line.startswith("SSD ")]
    assert "…" not in console.file.getvalue()
    assert row.split()[-1] == "3/4"
    assert "1500.0" in row
