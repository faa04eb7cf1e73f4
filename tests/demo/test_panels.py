from __future__ import annotations

import threading
from html.parser import HTMLParser

import pytest
from tiny_pair import byte_tokenizer

from demo import panels
from demo.models import Models
from demo.options import DemoOptions
from demo.race import Difference, Race, RaceSettings, Run
from demo.tokens import Source, Tape, Token
from hf_ssd import Origin, RoundStats, SSDConfig, SSDStats

EVIL = '<script>alert("x")</script> & <img src=x onerror=alert(1)>'


class Elements(HTMLParser):
    """Names of the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes.append(dict(attrs))


@pytest.fixture
def race():
    race = Race(Models(DemoOptions()), RaceSettings(), [{"role": "user", "content": "Hi"}], threading.Event())
    race.tokenizer = byte_tokenizer()
    yield race
    race.models.close()


def stats(mode: str, seconds: float, num_tokens: int = 11, **fields) -> SSDStats:
    return SSDStats(mode, num_tokens=num_tokens, start_s=100.0, first_token_s=100.1, end_s=100.0 + seconds, **fields)


def finish(run: Run, ids: list[int], figures: SSDStats) -> None:
    run.tape = Tape()
    run.tape.ids, run.tape.times_ms = ids, [10.0 * (index + 1) for index in range(len(ids))]
    run.stats = figures


def test_what_a_model_wrote_is_text():
    for html in (
        panels.span(Token(EVIL, 3, 1.0, Source.CACHE, EVIL, 0.5)),
        panels.alert(EVIL),
        panels.status_line(EVIL, is_busy=False),
    ):
        elements = Elements(html)
        assert not {"script", "img"} & set(elements.names)
        assert not any(name.startswith("on") for attributes in elements.attributes for name in attributes)
    assert "probability 0.500" in panels.span(Token("a", 3, 1.0, Source.CACHE, "round 1", 0.5))


def test_no_error_takes_no_room():
    assert panels.alert(None) == "" == panels.alert("")


def test_figures_are_those_of_the_statistics():
    rounds = (RoundStats(4, 2, 3, Origin.CACHE), RoundStats(4, 1, 2, Origin.JUST_IN_TIME))
    ar, ssd = Run("AR"), Run("SSD")
    finish(ar, [3] * 11, stats("ar", 2.0))
    finish(ssd, [3] * 11, stats("ssd", 1.0, rounds=rounds))
    figures = panels.figures_of(ssd, ar)
    assert figures.tokens_per_s == pytest.approx(11.0)
    assert figures.speed_up == pytest.approx(2.0)
    assert figures.ttft_ms == pytest.approx(100.0)
    assert figures.tpot_ms == pytest.approx(90.0)  # ten tokens in 0.9 s
    assert figures.tokens_per_round == 2.5
    assert figures.acceptance == ssd.stats.acceptance
    assert figures.hit_rate == ssd.stats.hit_rate
    assert panels.figures_of(ar, ar).speed_up == 1.0
    assert panels.figures_of(ssd, None).speed_up is None


def test_live_figures_come_from_time_stamps():
    run = Run("SSD", Tape())
    run.tape.ids, run.tape.times_ms = [3, 4, 5, 6], [100.0, 200.0, 200.0, 400.0]
    figures = panels.figures_of(run, None)
    assert figures.tokens_per_s == pytest.approx(10.0)
    assert figures.ttft_ms == 100.0
    assert figures.tpot_ms == pytest.approx(100.0)
    assert figures.acceptance is None
    assert panels.figures_of(Run("SD"), None) == panels.Figures()


def test_identical_texts_are_said_to_be(race):
    for run in race.runs:
        finish(run, [3, 4, 5], stats("ar", 1.0, 3))
    assert "All three texts are identical, token for token: 3 tokens" in panels.verdict(race)
    assert 'class="verdict same"' in panels.verdict(race)


@pytest.mark.parametrize(
    ("settings", "words", "kind"),
    [
        (RaceSettings(dtype="bfloat16"), "near-ties may flip. Choose float32", "different"),
        (RaceSettings(dtype="float32"), "this must not happen: please report it", "different"),
        (
            RaceSettings(sampling={"temperature": 1.0}, ssd_config=SSDConfig(verification="token")),
            "each arm draws for itself",
            "neutral",
        ),
    ],
)
def test_different_texts_come_with_a_reason(race, settings, words, kind):
    for run in race.runs:
        finish(run, [3, 4, 5], stats("ar", 1.0, 3))
    race.settings = settings
    race.differences = (Difference("SSD", "AR", 2, 0.412, 0.409),)
    html = panels.verdict(race)
    assert words in html
    assert f'class="verdict {kind}"' in html
    assert "SSD leaves AR&#x27;s text after 2 tokens" in html
    assert ("0.412 and 0.409" in html) == (kind == "different")


def test_panels_before_a_race_have_no_figures():
    html = panels.arena(None)
    assert [each["data-arm"] for each in Elements(html).attributes if each.get("class") == "arm"] == ["AR", "SD", "SSD"]
    assert "None" not in html


def test_every_source_has_a_mark_of_its_own():
    legend = panels.legend()
    for source in Source:
        assert (f"tok {source.value}" in legend) == (source is not Source.PENDING)
