"""Plots of a benchmark, as PNG files. matplotlib is imported when they are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..metrics import SSDStats
from ..types import Span
from .batches import BatchFigures
from .figures import ALL, ArmFigures, BenchResult, Measurement
from .replay import FanOutFigures
from .settings import ALL_CORES, AR, AUTO, HF_ASSISTED, HF_INT8, PROMPT_LOOKUP, SD, SSD
from .statistics import Estimate
from .titles import name_temperature, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .frontier import Frontier

# The colours of Okabe and Ito, which people who see few colours tell apart too.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#999999"
ARM_COLOURS = {AR: GREY, HF_ASSISTED: ORANGE, HF_INT8: RED, PROMPT_LOOKUP: SKY, SD: GREEN, SSD: BLUE, AUTO: RED}
VARIANT_COLOURS = (PURPLE, YELLOW, BLACK, RED)
SERIES_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, BLACK)
MARKERS = "os^Dv"
SPAN_COLOURS = {
    "prefill": GREY,
    "verify": BLUE,
    "emit": SKY,
    "wait": RED,
    "draft step": GREEN,
    "rank outcomes": YELLOW,
    "just in time": ORANGE,
    "look up": BLACK,
}
# File, title and figure of the speed-ups.
SPEEDUPS = (("speedup", "end to end", "ratios"), ("speedup_decode", "after the first token", "decode_ratios"))
MAX_WIDTH = 13.0  # of a figure, in inches
NUM_SHOWN_ROUNDS = 12  # on the time line
MIN_SHOWN_COUNT = 10  # below, the acceptance of a position is a matter of luck
DPI = 150


def write_plots(result: BenchResult, folder: Path) -> tuple[tuple[str, str], ...]:
    """Draws everything that the result has figures for.

    Args:
        result: A benchmark.
        folder: Where the files go; it must exist.

    Returns:
        File names and what they show.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    plots: list[tuple[str, str, Callable[[], Figure | None]]] = []
    for measurement in result.measurements:
        at = f"t{measurement.temperature:g}"
        for name, title, field in SPEEDUPS:
            caption = f"Speed-up {title}, {name_temperature(measurement.temperature)}"
            plots.append((f"{name}_{at}.png", caption, partial(plot_speedups, measurement, field, caption)))
    plots += [
        ("acceptance.png", "Acceptance by draft position", partial(plot_acceptance, result.measurements)),
        ("tokens_per_round.png", "Tokens per round over time", partial(plot_tokens_per_round, result.measurements)),
        ("fan_outs.png", "Hit rate against budget", partial(plot_fan_outs, result.fan_outs)),
        ("batches.png", "Throughput against latency", partial(plot_batches, result.batches)),
        ("time_line.png", "Time line of both sides", partial(plot_time_line, result.trace)),
    ]
    written = []
    for name, caption, draw in plots:
        figure = draw()
        if figure is not None:
            figure.savefig(folder / name, dpi=DPI)
            written.append((name, caption))
    return tuple(written)


def plot_speedups(measurement: Measurement, field: str = "ratios", title: str = "Speed-up") -> Figure | None:
    """Bars: for every category how many times as fast as plain generate() each arm is. `None` without that arm.

    Args:
        measurement: Figures at one temperature.
        field: `"ratios"` or `"decode_ratios"` of [`ArmFigures`].
        title: What that is.
    """
    if AR not in measurement.arms or len(measurement.arms) == 1:
        return None
    names = [name for name in measurement.arms if name != AR]
    groups = dict(measurement.categories)
    if len(groups) != 1:
        groups = {ALL: measurement.arms, **groups}
    group_width = max(0.16 * (len(names) + 2), 0.9)
    num_rows = math.ceil(len(groups) * group_width / MAX_WIDTH)
    per_row = math.ceil(len(groups) / num_rows)
    width = max(7.0, per_row * group_width + 1)
    figure, panels = _figure(width, 2.8 * num_rows + 1.6, num_rows=num_rows)
    for row, axes in enumerate(panels):
        shown = list(groups)[row * per_row : (row + 1) * per_row]
        for index, name in enumerate(names):
            _bar_group(axes, [getattr(groups[group][name], field).get(AR) for group in shown], index, names)
        axes.axhline(1.0, color=BLACK, linewidth=1, linestyle="--", zorder=1)
        axes.set_xticks(range(len(shown)), [name.replace("_", " ") for name in shown])
        axes.set_xlim(-0.6, per_row - 0.4)
        axes.set_ylabel("x AR")
        axes.grid(axis="y", alpha=0.3, zorder=0)
    figure.suptitle(f"{title}\nAR on the target's cores is 1; lines are 95 % intervals")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_columns(len(names), width))
    return figure


def _bar_group(axes: Axes, ratios: Sequence[Estimate | None], index: int, names: Sequence[str]) -> None:
    """The bars of one of several arms, one for each category that it has a figure for."""
    width = 0.84 / len(names)
    known = [(at, ratio) for at, ratio in enumerate(ratios) if ratio is not None]
    left = [at - 0.42 + width * (index + 0.5) for at, _ in known]
    colour, hatch = _arm_style(names[index], names)
    axes.bar(left, [ratio.value for _, ratio in known], width, color=colour, hatch=hatch, edgecolor="white",
             linewidth=0.5, label=title_of(names[index]), zorder=2)  # fmt: skip
    _error_bars(axes, left, [ratio for _, ratio in known])


def plot_acceptance(measurements: Sequence[Measurement]) -> Figure | None:
    """Lines: for each draft position, how often it was accepted when all before it were."""

    def points(arm: ArmFigures) -> list[tuple[float, float]]:
        if arm.rounds is None:
            return []
        rates = zip(arm.rounds.acceptance_by_position, arm.rounds.num_reached_by_position, strict=True)
        return [(i + 1, rate) for i, (rate, num_reached) in enumerate(rates) if num_reached >= MIN_SHOWN_COUNT]

    figure, panels = _lines(measurements, points)
    if not panels:
        return None
    from matplotlib.ticker import MaxNLocator

    for axes in panels:
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("draft position")
    panels[0].set_ylabel("accepted, if all before it were")
    figure.suptitle("Acceptance by draft position")
    return figure


def plot_tokens_per_round(measurements: Sequence[Measurement]) -> Figure | None:
    """Lines: how many tokens a target forward gives as the texts grow."""
    figure, panels = _lines(
        measurements, lambda arm: [] if arm.rounds is None else arm.rounds.tokens_per_round_over_time
    )
    for axes in panels:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=1)
        axes.set_xlabel("tokens generated so far")
    if not panels:
        return None
    panels[0].set_ylabel("tokens per round")
    figure.suptitle("Tokens per round over time")
    return figure


def plot_fan_outs(fan_outs: Sequence[FanOutFigures]) -> Figure | None:
    """Lines, a panel per temperature: the share of outcomes that each fan-out would have prepared for."""
    if not fan_outs:
        return None
    figure, panels = _figure(max(3.4 * len(fan_outs), 5.0), 4.2, num_columns=len(fan_outs))
    for axes, figures in zip(panels, fan_outs, strict=True):
        for index, (name, rates) in enumerate(figures.hit_rates.items()):
            # A little apart, so that the intervals can be told from each other.
            at = [budget * (1 + 0.05 * (index - 1)) for budget in figures.budgets]
            colour, label = SERIES_COLOURS[index], name.replace("_", "-")
            axes.plot(at, [rate.value for rate in rates], marker=MARKERS[index], color=colour, label=label)
            _error_bars(axes, at, rates, colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(figures.budgets, map(str, figures.budgets))
        axes.minorticks_off()
        axes.set_xlabel("outcomes prepared (B)")
        axes.set_title(
            f"{name_temperature(figures.temperature)}\n{figures.num_rounds} rounds, K = {figures.num_draft_tokens}"
        )
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("hit rate")
    figure.suptitle("Hit rate against budget, all fan-outs on the same rounds")
    _legend_below(figure, panels[0])
    return figure


def plot_batches(batches: Sequence[BatchFigures]) -> Figure | None:
    """Lines: tokens per second of all rows against the batch size, and against the time of a call."""
    if len(batches) < 2:
        return None
    figure, panels = _figure(10.0, 4.4, num_columns=2)
    names = list(batches[0].arms)
    for index, name in enumerate(names):
        arms = [each.arms[name] for each in batches]
        speeds = [arm.tokens_per_s.value for arm in arms]
        colour, dashes = _arm_style(name, names)[0], "--" if name.endswith(ALL_CORES) else "-"
        sizes, latencies = [float(each.batch_size) for each in batches], [arm.latency_s for arm in arms]
        for axes, at in zip(panels, (sizes, latencies), strict=True):
            axes.plot(at, speeds, color=colour, linestyle=dashes, marker=MARKERS[index % len(MARKERS)],
                      label=title_of(name))  # fmt: skip
        for arm, each in zip(arms, batches, strict=True):
            panels[1].annotate(str(each.batch_size), (arm.latency_s, arm.tokens_per_s.value), xytext=(4, -10),
                               textcoords="offset points", fontsize=8, color=colour)  # fmt: skip
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks([each.batch_size for each in batches], [str(each.batch_size) for each in batches])
    panels[0].minorticks_off()
    panels[0].set_xlabel("rows per call")
    panels[0].set_ylabel("tokens/s, all rows")
    panels[0].set_ylim(bottom=0)
    panels[1].set_xlabel("seconds per call; numbers are rows")
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.suptitle("Throughput against batch size, and against latency")
    _legend_below(figure, panels[0])
    return figure


def plot_frontier(frontier: Frontier) -> Figure:
    """Lines, a panel per temperature: acceptance against hit rate over the coefficient, one line per rule."""
    temperatures = frontier.temperatures
    figure, panels = _figure(max(4.0 * len(temperatures), 5.0), 4.4, num_columns=len(temperatures))
    for axes, temperature in zip(panels, temperatures, strict=True):
        points = sorted(frontier.at(temperature), key=lambda point: -point.coefficient)
        for index, rule in enumerate(dict.fromkeys(point.rule for point in frontier.points)):
            line = [
                (point.hit_rate, point.acceptance, point.coefficient)
                for point in points
                if point.rule == rule and point.hit_rate is not None and point.acceptance is not None
            ]
            colour = SERIES_COLOURS[index]
            axes.plot([at[0] for at in line], [at[1] for at in line], color=colour, marker=MARKERS[index], label=rule)
            for hit_rate, acceptance, coefficient in line:
                axes.annotate(f"{coefficient:g}", (hit_rate, acceptance), xytext=(4, 4), textcoords="offset points",
                              fontsize=8, color=colour)  # fmt: skip
        if frontier.greedy is not None and frontier.greedy.hit_rate is not None:
            axes.axvline(frontier.greedy.hit_rate, color=GREY, linestyle="--", linewidth=1, label="hit rate, greedy")
        axes.set_title(name_temperature(temperature))
        axes.set_xlabel("hit rate")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("acceptance")
    figure.suptitle("Acceptance against hit rate; numbers are the coefficient C of Saguaro sampling")
    _legend_below(figure, panels[0])
    return figure


def plot_time_line(stats: SSDStats | None) -> Figure | None:
    """Bars on two lanes: what target and assistant did during some rounds. `None` without a trace."""
    if stats is None or not stats.verifier_spans:
        return None
    verifications = [span for span in stats.verifier_spans if span.name == "verify"]
    # Not the first ones, in which both sides settle.
    shown = verifications[2 : 2 + NUM_SHOWN_ROUNDS] or list(stats.verifier_spans)
    start_ns, end_ns = shown[0].start_ns, shown[-1].end_ns
    figure, (axes,) = _figure(12.0, 3.4)
    seen: dict[str, Any] = {}
    for lane, spans in ((1, stats.verifier_spans), (0, stats.speculator_spans)):
        for name in dict.fromkeys(span.name for span in spans):
            bars = _bars([span for span in spans if span.name == name], start_ns, end_ns)
            if bars:
                colour = SPAN_COLOURS.get(name, PURPLE)
                seen[name] = axes.broken_barh(bars, (lane - 0.35, 0.7), facecolors=colour, edgecolor="white",
                                              linewidth=0.3)  # fmt: skip
    axes.set_yticks([0, 1], ["assistant", "target"])
    axes.set_ylim(-0.5, 1.5)
    axes.set_xlim(0, (end_ns - start_ns) / 1e6)
    axes.set_xlabel("ms")
    axes.set_title(f"What both sides do at once: {len(shown)} rounds of SSD")
    figure.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=len(seen))
    return figure


def _lines(
    measurements: Sequence[Measurement], points: Callable[[ArmFigures], Sequence[tuple[float, float]]]
) -> tuple[Figure, Sequence[Axes]]:
    """A panel each for SSD and SD, with a line per temperature; no panels if there are no points."""
    names = [name for name in (SSD, SD) if any(name in m.arms and points(m.arms[name]) for m in measurements)]
    figure, panels = _figure(4.0 * max(len(names), 1) + 1.5, 4.2, num_columns=max(len(names), 1))
    for axes, name in zip(panels, names, strict=False):
        for index, measurement in enumerate(measurements):
            line = points(measurement.arms[name]) if name in measurement.arms else ()
            if line:
                colour, marker = SERIES_COLOURS[index % len(SERIES_COLOURS)], MARKERS[index % len(MARKERS)]
                label = name_temperature(measurement.temperature)
                axes.plot(*zip(*line, strict=True), color=colour, marker=marker, markersize=5, label=label)
        axes.set_title(title_of(name))
        axes.grid(alpha=0.3)
    if not names:
        return figure, ()
    # One entry per temperature, wherever it has a line.
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure, panels


def _figure(width: float, height: float, *, num_rows: int = 1, num_columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure, sizes in inches, with panels below or beside each other that share their y axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('Plots need the package matplotlib: pip install "hf-ssd[bench]".') from None
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    return figure, list(panels.flat)


def new_figure(width: float, height: float, heights: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure, sizes in inches, with panels of these relative heights below each other over one x axis."""
    figure, (panel,) = _figure(width, height)
    panel.remove()
    grid = figure.add_gridspec(len(heights), 1, height_ratios=list(heights))
    first = figure.add_subplot(grid[0])
    return figure, [first, *(figure.add_subplot(grid[row], sharex=first) for row in range(1, len(heights)))]


def _legend_below(figure: Figure, axes: Axes) -> None:
    """What the lines of a panel are, below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    num_columns = _columns(len(labels), float(figure.get_size_inches()[0]))
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)


def _error_bars(axes: Axes, at: Sequence[float], estimates: Sequence[Estimate], colour: str = BLACK) -> None:
    for x, estimate in zip(at, estimates, strict=True):
        if estimate.low is not None and estimate.high is not None:
            axes.vlines(x, estimate.low, estimate.high, color=colour, linewidth=1, zorder=3)


def _arm_style(name: str, names: Sequence[str]) -> tuple[str, str | None]:
    """Colour and hatching of an arm: arms on all cores are hatched."""
    base = name.removesuffix(ALL_CORES)
    if base not in ARM_COLOURS:
        variants = [other for other in names if other.removesuffix(ALL_CORES) not in ARM_COLOURS]
        return VARIANT_COLOURS[variants.index(name) % len(VARIANT_COLOURS)], None
    return ARM_COLOURS[base], "////" if name.endswith(ALL_CORES) else None


def _columns(num_entries: int, width: float) -> int:
    """Columns of a legend that fits under a figure of some width in inches."""
    return max(1, min(num_entries, int(width / 2.7)))


def _bars(spans: Sequence[Span], start_ns: int, end_ns: int) -> list[tuple[float, float]]:
    """Start and width in milliseconds of what lies within a window of time."""
    clipped = [(max(span.start_ns, start_ns), min(span.end_ns, end_ns)) for span in spans]
    return [((start - start_ns) / 1e6, (end - start) / 1e6) for start, end in clipped if start < end]
