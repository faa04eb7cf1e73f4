"""What `hf-ssd doctor` can be asked. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench.settings import DTYPES


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """What to examine, checked in full when the object is made.

    Args:
        model: Name or folder of the target; `None` is the embedded one.
        assistant: Name or folder of the assistant; `None` is the embedded one for the embedded target, none otherwise.
        dtype: Precision of both models.
        probe: Whether to load the models and measure them on some prompts.
        probe_tokens: Most tokens per text of the probe.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
    """

    model: str | None = None
    assistant: str | None = None
    dtype: str = "bfloat16"
    probe: bool = True
    probe_tokens: int = 32

    def __post_init__(self) -> None:
        if self.model is None and self.assistant is not None:
            raise ValueError(
                f"`assistant` needs `model` too, but only {self.assistant!r} was given. Give both, `model` alone, or "
                "neither for the embedded pair."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {list(DTYPES)}, but got {self.dtype!r}.")
        if self.probe_tokens < 2:
            raise ValueError(
                f"`probe_tokens` must be at least 2 to time decoding, but got {self.probe_tokens}. Use --no-probe to "
                "measure nothing."
            )
