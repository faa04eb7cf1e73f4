"""Figures of a race over time, as tables for gradio's plots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pandas as pd

from hf_ssd import Origin

from .race import Run

WINDOW = 8  # rounds that a point is the mean of
# Blue, orange and green of Okabe and Ito, which colour-blind people tell apart.
COLORS = {"AR": "#0072B2", "SD": "#E69F00", "SSD": "#009E73"}


def tokens_per_round_over_time(runs: Sequence[Run]) -> pd.DataFrame:
    """Columns seconds, tokens and mode; each point is the mean of the rounds up to it, eight at most."""
    rows = []
    for run in runs:
        window: deque[int] = deque(maxlen=WINDOW)
        for each in run.tape.rounds if run.tape is not None and run.name != "AR" else ():
            window.append(each.stats.num_emitted)
            rows.append((each.end_ms / 1e3, sum(window) / len(window), run.name))
    return pd.DataFrame(rows, columns=["seconds", "tokens", "mode"])


def hit_rate_over_time(runs: Sequence[Run]) -> pd.DataFrame:
    """Columns seconds, hit rate and mode, of SSD, likewise."""
    rows = []
    for run in runs:
        window: deque[bool] = deque(maxlen=WINDOW)
        for each in run.tape.rounds if run.tape is not None and run.name == "SSD" else ():
            is_hit = each.stats.origin is Origin.CACHE
            if is_hit or each.stats.miss is not None:
                window.append(is_hit)
                rows.append((each.end_ms / 1e3, sum(window) / len(window), run.name))
    return pd.DataFrame(rows, columns=["seconds", "hit rate", "mode"])


def acceptance_by_position(runs: Sequence[Run]) -> pd.DataFrame:
    """Columns position, acceptance and mode: how often a draft token was right when all before it were."""
    rows = [
        (position, rate, run.name)
        for run in runs
        if run.stats is not None and run.name != "AR"
        for position, rate in enumerate(run.stats.acceptance_by_position, 1)
    ]
    return pd.DataFrame(rows, columns=["position", "acceptance", "mode"])
