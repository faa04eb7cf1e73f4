"""The speed model with sliders: what a pair of models would gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr
import pandas as pd

from hf_ssd import SSDStats, theory

from .charts import COLORS

REFERENCE_BUDGET = 8  # the budget at which the slider's hit rate holds
MOST_ROWS = 32
MOST_BUDGET = 64
AR, SD, JUST_IN_TIME, FAST = "AR", "SD", "SSD, drafting just in time", "SSD, backup without delay"
LINE_COLORS = {AR: COLORS["AR"], SD: COLORS["SD"], JUST_IN_TIME: COLORS["SSD"], FAST: "#CC79A7", "b*": "#999999"}


@dataclass(frozen=True)
class World:
    """A pair of models by a few numbers. Times are in milliseconds.

    Args:
        verify_ms: One forward of the target, of one token or of K + 1.
        draft_ms: One forward of the assistant, which drafts a token for every outcome that is prepared for.
        acceptance: Chance that a draft token is accepted when all before it were.
        hit_rate: Share of outcomes that a budget of `REFERENCE_BUDGET` is prepared for.
        batch_size: Rows that are verified together.
        budget: Outcomes that are prepared for per round (B).
        draft_length: Draft tokens in a chain (K).
    """

    verify_ms: float = 230.0
    draft_ms: float = 25.0
    acceptance: float = 0.8
    hit_rate: float = 0.8
    batch_size: int = 1
    budget: int = REFERENCE_BUDGET
    draft_length: int = 4

    @property
    def chances(self) -> tuple[float, ...]:
        """How likely each accepted length is."""
        return theory.outcome_probabilities((self.acceptance,) * self.draft_length)

    def hits(self, budget: int) -> float:
        """The hit rate at another budget, by the power law through the one at the reference."""
        number = len(self.chances)
        exponent = theory.power_law_exponent(self.hit_rate, self.chances, spread(REFERENCE_BUDGET, number))
        return theory.hit_rate(self.chances, spread(budget, number), exponent)

    @property
    def tokens(self) -> float:
        """Tokens of a round that has a whole draft to verify."""
        return theory.tokens_per_round((self.acceptance,) * self.draft_length)

    @property
    def prepare_ms(self) -> float:
        """Time to draft for the next round: a forward per draft token, for all outcomes at once."""
        return self.draft_length * self.draft_ms

    @property
    def rest_ms(self) -> float:
        """What of that is left when the target is done."""
        return max(self.prepare_ms - self.verify_ms, 0.0)

    def speed_ups(self, batch_size: int, budget: int) -> dict[str, float]:
        """Speed against AR with the same rows, for each way to generate."""
        hits = self.hits(budget)

        def gain(tokens: float, round_ms: float) -> float:
            return tokens * self.verify_ms / round_ms

        just_in_time = theory.ssd_round(hits, self.verify_ms, self.prepare_ms, rest=self.rest_ms, batch_size=batch_size)
        fast = theory.ssd_round(hits, self.verify_ms, 0.0, rest=self.rest_ms, batch_size=batch_size)
        return {
            AR: 1.0,
            SD: gain(self.tokens, theory.sd_round(self.verify_ms, self.prepare_ms)),
            JUST_IN_TIME: gain(self.tokens, just_in_time),
            FAST: gain(self.fast_tokens(hits), fast),
        }

    def fast_tokens(self, hits: float) -> float:
        """Tokens of a round where a miss has nothing to verify: only the bonus token then."""
        return hits * self.tokens + (1.0 - hits)

    @property
    def critical_batch_size(self) -> float:
        """b*: from here on the backup without delay is the faster one."""
        hits = self.hits(self.budget)
        ratio = self.tokens / self.fast_tokens(hits)
        return theory.critical_batch_size(hits, ratio, self.prepare_ms / (self.verify_ms + self.rest_ms))


def spread(budget: int, number: int) -> tuple[int, ...]:
    """A budget over so many accepted lengths, as evenly as it goes, the shorter ones first."""
    return tuple(budget // number + (index < budget % number) for index in range(number))


def over_batch_sizes(world: World) -> pd.DataFrame:
    """Columns rows, speed-up and way, with b* as an upright line where it is in sight."""
    rows = _curves(range(1, MOST_ROWS + 1), lambda rows: world.speed_ups(rows, world.budget))
    critical = world.critical_batch_size
    if 0 < critical <= MOST_ROWS:
        top = max(value for _, value, _ in rows)
        rows += [(critical, 0.0, "b*"), (critical, top, "b*")]
    return pd.DataFrame(rows, columns=["rows", "speed-up", "way"])


def over_budgets(world: World) -> pd.DataFrame:
    """Columns outcomes, speed-up and way."""
    rows = _curves(range(1, MOST_BUDGET + 1), lambda budget: world.speed_ups(world.batch_size, budget))
    return pd.DataFrame(rows, columns=["outcomes", "speed-up", "way"])


def _curves(values: Iterable[int], speed_ups: Callable[[int], dict[str, float]]) -> list[tuple[float, float, str]]:
    return [(float(value), speed, way) for value in values for way, speed in speed_ups(value).items()]


def summary(world: World) -> str:
    """What the numbers come to, in words."""
    speeds = world.speed_ups(world.batch_size, world.budget)
    hits, critical = world.hits(world.budget), world.critical_batch_size
    if critical == 0:
        star = "b* = 0: the backup without delay is always the better one here."
    elif math.isinf(critical):
        star = "b* is infinite: drafting just in time is the better backup for any number of rows."
    else:
        star = f"b* = {critical:.1f}: with more rows than that, a backup without delay beats drafting just in time."
    rows = "1 row" if world.batch_size == 1 else f"{world.batch_size} rows"
    cells = "".join(
        f"<div><dt>{escape(way)}</dt><dd>{speed:.2f}×</dd></div>" for way, speed in speeds.items() if way != AR
    )
    return (
        f'<p class="star" id="b-star" role="status"><strong>{escape(star)}</strong></p>'
        f"<p>With {rows} and a budget of {world.budget} outcomes the hit rate is {hits:.2f}, and a draft is worth "
        f"{world.tokens:.2f} tokens a round. Speed against plain decoding:</p>"
        f'<dl class="figures">{cells}</dl>'
    )


def world_of(stats: SSDStats | None) -> World:
    """The last race's SSD as a world.

    Raises:
        ValueError: If there is none.
    """
    steps = 0 if stats is None else sum(each.num_draft_steps for each in stats.rounds)
    if stats is None or not steps or stats.verify_ms is None or stats.acceptance is None:
        raise ValueError("There are no figures of SSD yet. Run a race with SSD first.")
    return World(
        verify_ms=round(stats.verify_ms, 1),
        draft_ms=round(sum(each.draft_ms for each in stats.rounds) / steps, 1),
        acceptance=round(min(max(stats.acceptance, 0.05), 0.99), 2),
        hit_rate=round(min(max(stats.hit_rate or 0.0, 0.05), 0.99), 2),
    )


def what_if_tab(last_stats: Any) -> None:
    """The tab, made inside a gradio layout.

    Args:
        last_stats: State that holds the `SSDStats` of the page's last SSD run.
    """
    default = World()
    gr.Markdown(
        "The speed model of [the paper](https://arxiv.org/abs/2603.03251), with numbers of your own. A forward of the "
        "target takes the same time for one token as for a draft, and one of the assistant drafts for all prepared "
        "outcomes at once."
    )
    with gr.Row():
        sliders = [
            gr.Slider(5, 500, default.verify_ms, step=0.5, label="Target, ms", info="One forward of the target."),
            gr.Slider(
                0.5, 200, default.draft_ms, step=0.5, label="Assistant, ms", info="One forward of the assistant."
            ),
            gr.Slider(
                0.05, 0.99, default.acceptance, step=0.01, label="Acceptance", info="Chance of each draft token."
            ),
            gr.Slider(
                0.05,
                0.99,
                default.hit_rate,
                step=0.01,
                label="Hit rate",
                info=f"At a budget of {REFERENCE_BUDGET} outcomes.",
            ),
            gr.Slider(1, MOST_ROWS, default.batch_size, step=1, label="Batch size", info="Rows verified together."),
            gr.Slider(
                1, MOST_BUDGET, default.budget, step=1, label="Budget B", info="Outcomes prepared for per round."
            ),
            gr.Slider(1, 16, default.draft_length, step=1, label="Draft length K", info="Draft tokens of a round."),
        ]
    for slider in sliders:
        slider.min_width = 220
    take_last = gr.Button("Take the figures of the last race", size="sm", elem_id="take-last")
    note = gr.HTML("", elem_id="what-if-note")
    text = gr.HTML(summary(default), elem_id="what-if-summary")
    with gr.Row():
        plots = [
            _plot(over_batch_sizes(default), "rows", "Speed-up by batch size (upright line: b*)", "what-if-batches"),
            _plot(over_budgets(default), "outcomes", "Speed-up by budget, at this batch size", "what-if-budgets"),
        ]

    def draw(*values: float) -> tuple[str, pd.DataFrame, pd.DataFrame]:
        verify_ms, draft_ms, acceptance, hit_rate, batch_size, budget, draft_length = values
        world = World(verify_ms, draft_ms, acceptance, hit_rate, int(batch_size), int(budget), int(draft_length))
        return summary(world), over_batch_sizes(world), over_budgets(world)

    def take(stats: SSDStats | None) -> list[Any]:
        from .panels import alert

        try:
            world = world_of(stats)
        except ValueError as error:
            return [alert(str(error)), *[gr.skip()] * 4]
        return ["", world.verify_ms, world.draft_ms, world.acceptance, world.hit_rate]

    # Nothing of this computes much: it must not wait for a race.
    gr.on(
        [slider.change for slider in sliders],
        draw,
        sliders,
        [text, *plots],
        show_progress="hidden",
        concurrency_limit=None,
        trigger_mode="always_last",
        api_visibility="private",
    )
    take_last.click(
        take, last_stats, [note, *sliders[:4]], show_progress="hidden", concurrency_limit=None, api_visibility="private"
    )


def _plot(data: pd.DataFrame, x: str, title: str, elem_id: str) -> gr.LinePlot:
    return gr.LinePlot(
        data,
        x=x,
        y="speed-up",
        color="way",
        color_map=LINE_COLORS,
        title=title,
        y_title="times AR",
        height=320,
        min_width=320,
        elem_id=elem_id,
        buttons=[],
    )
