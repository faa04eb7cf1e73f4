"""What to prepare, decided from what was measured. No models, no processes."""

from .acceptance import AcceptanceEstimate
from .fan_out import plan_fan_out

__all__ = ["AcceptanceEstimate", "plan_fan_out"]
