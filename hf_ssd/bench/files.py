"""The files that a benchmark leaves."""

from __future__ import annotations

import json
from pathlib import Path

from ..trace import write_chrome_trace
from .figures import BenchResult
from .markdown import write_report
from .plots import write_plots


def write_files(result: BenchResult, folder: Path) -> tuple[str, ...]:
    """Writes JSON, time line, plots and report into a folder that exists. Files of those names are replaced.

    Returns:
        Their names.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If one cannot be written.
    """
    # The figures first: whatever fails after that, they are not lost.
    (folder / "bench.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    names = ["bench.json"]
    if result.trace is not None:
        write_chrome_trace(result.trace, folder / "trace.json")
        names.append("trace.json")
    plots = write_plots(result, folder)
    (folder / "report.md").write_text(write_report(result, plots), encoding="utf-8")
    return (*names, "report.md", *(name for name, _ in plots))
