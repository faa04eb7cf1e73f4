"""Our modules for Hugging Face `evaluate`: where they lie, and what to feed them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..types import Origin

if TYPE_CHECKING:
    from ..metrics import SSDStats

MODULE_NAMES = ("losslessness", "distribution_match", "acceptance")


def metric_path(name: str) -> str:
    """What `evaluate.load()` takes for one of our modules; nothing is fetched.

    ```python
    losslessness = evaluate.load(metric_path("losslessness"))
    losslessness.add_batch(predictions=ssd_tokens, references=ar_tokens)
    losslessness.compute()
    ```

    Args:
        name: One of `MODULE_NAMES`.

    Raises:
        ValueError: If there is no such module.
    """
    if name not in MODULE_NAMES:
        raise ValueError(f"`name` must be one of {list(MODULE_NAMES)}, but got {name!r}.")
    return str(Path(__file__).parent / "metrics" / name)


def load_metric(name: str, config_name: str | None = None) -> Any:
    """One of our modules, loaded by `evaluate`, its inputs kept in memory.

    Raises:
        ImportError: If `evaluate` is not installed.
    """
    try:
        import evaluate
    except ImportError:
        raise ImportError('This needs the package `evaluate`: pip install "hf-ssd[eval]".') from None
    return evaluate.load(metric_path(name), config_name, keep_in_memory=True)


def round_columns(stats: SSDStats) -> dict[str, list[int]]:
    """The inputs of `acceptance` for a call's rounds."""
    return {
        "accepted": [r.num_accepted for r in stats.rounds],
        "reached": [r.num_reached for r in stats.rounds],
        "emitted": [r.num_emitted for r in stats.rounds],
        "hit": [
            1 if r.origin is Origin.CACHE else 0 if stats.mode == "ssd" and r.miss is not None else -1
            for r in stats.rounds
        ],
    }
