"""The machine and the versions that figures depend on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from ..runtime import placement


def environment() -> dict[str, Any]:
    """Hardware and versions that the figures depend on."""
    return {
        "processor": _processor_name(),
        "num_cpus": os.cpu_count(),
        "available_cores": placement.available_cores(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
