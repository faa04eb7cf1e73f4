"""The race as HTML. Every text that a model or a person wrote is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .race import Difference, Race, RaceSettings, Run
from .tokens import Source, Token

WHAT_ARMS_DO = {
    "AR": "plain decoding: one target forward per token",
    "SD": "the assistant drafts, then the target verifies; one always waits",
    "SSD": "the assistant drafts for likely outcomes while the target verifies",
}

LEGEND = {
    Source.CACHE: ("speculation cache", "drafted before the outcome was known (a hit)"),
    Source.BACKUP: ("backup", "drafted just in time, while the target waited"),
    Source.NGRAM: ("n-gram backup", "copied after a miss, from the text or from other outcomes' drafts"),
    Source.BONUS: ("bonus token", "the target's own, one per round"),
    Source.PLAIN: ("target alone", "no draft was verified with it"),
}


@dataclass(frozen=True)
class Figures:
    """What a panel shows below its text. `None` is "not known", or "has none"."""

    tokens_per_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_per_round: float | None = None
    acceptance: float | None = None
    hit_rate: float | None = None
    speed_up: float | None = None


def figures_of(run: Run, reference: Run | None) -> Figures:
    """The figures of an arm: from its statistics once it is over, from time stamps and rounds before.

    Args:
        run: The arm.
        reference: AR, if it is in the race.
    """
    stats, tape = run.stats, run.tape
    if stats is not None:
        ar = reference.stats.tokens_per_s if reference is not None and reference.stats is not None else None
        decode = stats.decode_tokens_per_s
        return Figures(
            tokens_per_s=stats.tokens_per_s,
            ttft_ms=stats.ttft_ms,
            tpot_ms=None if not decode else 1e3 / decode,
            tokens_per_round=1.0 if run.name == "AR" else stats.tokens_per_round,
            acceptance=stats.acceptance,
            hit_rate=stats.hit_rate,
            speed_up=None if not ar or stats.tokens_per_s is None else stats.tokens_per_s / ar,
        )
    if tape is None or not tape.times_ms:
        return Figures()
    times, rounds = list(tape.times_ms), [each.stats for each in list(tape.rounds)]
    speed = len(times) * 1e3 / times[-1] if times[-1] else None
    reached = sum(each.num_reached for each in rounds)
    answered = [each for each in rounds if each.origin.value == "cache" or each.miss is not None]
    hits = sum(each.origin.value == "cache" for each in answered)
    ar = reference.stats.tokens_per_s if reference is not None and reference.stats is not None else None
    return Figures(
        tokens_per_s=speed,
        ttft_ms=times[0],
        tpot_ms=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        tokens_per_round=sum(each.num_emitted for each in rounds) / len(rounds) if rounds else None,
        acceptance=sum(each.num_accepted for each in rounds) / reached if reached else None,
        hit_rate=hits / len(answered) if run.name == "SSD" and answered else None,
        speed_up=speed / ar if speed and ar else None,
    )


def arena(race: Race | None, arms: Sequence[str] = tuple(WHAT_ARMS_DO)) -> str:
    """All panels.

    Args:
        race: `None` before the first.
        arms: Names of the panels while there is no race.
    """
    if race is None:
        panels = [panel(Run(name), [], Figures(), "") for name in arms]
    else:
        reference = next((run for run in race.runs if run.name == "AR"), None)
        panels = [panel(run, race.tokens(run), figures_of(run, reference), state_of(run, race)) for run in race.runs]
    is_over = "true" if race is not None and race.is_over else "false"
    return f'<div class="arena" data-over="{is_over}">{"".join(panels)}</div>'


def state_of(run: Run, race: Race) -> str:
    """One word on an arm."""
    if run.is_over:
        begun = [each for each in race.runs if each.tape is not None]
        return "stopped" if race.is_stopped and begun[-1] is run else "done"
    if race.is_over:
        return "not run" if run.tape is None else "stopped"
    return "waiting" if run.tape is None else "running"


def panel(run: Run, tokens: Sequence[Token], figures: Figures, state: str) -> str:
    """One arm: its text, its state and its figures."""
    end_ms = run.stats.duration_s * 1e3 if run.stats is not None else 0.0
    spans = "".join(span(token) for token in tokens)
    cursor = '<span class="cursor" aria-hidden="true"></span>' if state == "running" else ""
    name = run.name
    return (
        f'<section class="arm" data-arm="{name}" data-end="{end_ms:.1f}" aria-label="{name}">'
        f'<header><h3>{name}</h3><span class="state" data-state="{escape(state)}">{escape(state)}</span></header>'
        f'<p class="what">{WHAT_ARMS_DO[name]}</p>'
        f'<div class="tokens" tabindex="0" role="group" aria-label="Text of {name}. Arrow keys go through its tokens.">'
        f"{spans}{cursor}</div>"
        '<p class="inspector">Point at a token, or use the arrow keys in the text.</p>'
        f'<div class="track" aria-hidden="true"><div class="fill"></div></div>'
        f'<dl class="figures">{figure_list(figures)}</dl></section>'
    )


def figure_list(figures: Figures) -> str:
    """The figures as terms and values."""
    rows = (
        ("tokens-per-s", "tokens/s", number(figures.tokens_per_s, 1), "tokens per second end to end"),
        ("speed-up", "against AR", number(figures.speed_up, 2, "×"), "its tokens/s over those of AR"),
        ("ttft", "first token", number(figures.ttft_ms, 0, " ms"), "time to first token"),
        ("tpot", "per token", number(figures.tpot_ms, 1, " ms"), "time per output token after the first"),
        ("per-round", "tokens/round", number(figures.tokens_per_round, 2), "tokens per target forward"),
        ("acceptance", "acceptance", share(figures.acceptance), "share of tested draft tokens that were right"),
        ("hit-rate", "hit rate", share(figures.hit_rate), "share of outcomes that were prepared for"),
    )
    return "".join(
        f'<div data-figure="{key}" title="{escape(what)}"><dt>{term}</dt><dd>{value}</dd></div>'
        for key, term, value, what in rows
    )


def span(token: Token) -> str:
    """A token with what is known of it."""
    note = token.note
    if token.probability is not None:
        note += f", probability {token.probability:.3f}"
    text = escape(token.text)
    return (
        f'<span class="tok {token.source.value}" data-t="{token.at_ms:.1f}" title="{escape(note, quote=True)}">'
        f"{text}</span>"
    )


def verdict(race: Race) -> str:
    """Whether the texts are the same, as was checked, and what to make of it."""
    runs = [run for run in race.runs if run.is_over]
    if len(runs) < 2:
        text, kind = "One text alone: there is nothing to compare it with.", "neutral"
    elif not race.differences:
        count = "Both" if len(runs) == 2 else f"All {'three' if len(runs) == 3 else len(runs)}"
        length = min(run.num_tokens for run in runs)
        cut = ", as far as they go," if race.is_stopped else ""
        text, kind = f"{count} texts{cut} are identical, token for token: {length} tokens, checked.", "same"
    else:
        text = " ".join(tell(each, race.settings) for each in race.differences)
        kind = "different" if race.settings.promises_identity else "neutral"
        text += " " + reason(race.settings)
    mark = {"same": "✓", "different": "≠", "neutral": "•"}[kind]
    return f'<p class="verdict {kind}" role="status"><span aria-hidden="true">{mark}</span> {escape(text)}</p>'


def tell(difference: Difference, settings: RaceSettings) -> str:
    """A difference in words."""
    text = f"{difference.arm} leaves {difference.reference}'s text after {difference.position} tokens"
    if settings.promises_identity and difference.probability:
        chances = f"{difference.probability:.3f} and {difference.other_probability:.3f}"
        text += f", where the two tokens have probability {chances}"
    return text + "."


def reason(settings: RaceSettings) -> str:
    """Why texts may differ."""
    if not settings.promises_identity:
        return (
            f'Under the rule "{settings.ssd_config.rule}" each arm draws for itself: the texts differ, and each '
            'follows the target\'s distribution exactly. "coupled" gives all arms the same text.'
        )
    if settings.dtype != "float32":
        return (
            f"In {settings.dtype} several tokens in one forward are rounded differently from one at a time, so that "
            "near-ties may flip. Choose float32 to see the same text."
        )
    return "In float32 this must not happen: please report it."


def legend() -> str:
    """What the marks of tokens mean."""
    items = "".join(
        f'<li><span class="tok {source.value}">{name}</span>: {escape(what)}</li>'
        for source, (name, what) in LEGEND.items()
    )
    return f'<ul class="legend" aria-label="Where tokens came from">{items}</ul>'


def news(status: str, *, is_busy: bool = False, error: str | None = None, verdict: str = "") -> str:
    """What is going on, what went wrong, and what came out."""
    return status_line(status, is_busy=is_busy) + alert(error) + verdict


def alert(message: str | None) -> str:
    """An error for the person, or nothing."""
    return "" if not message else f'<p class="alert" role="alert"><strong>Error.</strong> {escape(message)}</p>'


def status_line(text: str, *, is_busy: bool) -> str:
    """What is going on."""
    # No moving bar: a browser on the same cores would take them from what is measured.
    return f'<p class="status{" busy" if is_busy else ""}" role="status">{escape(text)}</p>'


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A figure, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def share(value: float | None) -> str:
    """A share in percent, or a dash."""
    return "–" if value is None else f"{100 * value:.0f} %"
