"""Memory traces: the lifetimes of buffers, replayed against a pool, and planned when all of them are known."""

from forged.memory.traces.errors import (
    FitUnknown,
    TraceDoesNotFit,
    TraceFileInvalid,
    TraceInvalid,
    TraceRefused,
    TraceTooLarge,
)
from forged.memory.traces.model import Buffer, BufferId, Event, Packing, Replay, events
from forged.memory.traces.planner import plan, planned_blocks
from forged.memory.traces.replay import replay
from forged.memory.traces.trace_files import TraceFile, read_trace

__all__ = [
    "Buffer",
    "BufferId",
    "Event",
    "FitUnknown",
    "Packing",
    "Replay",
    "TraceDoesNotFit",
    "TraceFile",
    "TraceFileInvalid",
    "TraceInvalid",
    "TraceRefused",
    "TraceTooLarge",
    "events",
    "plan",
    "planned_blocks",
    "read_trace",
    "replay",
]
