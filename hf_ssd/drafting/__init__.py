"""Drafting: the assistant's side of speculative speculative decoding."""

from .assistant import AssistantModel, make_assistant
from .engine import DraftEngine

__all__ = ["AssistantModel", "DraftEngine", "make_assistant"]
