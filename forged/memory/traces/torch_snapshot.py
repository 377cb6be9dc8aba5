"""Reads memory snapshots of PyTorch: what `torch.cuda.memory._dump_snapshot` writes after `_record_memory_history`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forged.memory.traces.errors import file_invalid, too_large
from forged.memory.traces.live_buffers import LiveBuffers
from forged.memory.traces.model import Buffer, is_integer
from forged.pickle_reader import VALUES_MAX, PickleRefused, read_pickle

BLOCKS_MAX = 5_000_000
SHOWN_MAX = 20
RECORD_ANEW = "use a snapshot as torch.cuda.memory._dump_snapshot writes it, after _record_memory_history()"
_ALIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


def read_torch_snapshot(data: bytes, device: int | None = None) -> list[Buffer]:
    """The buffers of one device; by default of the only one that has any.

    A buffer lives from its allocation to the completion of its release. Blocks in use whose allocation was not
    recorded have been alive since the beginning.
    """
    try:
        snapshot = read_pickle(data)
    except PickleRefused as error:
        place = f"byte {error.position}"
        if error.is_too_large:
            raise too_large(place, "values", VALUES_MAX) from None
        raise file_invalid(place, error.problem, RECORD_ANEW) from None
    if not isinstance(snapshot, dict):
        raise file_invalid("snapshot", f"a dict is wanted, got a {type(snapshot).__name__}", RECORD_ANEW)
    traces = [_list("device_traces", trace) for trace in _list("device_traces", snapshot.get("device_traces", []))]
    segments = _list("segments", snapshot.get("segments", []))
    chosen = _chosen_device(traces, segments, device)
    live = LiveBuffers()
    trace = traces[chosen] if chosen < len(traces) else []
    released = _release_of(trace)
    for number, entry in enumerate(trace):
        _record(live, f"entry {number} of device {chosen}", entry, released)
    for place, address, size in _blocks_in_use(segments, chosen):
        live.present_from_the_beginning(place, address, size)
    return live.buffers()


def _chosen_device(traces: list[list[Any]], segments: list[Any], device: int | None) -> int:
    present = {number for number, trace in enumerate(traces) if trace}
    present |= {_number(f"segment {number}", segment, "device", 0) for number, segment in enumerate(segments)}
    known = ", ".join(map(str, sorted(present)[:SHOWN_MAX]))
    if device is not None:
        if device not in present:
            raise file_invalid(
                "snapshot", f"it has no device {device}", f"use one of {known}" if known else RECORD_ANEW
            )
        return device
    if len(present) != 1:
        problem = f"it has the devices {known}" if known else "it has no allocations"
        raise file_invalid("snapshot", problem, "name one of them" if known else RECORD_ANEW)
    return present.pop()


def _release_of(trace: list[Any]) -> str:
    """The action that ends a buffer; `skip_actions` may have left the completions of releases out."""
    has_completed = any(isinstance(entry, dict) and entry.get("action") == "free_completed" for entry in trace)
    return "free_completed" if has_completed else "free_requested"


def _record(live: LiveBuffers, place: str, entry: Any, released: str) -> None:
    action = _dict(place, entry).get("action")
    if action == "alloc":
        live.allocate(place, _number(place, entry, "addr"), _number(place, entry, "size"))
    elif action == released:
        live.release(place, _number(place, entry, "addr"), _number(place, entry, "size"))


def _blocks_in_use(segments: list[Any], device: int) -> Iterator[tuple[str, int, int]]:
    """Place, address and size; older versions of PyTorch name the address of the segment only."""
    blocks = 0
    for number, segment in enumerate(segments):
        place = f"segment {number}"
        if _number(place, segment, "device", 0) != device:
            continue
        address = _number(place, segment, "address")
        for at, block in enumerate(_list(place, segment.get("blocks", []))):
            where = f"block {at} of {place}"
            # A pickle may have one segment many times at little cost.
            blocks += 1
            if blocks > BLOCKS_MAX:
                raise too_large(where, "blocks", BLOCKS_MAX)
            size = _number(where, block, "size")
            if block.get("state") in _ALIVE:
                yield where, _number(where, block, "address", address), size
            address += size


def _list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise file_invalid(place, f"a list is wanted, got a {type(value).__name__}", RECORD_ANEW)
    return value


def _dict(place: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise file_invalid(place, f"a dict is wanted, got a {type(value).__name__}", RECORD_ANEW)
    return value


def _number(place: str, entry: Any, key: str, default: int | None = None) -> int:
    value = _dict(place, entry).get(key, default)
    if not is_integer(value) or not 0 <= value < 2**64:
        problem = f"{key} must be an integer from 0 to 2**64 - 1, got a {type(value).__name__}"
        raise file_invalid(place, problem, RECORD_ANEW)
    return value
