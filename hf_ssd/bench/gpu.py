"""`python -m hf_ssd.bench.gpu`: all ways to generate, on synthetic models of real shapes, within ten minutes of a GPU.

Nothing is downloaded: weights are random, and the assistant agrees with the target as often as it is told to
([`synthetic`]). Texts must be equal in every arm, in bfloat16 too. The arms take turns and their order rotates; each
figure is the median over the repeats. The clock runs around generate(), prefill included.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from ..config import SSDConfig
from ..generation import generate_with_ssd
from ..metrics import SSDStats
from ..runtime.pool import close_worker
from .synthetic import SHAPES, SyntheticForCausalLM

ARMS: dict[str, SSDConfig | None] = {
    "AR": None,
    "HF assisted": None,
    "SD (process)": SSDConfig(mode="sd", backend="process"),
    "SSD (stream)": SSDConfig(backend="stream"),
    "SSD (process)": SSDConfig(backend="process"),
}
WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class GpuBenchSettings:
    """What to run.

    Args:
        target: Name of a shape in [`SHAPES`].
        assistant: Likewise.
        acceptances: Chances that a draft token is right, one table each.
        second_choice: Chance that the assistant's second choice is right where the first is wrong.
        prompt_tokens: Length of the prompt.
        new_tokens: Tokens to generate.
        repeats: Timed calls of each arm.
        dtype: Of both models.
        device: Of the target; `"auto"` is the GPU if there is one. The assistant gets another GPU if there is one.
        arms: Some of [`ARMS`].
        time_limit_s: After this no more repeats are begun: what there is is reported.
    """

    target: str = "8b"
    assistant: str = "1b"
    acceptances: tuple[float, ...] = (0.6, 0.8, 0.9)
    second_choice: float = 0.75
    prompt_tokens: int = 256
    new_tokens: int = 128
    repeats: int = 3
    dtype: str = "bfloat16"
    device: str = "auto"
    arms: tuple[str, ...] = tuple(ARMS)
    time_limit_s: float = 420.0

    def __post_init__(self) -> None:
        for name in ("target", "assistant"):
            if getattr(self, name) not in SHAPES:
                raise ValueError(f"`{name}` must be one of {list(SHAPES)}, but got {getattr(self, name)!r}.")
        unknown = sorted(set(self.arms) - set(ARMS))
        if unknown or not self.arms:
            raise ValueError(f"`arms` must be some of {list(ARMS)}, but got {unknown or 'none'}.")
        if not all(0 <= value <= 1 for value in (*self.acceptances, self.second_choice)):
            raise ValueError(
                f"`acceptances` and `second_choice` must lie between 0 and 1, but got {self.acceptances} and "
                f"{self.second_choice}."
            )
        for name in ("prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {getattr(self, name)}.")


TINY = GpuBenchSettings(
    target="tiny-target",
    assistant="tiny",
    acceptances=(0.8,),
    prompt_tokens=16,
    new_tokens=32,
    repeats=1,
    dtype="float32",
    device="cpu",
)


@dataclass
class ArmFigures:
    """What an arm measured at one acceptance. Times are medians, in milliseconds but for `tokens_per_s`."""

    acceptance: float
    arm: str
    durations_s: list[float] = field(default_factory=list)
    texts: set[tuple[int, ...]] = field(default_factory=set)
    stats: list[SSDStats] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float | None:
        if not self.durations_s:
            return None
        return len(next(iter(self.texts))) / statistics.median(self.durations_s)

    @property
    def degraded(self) -> str | None:
        return next((stats.degraded for stats in self.stats if stats.degraded), None)

    def figure(self, name: str) -> float | None:
        """The median of a figure of [`SSDStats`], where the arm has one."""
        values = [value for stats in self.stats if (value := getattr(stats, name)) is not None]
        return statistics.median(values) if values else None

    def to_dict(self, reference: ArmFigures | None) -> dict[str, Any]:
        names = ("tokens_per_round", "acceptance", "hit_rate", "verify_ms", "wait_ms", "draft_ms", "depth_at_hit")
        return {
            "target_acceptance": self.acceptance,
            "arm": self.arm,
            "tokens_per_s": self.tokens_per_s,
            "durations_s": self.durations_s,
            "times_ar": self.times(reference),
            "is_identical": None if reference is None else self.texts == reference.texts,
            "degraded": self.degraded,
            **{name: self.figure(name) for name in names},
        }

    def times(self, reference: ArmFigures | None) -> float | None:
        """Speed in units of the reference's."""
        if reference is None or not self.tokens_per_s or not reference.tokens_per_s:
            return None
        return self.tokens_per_s / reference.tokens_per_s


class GpuBench:
    """Holds the models and runs the arms.

    Args:
        settings: What to run.
        report: Is told what happens.
    """

    def __init__(self, settings: GpuBenchSettings, report: Callable[[str], None] = lambda text: None) -> None:
        self.settings = settings
        self._report = report
        self._started = time.perf_counter()
        self.target_device, self.assistant_device = _devices(settings.device)
        report(f"making a target of shape {settings.target} on {self.target_device}")
        self._target = self._make(settings.target, self.target_device, seed=0)
        # For transformers' own arms: another object over the same weights, with nothing of SSD on it.
        self._plain_target = copy.copy(self._target)
        report(f"making an assistant of shape {settings.assistant} on {self.assistant_device}")
        self._assistant = self._make(
            settings.assistant, self.assistant_device, seed=1, second_choice=settings.second_choice
        )
        if SHAPES[settings.target].vocab_size != SHAPES[settings.assistant].vocab_size:
            raise ValueError(f"`target` and `assistant` must share a vocabulary; {settings} do not.")
        numbers = torch.randint(100, 500, (1, settings.prompt_tokens), generator=torch.Generator().manual_seed(0))
        self._prompt = numbers.to(self.target_device)

    def run(self) -> list[ArmFigures]:
        """All arms at all acceptances."""
        results = []
        try:
            for acceptance in self.settings.acceptances:
                results += self._run_at(acceptance)
        finally:
            close_worker(self._assistant)
        return results

    def _run_at(self, acceptance: float) -> list[ArmFigures]:
        # Workers have it as a constant, in a copy or in a graph.
        close_worker(self._assistant)
        self._assistant.config.agreement = acceptance
        arms = [ArmFigures(acceptance, arm) for arm in self.settings.arms]
        for figures in arms:
            self._report(f"acceptance {acceptance}: warming up {figures.arm}")
            self._generate(figures.arm, min(WARM_UP_TOKENS, self.settings.new_tokens))
        for repeat in range(self.settings.repeats):
            if repeat and time.perf_counter() - self._started > self.settings.time_limit_s:
                self._report(f"the time is up: {repeat} of {self.settings.repeats} repeats")
                break
            self._report(f"acceptance {acceptance}: repeat {repeat + 1} of {self.settings.repeats}")
            for i in range(len(arms)):
                figures = arms[(i + repeat) % len(arms)]
                text, duration_s, stats = self._generate(figures.arm, self.settings.new_tokens)
                figures.texts.add(text)
                figures.durations_s.append(duration_s)
                if stats is not None:
                    figures.stats.append(stats)
        return arms

    def _generate(self, arm: str, new_tokens: int) -> tuple[tuple[int, ...], float, SSDStats | None]:
        arguments = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(self._prompt)}
        config = ARMS[arm]
        self._synchronize()
        start = time.perf_counter()
        if config is not None:
            ids = generate_with_ssd(
                self._target, inputs=self._prompt, assistant_model=self._assistant, ssd_config=config, **arguments
            )
        else:
            assisted = {"assistant_model": self._assistant} if arm == "HF assisted" else {}
            ids = self._plain_target.generate(self._prompt, **arguments, **assisted)
        self._synchronize()
        duration_s = time.perf_counter() - start
        text = tuple(ids[0, self._prompt.shape[1] :].tolist())
        return text, duration_s, None if config is None else self._target.ssd_stats

    def _make(self, shape: str, device: torch.device, **fields: Any) -> SyntheticForCausalLM:
        return SyntheticForCausalLM.of(
            SHAPES[shape], device=device, dtype=getattr(torch, self.settings.dtype), **fields
        )

    def _synchronize(self) -> None:
        for device in (self.target_device, self.assistant_device):
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def environment(target_device: torch.device) -> dict[str, Any]:
    """Hardware and versions that the figures depend on."""
    is_cuda = target_device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(target_device) if is_cuda else None,
        "num_gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "max_memory_gb": torch.cuda.max_memory_allocated(target_device) / 1e9 if is_cuda else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def to_json(settings: GpuBenchSettings, place: dict[str, Any], results: Sequence[ArmFigures]) -> dict[str, Any]:
    """Everything, ready for `json.dump`."""
    figures = [each.to_dict(_reference(results, each.acceptance)) for each in results]
    return {"settings": asdict(settings), "environment": place, "results": figures}


def to_table(results: Sequence[ArmFigures], acceptance: float) -> Table:
    """The arms at one acceptance."""
    table = Table(title=f"draft tokens right in {acceptance:.0%} of cases")
    for column in ("arm", "tokens/s", "x AR", "tokens/round", "hit rate", "verify ms", "wait ms", "text = AR"):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=column == "arm")
    reference = _reference(results, acceptance)
    for each in results:
        if each.acceptance != acceptance:
            continue
        values = [each.tokens_per_s, each.times(reference)]
        values += [each.figure(name) for name in ("tokens_per_round", "hit_rate", "verify_ms", "wait_ms")]
        identical = "" if reference is None else "yes" if each.texts == reference.texts else "NO"
        shown = ["" if value is None else f"{value:.2f}" for value in values]
        table.add_row(each.arm, *shown, "degraded" if each.degraded else identical)
    return table


def _reference(results: Sequence[ArmFigures], acceptance: float) -> ArmFigures | None:
    return next((each for each in results if each.arm == "AR" and each.acceptance == acceptance), None)


def _devices(requested: str) -> tuple[torch.device, torch.device]:
    """Where target and assistant go."""
    if requested == "auto":
        requested = "cuda:0" if torch.cuda.is_available() else "cpu"
    target = torch.device(requested)
    if target.type != "cuda":
        return target, target
    index = target.index or 0
    return torch.device("cuda", index), torch.device("cuda", (index + 1) % torch.cuda.device_count())


def _parse(arguments: Sequence[str] | None) -> tuple[GpuBenchSettings, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m hf_ssd.bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="shapes and lengths for a CPU, where not given")
    parser.add_argument("--json", type=Path, help="file for all figures")
    for name, value in asdict(GpuBenchSettings()).items():
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"default: {value}"}
        if isinstance(value, tuple):
            options["nargs"], value = "+", value[0]
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), **options)
    given = vars(parser.parse_args(arguments))
    path, is_tiny = given.pop("json"), given.pop("tiny")
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return replace(TINY if is_tiny else GpuBenchSettings(), **{**given, **lists}), path


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Runs the benchmark.

    Returns:
        1 if a text differed from AR's or an assistant failed, else 0.
    """
    settings, path = _parse(arguments)
    console = console or Console()
    bench = GpuBench(settings, console.log)
    results = bench.run()
    place = environment(bench.target_device)
    console.print(place)
    for acceptance in settings.acceptances:
        console.print(to_table(results, acceptance))
    for figures in results:
        if figures.degraded:
            console.print(f"{figures.arm} went on without its assistant: {figures.degraded}")
    report = to_json(settings, place, results)
    if path is not None:
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(any(each["degraded"] or each["is_identical"] is False for each in report["results"]))


if __name__ == "__main__":
    raise SystemExit(main())
