"""What `hf-ssd check-sampling` can be asked for. Importing this loads no model and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.settings import RunSettings, sampling_arguments
from .cloze import CLOZE
from .statistics import NUM_PERMUTATIONS

RULES = ("token", "block", "coupled")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(RunSettings):
    """Settings of a check of sampling, beyond those of [`RunSettings`].

    Args:
        temperature: Of all samplers, above 0.
        num_prompts: Built-in prompts to sample for, the first ones.
        num_samples: Samples per prompt and sampler.
        rules: Verification rules to check, each in mode SSD.
        bias: Size of the bias of the sampler that has to be caught, in total variation per token.
        significance: Chance of any false alarm that is allowed.
        num_permutations: How often labels are exchanged.
        out: Folder for samples, JSON and report; `None` writes none.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
    """

    temperature: float = 0.7
    num_prompts: int = len(CLOZE)
    num_samples: int = 64
    rules: Sequence[str] = RULES
    bias: float = 0.03
    significance: float = 0.05
    num_permutations: int = NUM_PERMUTATIONS
    max_new_tokens: int = 6
    dtype: str = "float32"
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"`temperature` must be above 0 to sample, but got {self.temperature}.")
        if not 1 <= self.num_prompts <= len(CLOZE):
            raise ValueError(f"`prompts` must be between 1 and {len(CLOZE)}, but got {self.num_prompts}.")
        if self.num_samples < 2:
            raise ValueError(f"`samples` must be at least 2, but got {self.num_samples}.")
        unknown = [rule for rule in self.rules if rule not in RULES]
        if unknown or not self.rules:
            raise ValueError(f"`rules` must be some of {list(RULES)}, but got {unknown or list(self.rules)}.")
        for name in ("bias", "significance"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"`{name}` must lie between 0 and 1, both excluded, but got {getattr(self, name)}.")
        smallest = (1 + len(self.rules) + 1) * 4 / (1 + self.num_permutations)
        if smallest > self.significance:
            raise ValueError(
                f"`permutations` must be large enough for a p-value of {self.significance} after correction, but got "
                f"{self.num_permutations}. Take more."
            )
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise ValueError(f"`out` must be a folder, but {str(self.out)!r} is a file.")

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of generate() that say how tokens are chosen."""
        return sampling_arguments(self.temperature)
