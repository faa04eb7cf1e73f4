"""The race tab: what its buttons do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gradio as gr

from . import panels
from .charts import COLORS, acceptance_by_position, hit_rate_over_time, tokens_per_round_over_time
from .controls import Controls
from .models import Models, Sessions
from .race import Race, check_characters
from .time_line import key, time_line

# Drawing takes cores away from what is measured, so it is done seldom.
REFRESH_S = 0.4
STOP_TIMEOUT_S = 60.0
MOST_WAITING = 16
STATE_LIFE_S = 3600  # of what a page that was left behind keeps in memory

EXAMPLES = {
    "Code": "Write a Python function that adds two numbers, with a docstring.",
    "Markup": "Write an HTML table of three fruits and their colours.",
    "Table": "Write the multiplication table of 7, from 7 x 1 to 7 x 20.",
    "Count": "Count from 1 to 40.",
    "Data": "Write a JSON object with five fields that describe a book.",
    "Chat": "Explain to a ten year old why the moon seems to change its shape over a month.",
}


class RaceTab:
    """Prompt, panels, time line and charts, made where the object is made: inside a gradio layout.

    Args:
        models: Whose target runs.
        sessions: Which page has which run.
        last_stats: State for the `SSDStats` of the page's last SSD run.
    """

    def __init__(self, models: Models, sessions: Sessions, last_stats: gr.State) -> None:
        self._models, self._sessions, self._last_stats = models, sessions, last_stats
        self._history = gr.State([], time_to_live=STATE_LIFE_S)
        self._prompt_parts()
        self._controls = Controls(models.options)
        self._results()
        self._connect()

    def _prompt_parts(self) -> None:
        with gr.Accordion("Conversation", open=False, elem_id="conversation"):
            self._chat = gr.Chatbot(
                [],
                show_label=False,
                height=260,
                render_markdown=False,  # what a model wrote is shown as it is
                latex_delimiters=[],
                allow_tags=False,
                allow_file_downloads=False,
                buttons=[],
                placeholder="Prompts and answers of this page. The next prompt continues them.",
            )
            self._new = gr.Button("New conversation", size="sm", elem_id="new-conversation")
        self._prompt = gr.Textbox(
            next(iter(EXAMPLES.values())),
            label="Prompt",
            info="Enter starts the race; Shift+Enter begins a new line.",
            lines=1,  # with more, Enter would begin a new line
            max_lines=8,
            elem_id="prompt",
        )
        with gr.Row(elem_id="buttons"):
            self._start = gr.Button("Race", variant="primary", elem_id="race", min_width=120)
            self._stop = gr.Button("Stop", variant="stop", elem_id="stop", min_width=90)
            self._replay = gr.Button("Replay side by side", elem_id="replay", min_width=160)
            self._speed = gr.Radio(
                [("1×", "1"), ("½×", "0.5"), ("¼×", "0.25")],
                value="1",
                label="Replay speed",
                show_label=False,
                container=False,
                elem_id="replay-speed",
                min_width=180,
            )
        gr.Examples(
            [[text] for text in EXAMPLES.values()],
            inputs=self._prompt,
            example_labels=list(EXAMPLES),
            label="Examples, from predictable to free. The more predictable a text, the more an assistant helps.",
            elem_id="examples",
            api_visibility="private",
        )

    def _results(self) -> None:
        self._news = gr.HTML(panels.news(self._models.status, is_busy=True), elem_id="news")
        self._arena = gr.HTML(panels.arena(None), elem_id="arena")
        gr.HTML(panels.legend())
        gr.Markdown(
            "All arms use the same target, so they run one after the other and leave each other's cores alone. The "
            "replay then shows them side by side, each token at the time at which it came.",
            elem_classes="note",
        )
        with gr.Accordion("Time line and charts of this race", open=True, elem_id="charts"):
            gr.HTML(key())
            self._time_lines = gr.HTML('<p class="note">Run a race to see who worked when.</p>', elem_id="time-lines")
            gr.Markdown("Over time, each point is the mean of up to eight rounds.", elem_classes="note")
            with gr.Row():
                self._plots = [
                    _plot("seconds", "tokens", "Tokens per round", "plot-tokens"),
                    _plot("seconds", "hit rate", "Hit rate", "plot-hits", y_lim=[0, 1]),
                    _plot("position", "acceptance", "Acceptance by draft position", "plot-acceptance", y_lim=[0, 1]),
                ]

    def _connect(self) -> None:
        outputs = [
            self._news,
            self._arena,
            self._chat,
            self._history,
            self._start,
            self._time_lines,
            *self._plots,
            self._last_stats,
        ]
        # One race at a time, on purpose: two would share the cores and both be measured wrong. The thread of `Models`
        # sees to that, first come, first served; the limit here is only how many pages may wait for it and be told
        # their place. More than that wait in gradio's queue.
        race = gr.on(
            [self._start.click, self._prompt.submit],
            self._race,
            [self._prompt, self._history, *self._controls.components],
            outputs,
            concurrency_limit=MOST_WAITING,
            trigger_mode="once",
            show_progress="hidden",
            api_visibility="private",
        )
        race.then(None, self._speed, js="(speed) => window.ssdRace.play(speed)")
        self._replay.click(None, self._speed, js="(speed) => window.ssdRace.play(speed)")
        self._stop.click(
            self._ask_to_stop,
            None,
            self._news,
            concurrency_limit=None,
            show_progress="hidden",
            api_visibility="private",
        )
        self._new.click(
            lambda: ([], []),
            None,
            [self._chat, self._history],
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
        )

    def watch_loading(self) -> tuple[Any, Any]:
        """A function that reports how loading goes, and its output."""

        def watch() -> Iterator[str]:
            while not self._models.is_ready and self._models.error is None:
                yield panels.news(self._models.status, is_busy=True)
                time.sleep(REFRESH_S)
            yield panels.news(self._models.status, error=self._models.error)

        return watch, self._news

    def _ask_to_stop(self, request: gr.Request) -> Any:
        if self._sessions.stop(str(request.session_hash), STOP_TIMEOUT_S):
            return gr.skip()
        return panels.news("Nothing of this page is running.")

    # gradio passes the request by its annotation, which has to come before the inputs of variable number.
    def _race(self, request: gr.Request, prompt: str, history: list[dict[str, str]], *values: Any) -> Iterator[Any]:
        session = str(request.session_hash)
        messages = [*history, {"role": "user", "content": prompt}]
        try:
            settings = self._controls.settings(values)
            check_characters(messages, self._models.options.max_prompt_tokens)
        except (ValueError, TypeError) as error:
            yield {self._news: panels.news("Not started.", error=str(error))}
            return
        race = Race(self._models, settings, messages, self._sessions.begin(session))
        try:
            done = self._models.submit(race.run)
            yield {self._start: gr.update(interactive=False)}
            told = ""
            while not done.done():
                if race.is_stopped and done.cancel():
                    yield {
                        self._news: panels.news("Stopped before its turn."),
                        self._start: gr.update(interactive=True),
                    }
                    return
                num_before = self._models.num_before(done)
                status = self._status(race, num_before)
                # Only what is new: a screen reader reads out what changes.
                news = {self._news: panels.news(status, is_busy=True)} if status != told else {}
                texts = {} if num_before else {self._arena: panels.arena(race)}
                if news or texts:
                    yield {**news, **texts}
                told = status
                time.sleep(REFRESH_S)
            yield self._finished(race, prompt, history)
        finally:
            # Also when the page was closed in the middle: the run stops, and the next in the queue gets its turn.
            race.stop.set()
            self._sessions.end(session)

    def _status(self, race: Race, num_before: int) -> str:
        if not self._models.is_ready:
            return self._models.status
        if num_before:
            return f"Waiting: {num_before} race{'s' if num_before > 1 else ''} before this one."
        return race.status

    def _finished(self, race: Race, prompt: str, history: list[dict[str, str]]) -> dict[Any, Any]:
        updates = {self._arena: panels.arena(race), self._start: gr.update(interactive=True)}
        if race.error:
            return updates | {self._news: panels.news("The race ended early.", error=race.error)}
        answer = race.answer()
        if answer:
            history = [*history, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        lines = "".join(time_line(run.name, run.stats) for run in reversed(race.runs))
        ssd = next((run.stats for run in race.runs if run.name == "SSD"), None)
        return updates | {
            self._news: panels.news(race.status, error=degraded(race), verdict=panels.verdict(race)),
            self._chat: history,
            self._history: history,
            self._time_lines: lines or '<p class="note">Plain decoding has no rounds: nothing overlaps.</p>',
            self._plots[0]: tokens_per_round_over_time(race.runs),
            self._plots[1]: hit_rate_over_time(race.runs),
            self._plots[2]: acceptance_by_position(race.runs),
            self._last_stats: ssd if ssd is not None else gr.skip(),
        }


def degraded(race: Race) -> str | None:
    """What became of an assistant that failed; the texts are right all the same."""
    causes = {run.stats.degraded for run in race.runs if run.stats is not None and run.stats.degraded}
    return f"The assistant failed, and the target went on alone. {' '.join(sorted(causes))}" if causes else None


def _plot(x: str, y: str, title: str, elem_id: str, **kwargs: Any) -> gr.LinePlot:
    return gr.LinePlot(
        None,
        x=x,
        y=y,
        color="mode",
        color_map=COLORS,
        title=title,
        height=260,
        min_width=300,
        elem_id=elem_id,
        buttons=[],
        **kwargs,
    )
