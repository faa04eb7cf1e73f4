"""What to prepare, decided from what was measured. No models, no processes."""

from .acceptance import AcceptanceEstimate
from .backups import Answer, Backup, BackupPolicy
from .calibration import Calibration, Event
from .choosing import PlanChooser, PlanMemory
from .costs import Cost, RoundCosts
from .fan_out import plan_fan_out
from .linear_fit import LinearFit
from .memories import PlanMemories
from .planner import Rates, best_step, is_worth_verifying, step_width
from .policies import CallPolicy, needs_policy

__all__ = [
    "AcceptanceEstimate",
    "Answer",
    "Backup",
    "BackupPolicy",
    "Calibration",
    "CallPolicy",
    "Cost",
    "Event",
    "LinearFit",
    "PlanChooser",
    "PlanMemories",
    "PlanMemory",
    "Rates",
    "RoundCosts",
    "best_step",
    "is_worth_verifying",
    "needs_policy",
    "plan_fan_out",
    "step_width",
]
