"""What target and assistant did in a call, as an SVG with one lane for each."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from hf_ssd import Origin, Span, SSDStats, measure_overlap

LEFT, TOP, LANE, GAP, BOTTOM = 12, 34, 44, 30, 26
MOST_WIDTH = 8000
# A round should be wide enough to be pointed at.
ROUND_WIDTH = 46

# Of each lane: what is drawn, from the back to the front, and its class. Other spans take no time to speak of.
TARGET_SPANS = {"prefill": "prefill", "wait": "wait", "verify": "verify", "emit": "emit"}
ASSISTANT_SPANS = {
    "prefill": "prefill",
    "just in time": "jit",
    "draft step": "draft",
    "project outcomes": "project",
    "rank outcomes": "project",
    "look up": "emit",
}


def time_line(name: str, stats: SSDStats | None) -> str:
    """The time line of a call that ran with `SSDConfig(trace=True)`, below a sentence on the overlap.

    Args:
        name: Of the arm.
        stats: Its figures.
    """
    if stats is None or not stats.verifier_spans:
        return ""
    spans = [*stats.verifier_spans, *stats.speculator_spans]
    start = min(each.start_ns for each in spans)
    end = max(each.end_ns for each in spans)
    scale = _pixels_per_ms(stats, (end - start) / 1e6)
    width = LEFT * 2 + (end - start) / 1e6 * scale
    height = TOP + 2 * LANE + GAP + BOTTOM

    def x_of(time_ns: int) -> float:
        return LEFT + (time_ns - start) / 1e6 * scale

    assistant_top = TOP + LANE + GAP
    parts = [
        *_axis((end - start) / 1e6, scale, height),
        *_lane(stats.verifier_spans, TARGET_SPANS, TOP, x_of),
        *_lane(stats.speculator_spans, ASSISTANT_SPANS, assistant_top, x_of),
        *_answers(stats, x_of),
    ]
    label = f"Time line of {name}: target above, assistant below"
    return (
        f'<figure class="timeline" data-arm="{escape(name)}"><figcaption><strong>{escape(name)}</strong> '
        f"{escape(_sentence(stats))}</figcaption>"
        f'<div class="lanes"><div class="names" aria-hidden="true"><span>target</span><span>assistant</span></div>'
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}. Scrolls sideways.">'
        f'<svg role="img" aria-label="{escape(label)}" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg></div></div>'
        "</figure>"
    )


def key() -> str:
    """What the colours of the time line mean."""
    items = (
        ("verify", "target verifies"),
        ("wait", "target waits"),
        ("prefill", "reading the prompt"),
        ("draft", "assistant drafts"),
        ("project", "assistant ranks outcomes"),
        ("jit", "drafting just in time"),
    )
    swatches = "".join(f'<li><span class="swatch {kind}"></span> {text}</li>' for kind, text in items)
    return (
        f'<ul class="legend" aria-label="Time line colours">{swatches}'
        '<li><span class="mark hit">●</span> hit</li><li><span class="mark miss">×</span> miss</li></ul>'
    )


def _pixels_per_ms(stats: SSDStats, duration_ms: float) -> float:
    per_round = ((stats.verify_ms or 0.0) + (stats.wait_ms or 0.0)) or 40.0
    return min(max(ROUND_WIDTH / per_round, 0.02), MOST_WIDTH / max(duration_ms, 1.0))


def _axis(duration_ms: float, scale: float, height: int) -> Iterable[str]:
    step = next((each for each in (50, 100, 200, 500, 1000, 2000, 5000, 10000) if each * scale >= 70), 60_000)
    for time_ms in range(0, int(duration_ms) + 1, step):
        x = LEFT + time_ms * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM + 4}"/>'
        label = f"{time_ms / 1e3:g} s" if step >= 100 else f"{time_ms} ms"
        yield f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{label}</text>'


def _lane(spans: Iterable[Span], kinds: dict[str, str], top: int, x_of: object) -> Iterable[str]:
    assert callable(x_of)
    order = list(kinds)
    known = sorted((each for each in spans if each.name in kinds), key=lambda each: order.index(each.name))
    for each in known:
        x, width = x_of(each.start_ns), max(x_of(each.end_ns) - x_of(each.start_ns), 0.6)
        details = "".join(f", {name} {value}" for name, value in each.args)
        title = f"{each.name}: {(each.end_ns - each.start_ns) / 1e6:.1f} ms{details}"
        yield (
            f'<rect class="{kinds[each.name]}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}">'
            f"<title>{escape(title)}</title></rect>"
        )


def _answers(stats: SSDStats, x_of: object) -> Iterable[str]:
    """A mark above each verification: whether its speculation came from the cache."""
    assert callable(x_of)
    verifications = [each for each in stats.verifier_spans if each.name == "verify"]
    for each, answer in zip(verifications, stats.rounds, strict=False):
        x = x_of(each.start_ns)
        if stats.mode == "ssd" and answer.origin is Origin.CACHE:
            title = f"hit: {answer.num_draft_tokens} draft tokens were ready, {answer.num_accepted} accepted"
            yield f'<text class="mark hit" x="{x:.1f}" y="{TOP - 12}"><title>{title}</title>●</text>'
        elif stats.mode == "ssd" and answer.miss is not None:
            title = f"miss ({answer.miss.value}): the target waited {answer.wait_ms:.1f} ms"
            yield f'<text class="mark miss" x="{x:.1f}" y="{TOP - 12}"><title>{title}</title>×</text>'


def _sentence(stats: SSDStats) -> str:
    if not stats.speculator_spans:
        return "has no assistant: each forward of the target gives one token."
    waited = f"the target waited {sum(each.wait_ms for each in stats.rounds):.0f} ms in all"
    if stats.mode != "ssd":
        return f"drafts only when the outcome is known: {waited}."
    overlap = measure_overlap(stats)
    hidden = 100 * (overlap.share_of_draft or 0.0)
    return (
        f"drafted ahead for {overlap.draft_ms:.0f} ms, {hidden:.0f} % of it while the target computed; "
        f"{stats.num_hits} hits, {stats.num_misses} misses; {waited}."
    )
