"""The values of memory traces: buffers with lifetimes, events, and where a packing puts each buffer.

Invariants:
- Every value is frozen. Times and sizes are integers and exact, also beyond 2**53.
- A buffer is alive over the half-open interval `[lower, upper)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeGuard

import msgspec

from forged.memory.traces.errors import argument_invalid

BufferId = int | str


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """One allocation of a trace."""

    id: BufferId
    lower: int
    """The time of the allocation."""
    upper: int
    """The time of the release."""
    size: int

    def __post_init__(self) -> None:
        if not (isinstance(self.id, str) or is_integer(self.id)):
            raise argument_invalid("id", self.id, "a text or an integer")
        for name in ("lower", "upper", "size"):
            if not is_integer(getattr(self, name)):
                raise argument_invalid(f"{name} of buffer {self.id!r}", getattr(self, name), "an integer")
        if self.upper <= self.lower:
            raise argument_invalid(f"upper of buffer {self.id!r}", self.upper, f"greater than lower, {self.lower}")
        if self.size < 1:
            raise argument_invalid(f"size of buffer {self.id!r}", self.size, "at least 1")


class Event(msgspec.Struct, frozen=True, array_like=True):
    """The beginning or the end of a buffer's life."""

    time: int
    is_allocation: bool
    buffer: Buffer


class Packing(msgspec.Struct, frozen=True):
    """Where each buffer of a trace is."""

    offsets: Mapping[BufferId, int]
    height: int
    """The highest end of a buffer."""
    peak: int
    """The most bytes alive at one time: no packing is lower."""


class Replay(Packing, frozen=True):
    """What an allocation policy makes of a trace."""

    evicted: Mapping[BufferId, int] = msgspec.field(default_factory=dict)
    """The buffers that gave way to others while they were alive, with the time of it."""
    evicted_bytes: int = 0


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def events(buffers: Iterable[Buffer]) -> list[Event]:
    """The events in the order of time: at one time releases first, allocations in the order of the buffers."""
    known: set[BufferId] = set()
    found = []
    for buffer in buffers:
        if buffer.id in known:
            raise argument_invalid("buffers", buffer.id, "buffers with different ids")
        known.add(buffer.id)
        found += [
            Event(buffer.lower, is_allocation=True, buffer=buffer),
            Event(buffer.upper, is_allocation=False, buffer=buffer),
        ]
    return sorted(found, key=lambda event: (event.time, event.is_allocation))


def peak_of(trace: Iterable[Event]) -> int:
    """The most bytes alive at one time."""
    live = peak = 0
    for event in trace:
        live += event.buffer.size if event.is_allocation else -event.buffer.size
        peak = max(peak, live)
    return peak


def checked_capacity(capacity: int) -> int:
    if not is_integer(capacity) or capacity < 0:
        raise argument_invalid("capacity", capacity, "an integer and at least 0")
    return capacity
