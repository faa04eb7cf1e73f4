"""Accuracy checks: modules for Hugging Face `evaluate`, tasks, and what proves that nothing is lost."""

from __future__ import annotations

from .modules import MODULE_NAMES, load_metric, metric_path, round_columns

__all__ = ["MODULE_NAMES", "load_metric", "metric_path", "round_columns"]
