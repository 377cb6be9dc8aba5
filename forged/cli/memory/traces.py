"""`forgectl memory plan` and `replay`: what a trace of buffers needs, computed in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forged.cli.forgectl import tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.memory import pictures
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import ConfigError
from forged.memory.errors import MemoryRefused
from forged.memory.pictures import draw_packing, packing_text
from forged.memory.traces import (
    FitUnknown,
    Packing,
    TraceDoesNotFit,
    TraceFile,
    TraceRefused,
    events,
    plan,
    read_trace,
    replay,
)
from forged.memory.traces.planner import NODES_MAX
from forged.phrases import bytes_text

COLUMNS = ("policy", "capacity", "fits", "height", "height/peak", "evicted", "evicted bytes", "problem")


def plan_trace(options: Options) -> int:
    trace = _read(options)
    capacity = options.capacity
    packing: Packing | None = None
    problem: TraceRefused | None = None
    try:
        packing = plan(
            trace.buffers, capacity, NODES_MAX if options.nodes_max is None else options.nodes_max, options.alignment
        )
    except (TraceDoesNotFit, FitUnknown) as refused:
        problem = refused
    except MemoryRefused as refused:
        raise _misused(refused) from refused
    reply = _about(options, trace) | {"capacity": capacity} | _outcome(trace, packing, problem)
    _draw(options, trace, packing, capacity)

    def show() -> None:
        _print_plan(reply)
        _print_picture(trace, packing, capacity)

    answer(options, reply, show)
    return EXIT_OK if packing else EXIT_FAILED


def _print_plan(reply: Row) -> None:
    is_fitting = reply["fits"]
    fields = {
        "file": reply["file"],
        "buffers": f"{reply['buffers']:,}",
        "capacity": "any" if reply["capacity"] is None else _exact(reply["capacity"]),
        "fits": "unknown" if is_fitting is None else "yes" if is_fitting else "no",
    }
    if is_fitting:
        ratio = _ratio(reply["height"], reply["peak"])
        fields |= {"peak": _exact(reply["peak"]), "height": f"{_exact(reply['height'])}, {ratio} × the peak"}
    else:
        fields |= {"problem": reply["problem"], "fix": reply["fix"]}
    tables.pairs(fields)


def replay_trace(options: Options) -> int:
    trace = _read(options)
    capacities: Sequence[int | None] = options.capacity or [None]
    policies = options.policy or ["best_fit"]
    is_one = len(capacities) == len(policies) == 1
    if options.picture and not is_one:
        raise ConfigError("usage_wrong", "a picture shows one replay", "give one --policy and one --capacity")
    found = [_replayed(trace, capacity, policy, options.alignment) for capacity in capacities for policy in policies]
    replays = [row for row, _ in found]
    packing = found[0][1] if is_one else None
    _draw(options, trace, packing, capacities[0])

    def show() -> None:
        tables.table(list(map(_replay_row, replays)), COLUMNS, "no replays")
        _print_picture(trace, packing, capacities[0])

    answer(options, _about(options, trace) | {"replays": replays}, show)
    return EXIT_OK if all(one["fits"] for one in replays) else EXIT_FAILED


def _replayed(trace: TraceFile, capacity: int | None, policy: str, alignment: int) -> tuple[Row, Packing | None]:
    packing: Packing | None = None
    problem: TraceRefused | None = None
    evicted: dict[str, Any] = {"evicted": [], "evicted_bytes": 0}
    try:
        packing = found = replay(events(trace.buffers), capacity, policy, alignment)
        evicted = {
            "evicted": [{"id": one, "time": at} for one, at in found.evicted.items()],
            "evicted_bytes": found.evicted_bytes,
        }
    except TraceDoesNotFit as refused:
        problem = refused
    except MemoryRefused as refused:
        raise _misused(refused) from refused
    return {"policy": policy, "capacity": capacity} | _outcome(trace, packing, problem) | evicted, packing


def _replay_row(found: Row) -> Row:
    fits, capacity = found["fits"], found["capacity"]
    return {
        "policy": found["policy"],
        "capacity": "any" if capacity is None else f"{capacity:,}",
        "fits": fits,
        "height": f"{found['height']:,}" if fits else None,
        "height/peak": _ratio(found["height"], found["peak"]) if fits else None,
        "evicted": len(found["evicted"]),
        "evicted bytes": bytes_text(found["evicted_bytes"]),
        "problem": found["problem"],
    }


def _draw(options: Options, trace: TraceFile, packing: Packing | None, capacity: int | None) -> None:
    if options.picture and packing is not None:
        drawing = draw_packing(trace.buffers, packing, capacity, Path(options.file).name)
        pictures.write(drawing, options.picture)


def _print_picture(trace: TraceFile, packing: Packing | None, capacity: int | None) -> None:
    if packing is not None and trace.buffers:
        print()
        pictures.show(packing_text(trace.buffers, packing, capacity, width=pictures.columns()))


def _read(options: Options) -> TraceFile:
    try:
        return read_trace(Path(options.file), options.device)
    except OSError as error:
        text = f"{options.file} cannot be read: {error.strerror}"
        raise ConfigError("trace_unreadable", text, "check the path and its permissions") from error
    except TraceRefused as error:
        raise _misused(error, f"{options.file}, ") from error


def _misused(error: MemoryRefused, place: str = "") -> ConfigError:
    """A fault of the file or of an option is a local problem, and no refusal of a daemon."""
    return ConfigError(error.code, f"{place}{error.message}", error.fix)


def _about(options: Options, trace: TraceFile) -> Row:
    return {"file": options.file, "format": trace.format, "buffers": len(trace.buffers)}


def _outcome(trace: TraceFile, packing: Packing | None, problem: TraceRefused | None) -> Row:
    """Where the buffers go, or why not; `fits` is null if neither is known."""
    if packing is not None:
        offsets = [{"id": one.id, "offset": packing.offsets[one.id], "size": one.size} for one in trace.buffers]
        found: Row = {"fits": True, "height": packing.height, "peak": packing.peak, "offsets": offsets}
        return found | {"problem": None, "fix": None}
    assert problem is not None
    fits = None if isinstance(problem, FitUnknown) else False
    return {
        "fits": fits, "height": None, "peak": None, "offsets": [], "problem": problem.message, "fix": problem.fix,
    }  # fmt: skip


def _exact(count: int) -> str:
    return f"{count:,} bytes ({bytes_text(count)})"


def _ratio(height: int, peak: int) -> str:
    return f"{height / peak:.3f}" if peak else tables.NONE
