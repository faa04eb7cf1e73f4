"""What an examination finds out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .probe import Probe


class Status(str, Enum):
    """What a finding means for SSD."""

    FINE = "fine"
    NOTE = "note"  # it works, with less than there could be
    REFUSED = "refused"  # it does not work


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        section: What it belongs to: "versions", "machine", "checks", "abilities" or "probe".
        subject: What was looked at.
        status: What it means.
        text: What was found.
    """

    section: str
    subject: str
    status: Status
    text: str


@dataclass
class Findings:
    """Findings in the order in which they were made."""

    items: list[Finding] = field(default_factory=list)

    def add(self, section: str, subject: str, text: str, status: Status = Status.FINE) -> None:
        self.items.append(Finding(section, subject, status, text))

    @contextlib.contextmanager
    def refusals(self, section: str, subject: str) -> Iterator[Callable[[str], None]]:
        """Takes what a check raises down as a refusal, and otherwise what the body says it found.

        Yields:
            A function that takes the text for the case that nothing is raised.
        """
        texts: list[str] = []
        try:
            yield texts.append
        except (ValueError, OSError, ImportError, MemoryError, KeyError, AttributeError) as error:
            self.add(section, subject, _one_line(error), Status.REFUSED)
        else:
            for text in texts:
                self.add(section, subject, text)

    @property
    def refused(self) -> Finding | None:
        """The first refusal."""
        return next((each for each in self.items if each.status is Status.REFUSED), None)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `hf-ssd doctor` found out; [`to_dict`] is what `--json` prints.

    Args:
        target: Name of the target.
        assistant: Name of the assistant, if there is one.
        dtype: Precision of both.
        findings: What was looked at.
        probe: What was measured, if anything was.
        verdict: One line, with the next step.
        is_refused: Whether SSD does not work here.
    """

    target: str
    assistant: str | None
    dtype: str
    findings: tuple[Finding, ...]
    probe: Probe | None
    verdict: str
    is_refused: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _one_line(error: BaseException) -> str:
    """What a user can use of an error: transformers' go on for paragraphs, ours end with a remedy for calls."""
    from ..checks import REMEDY

    text = str(error) or repr(error)
    return " ".join(text.removesuffix(REMEDY).strip().split("\n\n")[0].split())
