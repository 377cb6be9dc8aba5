"""The refusals of memory traces.

Invariants:
- What is impossible and what was not found within a budget are different errors.
- An error about a file names the line or the position, and the fix.
"""

from __future__ import annotations

from forged.errors import Problem
from forged.memory.errors import MemoryRefused


class TraceRefused(MemoryRefused):
    """The base of these refusals."""


class TraceInvalid(TraceRefused):
    """An argument or a trace has values that are never allowed."""


class TraceFileInvalid(TraceInvalid):
    """A file is no trace of a known format, or is damaged."""


class TraceTooLarge(TraceRefused):
    """A trace has more buffers or values than one process reads."""


class TraceDoesNotFit(TraceRefused):
    """It is proven that the buffers need more than the capacity, or a policy has no place for one of them."""


class FitUnknown(TraceRefused):
    """Neither a packing nor a proof that there is none was found within the budget."""

    height: int = 0
    """Of the lowest packing that was found."""


def argument_invalid(name: str, value: object, wanted: str) -> TraceInvalid:
    return TraceInvalid("trace_argument_invalid", str(Problem(name, value, wanted)), f"correct {name}")


def event_invalid(number: int, buffer: object, problem: str) -> TraceInvalid:
    text = f"event {number} is about buffer {buffer!r}: {problem}"
    return TraceInvalid("trace_event_invalid", text, "pass what `events(buffers)` returns")


def file_invalid(place: str, problem: str, fix: str) -> TraceFileInvalid:
    return TraceFileInvalid("trace_file_invalid", f"{place}: {problem}", fix)


def too_large(place: str, what: str, most: int) -> TraceTooLarge:
    return TraceTooLarge("trace_too_large", f"{place}: more than {most:,} {what}", "use a part of the trace")


def peak_beyond_capacity(peak: int, capacity: int) -> TraceDoesNotFit:
    text = f"the buffers need {peak:,} bytes at one time; the capacity is {capacity:,}"
    return TraceDoesNotFit("trace_peak_beyond_capacity", text, f"use a capacity of at least {peak:,}")


def no_packing(peak: int, capacity: int) -> TraceDoesNotFit:
    text = f"no packing of the buffers is at most {capacity:,} bytes high, although their peak is {peak:,}"
    return TraceDoesNotFit("trace_packing_impossible", text, "use a larger capacity")


def fit_unknown(capacity: int, height: int, nodes: int) -> FitUnknown:
    text = f"no packing within {capacity:,} bytes was found in {nodes:,} nodes; the lowest has {height:,}"
    error = FitUnknown("trace_fit_unknown", text, f"use a capacity of {height:,}, or a larger nodes_max")
    error.height = height
    return error


def no_place(buffer: object, size: int, time: int, largest: int, capacity: int) -> TraceDoesNotFit:
    text = f"buffer {buffer!r} of {size:,} bytes has no place at time {time}: the largest hole has {largest:,}"
    fix = f"use a larger capacity than {capacity:,}, the policy `lru`, or a plan"
    return TraceDoesNotFit("trace_no_place", text, fix)
