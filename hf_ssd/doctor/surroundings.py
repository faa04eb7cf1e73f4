"""Versions and machine, before anything is loaded."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from .findings import Findings, Status

# As in pyproject.toml, which is not there where the package is installed.
SUPPORTED = {"python": ">=3.10", "torch": ">=2.6", "transformers": ">=5.17,<5.25", "accelerate": ">=1.2"}


def examine_versions(findings: Findings) -> None:
    """Adds a finding for each version that matters."""
    try:
        findings.add("versions", "hf_ssd", version("hf_ssd"))
    except PackageNotFoundError:
        findings.add("versions", "hf_ssd", "from its source")
    for package, supported in SUPPORTED.items():
        try:
            found = platform.python_version() if package == "python" else version(package)
        except PackageNotFoundError:
            findings.add("versions", package, f"not installed; {supported} is needed", Status.REFUSED)
            continue
        if SpecifierSet(supported).contains(found, prereleases=True):
            findings.add("versions", package, found)
        else:
            findings.add("versions", package, f"{found}, which was not tested: supported is {supported}", Status.NOTE)


def examine_machine(findings: Findings) -> None:
    """Adds findings on devices and cores."""
    from ..runtime.placement import available_cores, format_bytes, free_memory, split_threads
    from ..runtime.process import is_supported

    free = ", ".join(f"{device} with {format_bytes(size)} free" for device, size in free_memory().items())
    findings.add("machine", "devices", free)
    cores = available_cores()
    target_threads, assistant_threads = split_threads(None, None, cores)
    if cores > 1:
        split = f"{cores} cores: {target_threads} for the target, {assistant_threads} for the assistant"
        findings.add("machine", "threads", split)
    else:
        findings.add("machine", "threads", "one core: on the CPU, target and assistant cannot overlap", Status.NOTE)
    if not is_supported():
        text = "no POSIX system: the assistant drafts in a thread, which overlaps less than a process"
        findings.add("machine", "assistant's place", text, Status.NOTE)
