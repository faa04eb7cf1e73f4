"""What `hf-ssd evaluate` can be asked for. Importing this loads no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ..bench.bench_settings import VARIANT_PREFIX, check_variant
from ..bench.settings import AR, ARM_NAMES, RunSettings, check_temperature, sampling_arguments
from .tasks import TASKS, Item, read_items

DEFAULT_ARMS = (AR, "sd", "ssd")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(RunSettings):
    """Settings of an evaluation, beyond those of [`RunSettings`].

    Args:
        suites: Tasks, each as its name or as `"NAME=SOURCE"` with a JSONL file or `hub:` and a data set.
        limits: Items per task, the first ones: one number for all tasks or one for each; none takes all.
        temperature: 0 decodes greedily, anything above samples.
        seeds: How often each item is sampled, with successive seeds from `seed` on.
        variants: More SSD arms: fields of [`SSDConfig`] that differ from the SSD arm's, by the variant's name.
        variant_limit: Items per task for these; `None` takes as many as for the others.
        out: Folder for samples, JSON and report; `None` writes none.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
        OSError: If a suite cannot be read.
        ImportError: If a package is missing.
    """

    KNOWN_ARMS: ClassVar[tuple[str, ...]] = ARM_NAMES

    suites: Sequence[str] = ("gsm8k", "humaneval")
    limits: Sequence[int] = ()
    temperature: float = 0.0
    seeds: int = 1
    variants: Mapping[str, Mapping[str, Any]] | None = None
    variant_limit: int | None = None
    max_new_tokens: int = 256
    arms: Sequence[str] = DEFAULT_ARMS
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if AR not in self.arms:
            raise ValueError(f"`arms` must hold {AR!r}, which the others are compared with, but got {list(self.arms)}.")
        check_temperature("temperature", self.temperature)
        for name in ("limits", "seeds", "variant_limit"):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else (value,):
                if number is not None and number < 1:
                    raise ValueError(f"`{name}` must be at least 1, but got {number}.")
        if len(self.limits) > 1 and len(self.limits) != len(self.suites):
            raise ValueError(
                f"`limits` must be one number, or one for each of the {len(self.suites)} suites, but got "
                f"{list(self.limits)}."
            )
        if self.temperature == 0 and self.seeds > 1:
            raise ValueError(
                f"`seeds` must be 1 when decoding greedily, where all are the same, but got {self.seeds}. Give a "
                "temperature above 0 too."
            )
        for name, values in (self.variants or {}).items():
            check_variant(name, values, self.ssd_config)
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise ValueError(f"`out` must be a folder, but {str(self.out)!r} is a file.")
        _ = self.items  # reads the suites, so that what is wrong with them is said before a model is loaded

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The items to do, task by task."""
        items: list[Item] = []
        for index, suite in enumerate(self.suites):
            name, _, source = suite.partition("=")
            if name not in TASKS:
                raise ValueError(
                    f"`suite` must be one of {list(TASKS)}, or NAME=FILE for one of them, but got {suite!r}."
                )
            needed = TASKS[name].needs
            if needed is not None and find_spec(needed) is None:
                raise ImportError(f'The suite {name!r} needs the package `{needed}`: pip install "hf-ssd[eval]".')
            limit = self.limits[index % len(self.limits)] if self.limits else None
            items += read_items(TASKS[name], source or None, limit)
        if not items:
            raise ValueError(f"`suite` must name at least one task of {list(TASKS)}, but is empty.")
        return tuple(items)

    @property
    def ssd_variants(self) -> dict[str, dict[str, Any]]:
        """The variants by the names of their arms."""
        return {f"{VARIANT_PREFIX}{name}": dict(values) for name, values in (self.variants or {}).items()}

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of generate() that say how tokens are chosen."""
        return sampling_arguments(self.temperature)
