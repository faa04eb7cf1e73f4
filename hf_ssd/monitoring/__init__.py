"""Watching models that run with SSD: figures over the latest rounds, and events when they change."""

from .events import Event, EventKind, Sink
from .monitor import Monitor
from .sinks import JsonlSink, log_sink
from .window import Latency, Window, WindowFigures

__all__ = ["Event", "EventKind", "JsonlSink", "Latency", "Monitor", "Sink", "Window", "WindowFigures", "log_sink"]
