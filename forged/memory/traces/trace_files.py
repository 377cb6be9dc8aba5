"""Reads a trace from a file of any known format; the content tells which."""

from __future__ import annotations

from pathlib import Path

import msgspec

from forged.memory.traces.csv_files import LIFETIME_COLUMNS, RMM_COLUMNS, columns_of, read_lifetimes, read_rmm_log
from forged.memory.traces.errors import file_invalid, too_large
from forged.memory.traces.model import Buffer
from forged.memory.traces.torch_snapshot import read_torch_snapshot

BYTES_MAX = 1 << 29
LIFETIMES, RMM, TORCH = "lifetimes", "rmm", "torch"
_PICKLE = b"\x80"
"""How a pickle of protocol 2 or newer begins."""


class TraceFile(msgspec.Struct, frozen=True):
    """What a file has."""

    format: str
    """`lifetimes`, `rmm` or `torch`."""
    buffers: list[Buffer]


def read_trace(path: Path, device: int | None = None) -> TraceFile:
    """The trace in a file; `device` chooses one of a PyTorch snapshot. Errors of the file system are raised as such."""
    with path.open("rb") as file:
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise too_large(str(path), "bytes", BYTES_MAX)
    return parse_trace(data, device)


def parse_trace(data: bytes, device: int | None = None) -> TraceFile:
    """The trace in the content of a file."""
    if data.startswith(_PICKLE):
        return TraceFile(TORCH, read_torch_snapshot(data, device))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise file_invalid(f"byte {error.start}", "the file is neither text nor a pickle", _KNOWN) from None
    lines = text.splitlines()
    header = columns_of(next((line for line in lines if line.strip()), ""))
    if set(LIFETIME_COLUMNS) <= set(header):
        return TraceFile(LIFETIMES, read_lifetimes(lines))
    if set(RMM_COLUMNS) <= set(header):
        return TraceFile(RMM, read_rmm_log(lines))
    raise file_invalid("line 1", f"the columns are unknown, got {','.join(header)[:60]!r}", _KNOWN)


_KNOWN = (
    f"use a CSV with the columns {','.join(LIFETIME_COLUMNS)}, a log of RMM ({','.join(RMM_COLUMNS)}), or a memory "
    "snapshot of PyTorch"
)
