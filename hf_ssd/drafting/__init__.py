"""Drafting: the assistant's side of speculative speculative decoding."""

from .assistant import AssistantModel, make_assistant
from .engine import DraftEngine
from .graphs import GraphedAssistant, make_fast_assistant

__all__ = ["AssistantModel", "DraftEngine", "GraphedAssistant", "make_assistant", "make_fast_assistant"]
