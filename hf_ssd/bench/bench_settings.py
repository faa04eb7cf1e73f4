"""What `hf-ssd bench` can be asked for. Importing this loads no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ..config import SSDConfig
from .prompts import Prompt
from .settings import BENCH_ARM_NAMES, SSD, RunSettings, check_temperature
from .suites import LONG, SHORT_PROMPT_TOKENS, read_suite, sample_evenly

TEMPERATURES = (0.0, 0.5, 0.7, 1.0)
DRAFT_LENGTHS = (3, 5, 8)
LONG_PROMPT_TOKENS = (4096,)
WORD_FIELDS = ("backup",)  # of SSDConfig, where "none" is a word and not None
VARIANT_PREFIX = f"{SSD}: "  # begins the name of an SSD arm with settings of its own


@dataclass(frozen=True, kw_only=True)
class BenchSettings(RunSettings):
    """Settings of a benchmark, beyond those of [`RunSettings`].

    Args:
        suite: Where the prompts come from, as `read_suite` takes it.
        sample: Take so many prompts, spread evenly over the categories; `None` takes all.
        prompt_tokens: Prompt lengths of the suite `"long"`, beside `SHORT_PROMPT_TOKENS`.
        temperatures: What to measure at; 0 decodes greedily.
        draft_lengths: What assisted generation is tried with, beside its defaults.
        variants: More SSD arms: fields of [`SSDConfig`] that differ from the SSD arm's, by the variant's name.
        batch_sizes: Rows per call to measure throughput with, at the first temperature; none by default.
        replay: Whether to record rounds and try every fan-out on them.
        stop_at_eos: Let EOS end a text, as it does for a user. Otherwise it is a token like any other, so that all
            texts have `max_new_tokens` tokens in every arm.
        out: Folder for JSON, report and plots; `None` writes none.

    Raises:
        ValueError: If a value is not allowed. The message names field, rule, value and remedy.
        OSError: If the suite cannot be read.
        ImportError: If a package that the suite or `out` needs is missing.
    """

    KNOWN_ARMS: ClassVar[tuple[str, ...]] = BENCH_ARM_NAMES

    suite: str = "code"
    sample: int | None = None
    prompt_tokens: Sequence[int] | None = None
    temperatures: Sequence[float] = TEMPERATURES
    draft_lengths: Sequence[int] = DRAFT_LENGTHS
    variants: Mapping[str, Mapping[str, Any]] | None = None
    batch_sizes: Sequence[int] = ()
    replay: bool = True
    stop_at_eos: bool = False
    arms: Sequence[str] = BENCH_ARM_NAMES
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_lengths()
        if not self.temperatures:
            raise ValueError("`temperatures` must hold at least one number, but is empty. 0 decodes greedily.")
        if any(size < 1 for size in self.batch_sizes):
            raise ValueError(f"`batch_sizes` must be at least 1, but got {list(self.batch_sizes)}.")
        for temperature in self.temperatures:
            check_temperature("temperatures", temperature)
        for name, values in (self.variants or {}).items():
            check_variant(name, values, self.ssd_config)
        if self.out is not None:
            _check_out(self.out)
        _ = self.prompts  # reads the suite, so that what is wrong with it is said before a model is loaded

    def _check_lengths(self) -> None:
        if any(length < 1 for length in self.draft_lengths):
            raise ValueError(f"`draft_lengths` must be at least 1, but got {list(self.draft_lengths)}.")
        if self.prompt_tokens is None:
            return
        if self.suite != LONG:
            raise ValueError(
                f"`prompt_tokens` is for the suite {LONG!r}, but got {list(self.prompt_tokens)} with {self.suite!r}. "
                f"Leave it out, or use the suite {LONG!r}."
            )
        if not self.prompt_tokens or min(self.prompt_tokens) < 1:
            raise ValueError(f"`prompt_tokens` must be at least 1, but got {list(self.prompt_tokens)}.")

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts to run."""
        lengths = LONG_PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        prompts = read_suite(self.suite, sorted({SHORT_PROMPT_TOKENS, *lengths}))
        return prompts if self.sample is None else sample_evenly(prompts, self.sample)

    @property
    def ssd_variants(self) -> dict[str, dict[str, Any]]:
        """The variants by the names of their arms."""
        return {f"{VARIANT_PREFIX}{name}": dict(values) for name, values in (self.variants or {}).items()}


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """A variant from `"name:field=value,field=value"`.

    Values are numbers, `none`, `true`, `false` or words; a list of numbers is written `4/2/1`.

    Raises:
        ValueError: If the text has another form.
    """
    name, colon, assignments = text.partition(":")
    pairs = [part.partition("=") for part in assignments.split(",") if part.strip()]
    if not (name.strip() and colon and pairs) or any(not (field.strip() and equals) for field, equals, _ in pairs):
        raise ValueError(
            f'`variant` must have the form "name:field=value,field=value", but got {text!r}. '
            'For example "full vocabulary:draft_vocab_size=none".'
        )
    values = {field.strip(): value.strip() for field, _, value in pairs}
    return name.strip(), {
        field: value if field in WORD_FIELDS else _parse_value(value) for field, value in values.items()
    }


def check_variant(name: str, values: Mapping[str, Any], config: SSDConfig) -> None:
    """Refuses a variant whose fields or values are none of [`SSDConfig`]'s.

    Raises:
        ValueError: If one is not.
    """
    known = [field.name for field in fields(SSDConfig)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"`variant` must set fields of SSDConfig ({known}), but {name!r} sets {unknown}.")
    try:
        replace(config, **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`variant` {name!r}: {error}") from None


def _parse_value(text: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if "/" in text:
        return tuple(_parse_value(part) for part in text.split("/"))
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _check_out(out: Path) -> None:
    from importlib.util import find_spec

    if out.exists() and not out.is_dir():
        raise ValueError(f"`out` must be a folder, but {str(out)!r} is a file.")
    if find_spec("matplotlib") is None:
        raise ImportError('`out` draws plots, which needs the package matplotlib: pip install "hf-ssd[bench]".')
