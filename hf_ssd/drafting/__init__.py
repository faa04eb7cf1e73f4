"""Drafting: the assistant's side of speculative speculative decoding."""

from .assistant import AssistantModel
from .engine import DraftEngine

__all__ = ["AssistantModel", "DraftEngine"]
