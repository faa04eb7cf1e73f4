"""`hf-ssd doctor`: before anyone waits, whether a pair fits, what would be refused and why, and what to expect."""

from __future__ import annotations

from .examination import examine
from .findings import Diagnosis, Finding, Status
from .settings import DoctorSettings

__all__ = ["Diagnosis", "DoctorSettings", "Finding", "Status", "examine"]
