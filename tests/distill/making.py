"""Small distillations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hf_ssd.config import SSDConfig
from hf_ssd.distill import evaluation
from hf_ssd.distill.results import DistillResult
from hf_ssd.distill.run import distill
from hf_ssd.distill.settings import DistillSettings

SIZES = {"model": {"layers": 1}, "eagle3": {"depth": 3}}


def settings_of(out: Path, target: Path, *, kind: str = "model", **values) -> DistillSettings:
    values = {"dtype": "float32", "max_length": 192, "max_new_tokens": 16, "minutes": 5, "tokens": 60, "epochs": 12,
              "writing_batch_size": 6, "learning_rate": 3e-3, **SIZES[kind], **values}  # fmt: skip
    return DistillSettings(out=out, kind=kind, target=str(target), **values)


class Made:
    """A distillation that was run.

    Args:
        settings: Of it.
        backend: Where the closing evaluation drafts: to start a process takes most of a small run's time.
    """

    def __init__(self, settings: DistillSettings, *, backend: str = "inline") -> None:
        self.settings = settings
        self.said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "SSDConfig", partial(SSDConfig, backend=backend))
            self.result: DistillResult = distill(settings, lambda what, done, total: self.said.append(what))
