"""A benchmark as a report in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .batches import FAST_BACKUPS, BatchFigures
from .critical import measured_critical_batch_size
from .figures import ALL, ArmFigures, BenchResult, Measurement
from .replay import PER_INSTANCE, FanOutFigures
from .settings import AR, AR_ALL_CORES, AUTO, HF_ASSISTED, HF_ASSISTED_ALL_CORES, SSD
from .statistics import Estimate
from .titles import name_temperature, title_of

Column = tuple[str, Callable[[ArmFigures], str]]

SPEED_COLUMNS: tuple[Column, ...] = (
    ("threads", lambda arm: _threads(arm)),
    ("tokens/s", lambda arm: estimate(arm.tokens_per_s, 1)),
    ("x AR", lambda arm: estimate(arm.ratios.get(AR))),
    ("x AR, all cores", lambda arm: estimate(arm.ratios.get(AR_ALL_CORES))),
    ("x HF", lambda arm: estimate(arm.ratios.get(HF_ASSISTED))),
    ("x HF, all cores", lambda arm: estimate(arm.ratios.get(HF_ASSISTED_ALL_CORES))),
    ("first token ms", lambda arm: number(arm.ttft_ms, 0)),
    ("same text as AR", lambda arm: " of ".join(map(str, arm.identical_to_ar)) if arm.identical_to_ar else "-"),
)
DECODE_COLUMNS: tuple[Column, ...] = (
    ("tokens/s", lambda arm: estimate(arm.decode_tokens_per_s, 1)),
    ("x AR", lambda arm: estimate(arm.decode_ratios.get(AR))),
    ("x AR, all cores", lambda arm: estimate(arm.decode_ratios.get(AR_ALL_CORES))),
    ("x HF", lambda arm: estimate(arm.decode_ratios.get(HF_ASSISTED))),
    ("x HF, all cores", lambda arm: estimate(arm.decode_ratios.get(HF_ASSISTED_ALL_CORES))),
    ("tokens/round", lambda arm: number(arm.tokens_per_round)),
)
ROUND_COLUMNS: tuple[Column, ...] = (
    ("tokens/round", lambda arm: _of_rounds(arm, "tokens_per_round")),
    ("acceptance", lambda arm: _of_rounds(arm, "acceptance")),
    ("hit rate", lambda arm: _of_rounds(arm, "hit_rate")),
    ("depth at hit", lambda arm: _of_rounds(arm, "depth_at_hit")),
    ("verify ms", lambda arm: _of_rounds(arm, "verify_ms", 1)),
    ("wait ms", lambda arm: _of_rounds(arm, "wait_ms", 1)),
    ("wait / verify", lambda arm: _of_rounds(arm, "wait_share")),
    ("draft step ms", lambda arm: _of_rounds(arm, "draft_step_ms", 1)),
    ("perfect tokens/s", lambda arm: _of_perfect(arm, "tokens_per_s", ".1f")),
    ("reached", lambda arm: _of_perfect(arm, "share", ".0%")),
)

NOTES = """\
- **AR**, **HF assisted** and **Prompt lookup** are transformers' `generate()`: plain, with `assistant_model=`, and with
  `prompt_lookup_num_tokens=`. Where several settings were tried, the one with most tokens per second over all prompts
  counts. **SD** and **SSD** are hf_ssd.
- **x AR**, **x HF**: against these on the target's threads, or on all cores. In brackets is the interval that the
  figure spans when prompts and repeats are drawn anew (bootstrap, 95 %).
- **Perfect** is the speed after the first token if every round were a hit and nobody waited; **reached** is the run's
  share of it.
- End to end includes the prefill; *after the first token* leaves it and the tokens that came with it out.
"""


def write_report(result: BenchResult, plots: Sequence[tuple[str, str]] = ()) -> str:
    """The report.

    Args:
        result: A benchmark.
        plots: File names and captions of plots beside the report.
    """
    parts = [f"# {result.pair['target']} with {result.pair['assistant']}, {result.dtype}", conditions(result)]
    for measurement in result.measurements:
        parts += _measurement(measurement)
    if result.fan_outs:
        parts += ["## Fan-outs", "Hit rates on the same recorded rounds.", *map(_fan_outs, result.fan_outs)]
    if result.batches:
        parts += ["## Batches", *_batches(result.batches)]
    if plots:
        parts += ["## Plots", *(f"![{caption}]({name})" for name, caption in plots)]
    return "\n\n".join([*parts, "## How to read this", NOTES])


def conditions(result: BenchResult) -> str:
    """A sentence or two on what was measured, and on what."""
    machine, generation = result.environment, result.generation
    categories = ", ".join(result.measurements[0].categories)
    length = f"{'up to ' if generation['stop_at_eos'] else ''}{generation['max_new_tokens']} new tokens each"
    processor = f"{machine['processor']}, {machine['available_cores']} cores"
    accelerator = f", {machine['accelerator']}" if machine["accelerator"] else ""
    return (
        f"{generation['num_prompts']} prompts of the suite `{result.suite}` ({categories}), {length}, "
        f"{generation['repeats']} repeat(s). {processor}{accelerator}; torch {machine['torch']}, transformers "
        f"{machine['transformers']}, Python {machine['python']}, {machine['system']}."
    )


def _measurement(measurement: Measurement) -> list[str]:
    arms = measurement.arms
    with_rounds = {name: arm for name, arm in arms.items() if arm.rounds is not None}
    parts = [
        f"## {name_temperature(measurement.temperature).capitalize()}",
        "End to end:",
        _arm_table(arms.items(), SPEED_COLUMNS),
        "After the first token:",
        _arm_table(arms.items(), DECODE_COLUMNS),
    ]
    if with_rounds:
        parts += ["Rounds:", _arm_table(with_rounds.items(), ROUND_COLUMNS)]
    if len(measurement.categories) > 1:
        parts += _per_category(measurement)
    parts += [
        f"**{title_of(name)} went on without its assistant:** {arm.degraded}"
        for name, arm in arms.items()
        if arm.degraded
    ]
    return parts


def _arm_table(arms: Iterable[tuple[str, ArmFigures]], columns: Sequence[Column]) -> str:
    rows = [[_arm_title(name, arm), *(write(arm) for _, write in columns)] for name, arm in arms]
    return table(["arm", *(heading for heading, _ in columns)], rows)


def _per_category(measurement: Measurement) -> list[str]:
    """The speed-ups of all arms and the rounds of SSD, as far as they were measured."""
    groups = {ALL: measurement.arms, **measurement.categories}
    names = [name for name in measurement.arms if name != AR]
    headings = ["category", *map(title_of, names)]
    parts = []
    if AR in measurement.arms and names:
        whole = [[at, *(estimate(arms[name].ratios.get(AR)) for name in names)] for at, arms in groups.items()]
        decode = [[at, *(estimate(arms[name].decode_ratios.get(AR)) for name in names)] for at, arms in groups.items()]
        parts += ["Speed-up over AR on the target's cores per category, end to end:", table(headings, whole)]
        parts += ["The same after the first token:", table(headings, decode)]
    if SSD in measurement.arms:
        columns = ROUND_COLUMNS
        rows = [[at, *(write(arms[SSD]) for _, write in columns)] for at, arms in groups.items()]
        parts += ["The rounds of SSD per category:", table(["category", *(name for name, _ in columns)], rows)]
    return parts


def _fan_outs(figures: FanOutFigures) -> str:
    """Hit rates by fan-out and budget, and how far ahead the per-instance one is."""
    at = f"{name_temperature(figures.temperature).capitalize()}, {figures.num_rounds} rounds of K = "
    rates = [
        [name.replace("_", "-"), *(estimate(rate, 3) for rate in of_budget)]
        for name, of_budget in figures.hit_rates.items()
    ]
    leads = [
        [f"{PER_INSTANCE.replace('_', '-')} less {name}", *(estimate(lead, 3) for lead in of_budget)]
        for name, of_budget in figures.leads.items()
    ]
    headings = ["fan-out", *(f"B = {budget}" for budget in figures.budgets)]
    return f"{at}{figures.num_draft_tokens}:\n\n{table(headings, rates + leads)}"


def _batches(batches: Sequence[BatchFigures]) -> list[str]:
    """Tokens per second of all rows together by batch size, and how SSD came to them."""
    names = list(batches[0].arms)
    speeds = [
        [str(each.batch_size), *(estimate(each.arms[name].tokens_per_s, 1) for name in names)] for each in batches
    ]
    latencies = [[str(each.batch_size), *(number(arm.latency_s, 1) for arm in each.arms.values())] for each in batches]
    headings = ["rows", *map(title_of, names)]
    parts = ["Tokens/s of all rows together, prefill included:", table(headings, speeds)]
    parts += ["Seconds per call, the median:", table(headings, latencies)]
    for name in names:
        if all(each.arms[name].tokens_per_round is not None for each in batches):
            rows = [
                [
                    str(each.batch_size),
                    number(arm.tokens_per_round),
                    number(arm.hit_rate),
                    number(arm.verify_ms, 1),
                    number(arm.wait_ms, 1),
                    estimate(arm.ratios.get(AR)),
                    estimate(arm.ratios.get(AR_ALL_CORES)),
                ]
                for each in batches
                for arm in (each.arms[name],)
            ]
            columns = ["rows", "tokens/round of a row", "hit rate", "verify ms", "wait ms", "x AR", "x AR, all cores"]
            parts += [f"The rounds of {title_of(name)}:", table(columns, rows)]
    if all(AUTO in each.arms for each in batches):
        rows = [[str(each.batch_size), estimate(each.arms[AUTO].over_best)] for each in batches]
        parts += ["Mode `auto`, once it has tried the modes:", table(["rows", "x the best of AR, SD and SSD"], rows)]
    return [*parts, *_backups(batches)]


def _backups(batches: Sequence[BatchFigures]) -> list[str]:
    """From how many rows on not waiting for the assistant after a miss is faster."""
    parts = []
    for name in FAST_BACKUPS:
        known = {each.batch_size: each.backups[name] for each in batches if name in each.backups}
        if not known:
            continue
        rows = []
        for size, of in known.items():
            formula = "never" if of.formula is None else number(of.formula, 1)
            figures = (of.speed_ratio, of.hit_rate, of.tokens_ratio, of.jit)
            rows.append([str(size), *map(number, figures), formula])
        measured = measured_critical_batch_size({size: of.speed_ratio for size, of in known.items()})
        columns = ["rows", "x backup jit, measured", "hit rate", "tokens ratio", "T_jit", "b* by the formula"]
        parts += [
            f"Backup `{name}` against drafting just in time; measured b*: {_crossing(measured, list(known))}",
            table(columns, rows),
        ]
    return parts


def _crossing(measured: float | None, sizes: Sequence[int]) -> str:
    if measured is None:
        return "-"
    if math.isinf(measured):
        return f"above {max(sizes)} rows"
    return f"{measured:.1f} rows" if measured else f"at most {min(sizes)} row(s)"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left."""
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _arm_title(name: str, arm: ArmFigures) -> str:
    variant = (arm.settings or {}).get("variant")
    return f"{title_of(name)} ({variant})" if variant else title_of(name)


def _threads(arm: ArmFigures) -> str:
    threads = arm.threads or {}
    return " + ".join(str(n) for n in (threads.get("target"), threads.get("assistant")) if n is not None)


def _of_rounds(arm: ArmFigures, field: str, digits: int = 2) -> str:
    return number(getattr(arm.rounds, field), digits)


def _of_perfect(arm: ArmFigures, field: str, form: str) -> str:
    perfect = None if arm.rounds is None else arm.rounds.perfect
    return "-" if perfect is None else format(getattr(perfect, field), form)


def estimate(value: Estimate | None, digits: int = 2) -> str:
    """A figure with its interval, if it has one."""
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return number(value.value, digits)
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"
