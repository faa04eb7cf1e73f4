"""Drafting: the assistant's side of speculative speculative decoding."""

from .assistant import AssistantModel
from .engine import DraftEngine
from .graphs import GraphedAssistant, make_assistant

__all__ = ["AssistantModel", "DraftEngine", "GraphedAssistant", "make_assistant"]
