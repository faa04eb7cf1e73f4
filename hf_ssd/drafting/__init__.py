"""Drafting: the assistant's side of speculative speculative decoding."""

from .assistant import AssistantModel
from .engine import DraftEngine
from .graphs import GraphedAssistant
from .making import make_assistant, make_fast_assistant
from .together import Work, work_together

__all__ = [
    "AssistantModel",
    "DraftEngine",
    "GraphedAssistant",
    "Work",
    "make_assistant",
    "make_fast_assistant",
    "work_together",
]
