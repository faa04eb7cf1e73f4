"""What to prepare, decided from what was measured. No models, no processes."""

from .acceptance import AcceptanceEstimate
from .backups import Answer, Backup, BackupPolicy
from .calibration import Calibration, Event
from .fan_out import plan_fan_out
from .linear_fit import LinearFit
from .modes import ModePolicy
from .planner import Rates, best_step, is_worth_verifying, step_width

__all__ = [
    "AcceptanceEstimate",
    "Answer",
    "Backup",
    "BackupPolicy",
    "Calibration",
    "Event",
    "LinearFit",
    "ModePolicy",
    "Rates",
    "best_step",
    "is_worth_verifying",
    "plan_fan_out",
    "step_width",
]
