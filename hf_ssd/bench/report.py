"""A comparison for people: a progress bar, a table, and what the figures mean in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..trace import Overlap
from .results import ArmResult, Comparison
from .settings import AR, AR_ALL_CORES, HF_ASSISTED_ALL_CORES, SSD
from .titles import title_of

LEGEND = (
    "AR: transformers' generate(). HF: the same with assistant_model=, at its fastest setting. SD, SSD: hf_ssd. "
    "Threads: target + assistant. x AR, x HF: against these on the target's threads. First: the first token."
)
# Heading, how a figure is written, and whether a terminal narrower than `WIDE` shows it too.
COLUMNS: tuple[tuple[str, Callable[[ArmResult], str], bool], ...] = (
    ("threads", lambda arm: _threads(arm), True),
    ("tokens\n/s", lambda arm: _number(arm.tokens_per_s), True),
    ("decode\n/s", lambda arm: _number(arm.decode_tokens_per_s), False),
    ("x AR", lambda arm: _number(arm.ratio_to_ar, 2), True),
    ("x HF", lambda arm: _number(arm.ratio_to_hf_assisted, 2), True),
    ("first\nms", lambda arm: _number(arm.ttft_ms, 0), True),
    ("tokens\n/round", lambda arm: _number(arm.tokens_per_round, 2), True),
    ("accep-\nted", lambda arm: _number(arm.acceptance, 2), False),
    ("hit\nrate", lambda arm: _number(arm.hit_rate, 2), True),
    ("verify\nms", lambda arm: _number(arm.verify_ms), False),
    ("wait\nms", lambda arm: _number(arm.wait_ms), False),
    ("same\ntext", lambda arm: _identical(arm, "/"), True),
)
WIDE = 104

# Above this gap between the two best logits, rounding is no good explanation for another token.
NEAR_TIE_GAP = 1.0


@contextmanager
def progress_bar(console: Console, counted: str = "calls done") -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar, as the function that [`compare`] reports to; some lines of text where there is no terminal."""
    if not console.is_terminal:
        yield _line_reporter(console, counted)
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # The forecast averages over many steps, because arms take very different times.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as progress:
        task = progress.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total or None)

        yield report


def _line_reporter(console: Console, counted: str) -> Callable[[str, int, int], None]:
    said: set[tuple[int, int]] = set()

    def report(what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else -1
        if not total or (total, tenth) not in said:
            said.add((total, tenth))
            console.print(f"{what} ({done} of {total} {counted})" if total else what, highlight=False)

    return report


def print_report(comparison: Comparison, console: Console) -> None:
    """Prints table, meaning and conditions."""
    console.print(_table(comparison, console.width))
    console.print(LEGEND, style="dim", highlight=False)
    for sentence in (*explain_speed(comparison), *explain_identity(comparison), *_explain_trouble(comparison)):
        console.print(sentence, highlight=False)
    if comparison.overlap is not None:
        console.print(explain_overlap(comparison.overlap), highlight=False)
    console.print(_conditions(comparison), style="dim", highlight=False)


def explain_speed(comparison: Comparison) -> list[str]:
    """What the speeds mean for a user, also where SSD loses."""
    ssd = comparison.arms.get(SSD)
    if ssd is None:
        return []
    peers = (
        ("transformers' assisted generation", ssd.ratio_to_hf_assisted, ssd.ratio_to_hf_assisted_all_cores),
        ("plain transformers", ssd.ratio_to_ar, ssd.ratio_to_ar_all_cores),
    )
    sentences = []
    for peer, same_cores, all_cores in peers:
        parts = []
        if same_cores is not None:
            parts.append(f"{_ratio(same_cores)} when that gets the target's cores")
        if all_cores is not None:
            parts.append(f"{_ratio(all_cores)} when it gets all cores")
        if parts:
            sentences.append(f"SSD's speed against {peer}: {', '.join(parts)}.")
    worst = min((r for r in (ssd.ratio_to_ar, ssd.ratio_to_ar_all_cores) if r is not None), default=None)
    if worst is not None and worst < 1.0:
        sentences.append(
            f"Here plain transformers can be faster: {_share(ssd.acceptance)} of the assistant's tokens are accepted, "
            f"which gives {_number(ssd.tokens_per_round, 2)} tokens per target forward. A better assistant, a larger "
            "target, or cores the target does not need change that."
        )
    return sentences


def explain_identity(comparison: Comparison) -> list[str]:
    """Whether the texts are AR's, and why not where they are not."""
    if comparison.generation["do_sample"]:
        return ["Texts are drawn at random here, so they are not compared; the distribution is the target's."]
    peers = (AR, AR_ALL_CORES)
    compared = {name: arm for name, arm in comparison.arms.items() if name not in peers and arm.identical_to_ar}
    if not compared:
        return []
    counts = ", ".join(f"{title_of(name)} {_identical(arm)}" for name, arm in compared.items())
    sentences = [f"Texts identical to AR's: {counts}."]
    gaps = [d.logit_gap for arm in compared.values() for d in arm.first_differences if d.logit_gap is not None]
    if not gaps:
        return sentences
    where = f"Where a text leaves AR's, the target's two best logits are at most {max(gaps):.3f} apart"
    if comparison.dtype == "float32" and max(gaps) > 1e-3:
        sentences.append(f"{where}. In float32 that is no rounding: please report it.")
    elif max(gaps) > NEAR_TIE_GAP:
        sentences.append(f"{where}: more than the rounding of {comparison.dtype} explains. Please report it.")
    else:
        sentences.append(
            f"{where}: near-ties. {comparison.dtype} rounds several tokens verified at once differently from one at a "
            "time, in every kind of speculative decoding; --dtype float32 shows that the method itself changes nothing."
        )
    return sentences


def explain_overlap(overlap: Overlap) -> str:
    """What a trace shows about both sides computing at once."""
    return (
        f"Trace: the target computed for {overlap.verify_ms:.0f} ms, the assistant for {overlap.draft_ms:.0f} ms; both "
        f"at once for {overlap.overlap_ms:.0f} ms, {_share(overlap.share_of_verify)} of the target's time and "
        f"{_share(overlap.share_of_draft)} of the assistant's."
    )


def _table(comparison: Comparison, width: int) -> Table:
    title = "{target}\nwith {assistant}, ".format(**comparison.pair) + comparison.dtype
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    columns = [column for column in COLUMNS if column[2] or width >= WIDE]
    table.add_column("", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, arm in comparison.arms.items():
        style = "bold" if name == SSD else None
        table.add_row(_title(name, arm), *(write(arm) for _, write, _ in columns), style=style)
    return table


def _explain_trouble(comparison: Comparison) -> list[str]:
    return [
        f"[red]{title_of(name)} went on without its assistant: {arm.degraded}[/red]"
        for name, arm in comparison.arms.items()
        if arm.degraded
    ]


def _conditions(comparison: Comparison) -> str:
    machine = comparison.environment
    kinds = ", ".join(dict.fromkeys(prompt.kind for prompt in comparison.prompts))
    ssd = comparison.arms.get(SSD)
    setting = ""
    if ssd is not None and ssd.settings is not None:
        setting = f"; SSD with K = {ssd.settings['num_assistant_tokens']}, B = {ssd.settings['cache_budget']}"
    return (
        f"{len(comparison.prompts)} prompts ({kinds}), up to {comparison.generation['max_new_tokens']} new tokens, "
        f"repeats: {comparison.generation['repeats']}{setting}. {machine['processor']}, {machine['available_cores']} "
        f"cores, torch {machine['torch']}, transformers {machine['transformers']}. tokens/s includes the prefill."
    )


def _title(name: str, arm: ArmResult) -> str:
    variant = (arm.settings or {}).get("variant")
    all_cores = ", all cores" if name in (AR_ALL_CORES, HF_ASSISTED_ALL_CORES) else ""
    return f"HF {variant}{all_cores}" if variant else title_of(name)


def _threads(arm: ArmResult) -> str:
    threads = arm.threads or {}
    return " + ".join(str(n) for n in (threads.get("target"), threads.get("assistant")) if n is not None)


def _identical(arm: ArmResult, between: str = " of ") -> str:
    return between.join(map(str, arm.identical_to_ar)) if arm.identical_to_ar else "-"


def _ratio(ratio: float) -> str:
    if 0.97 <= ratio <= 1.03:
        return f"{ratio:.2f}x (equal)"
    return f"{ratio:.2f}x ({'faster' if ratio > 1 else 'slower'})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
