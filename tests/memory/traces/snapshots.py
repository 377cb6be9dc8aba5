"""Memory snapshots of PyTorch for tests, with the fields that versions 2.1 to 2.9 write."""

from __future__ import annotations

import pickle
from typing import Any

BASE = 0x7F00_0000_0000


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    frames = [{"filename": "train.py", "line": 7, "name": "forward"}]
    return {"action": action, "addr": BASE + address, "size": size, "stream": 0, "time_us": 17, "frames": frames}


def segment(*blocks: tuple[int, str], device: int = 0, address: int = 0) -> dict[str, Any]:
    """A segment with blocks of these sizes and states."""
    of_blocks = [{"size": size, "requested_size": size, "state": state, "frames": []} for size, state in blocks]
    return {"device": device, "address": BASE + address, "total_size": sum(size for size, _ in blocks), "stream": 0,
            "segment_type": "small", "blocks": of_blocks}  # fmt: skip


def snapshot(traces: list[list[dict[str, Any]]], segments: list[dict[str, Any]]) -> bytes:
    value = {"segments": segments, "device_traces": traces, "allocator_settings": {"expandable_segments": False}}
    return pickle.dumps(value)
