"""Draws packings and blocks with the characters of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forged.memory.model import BlockStatus, MemoryBlock
from forged.memory.pictures import block_map
from forged.memory.pictures.scales import Scale
from forged.memory.traces import Buffer, Packing, Replay
from forged.phrases import bytes_text

SHADES = " ░▒▓█"
MARKS = {BlockStatus.FREE: "·", BlockStatus.ALLOCATED: "█", BlockStatus.PINNED: "▓", BlockStatus.CACHED: "░"}
LABEL_WIDTH = 10
WIDTH_MIN = 24
ROUNDING = 1e-6
"""A share by which a cell may be fuller than the level below without the next one."""


def packing_text(
    buffers: Sequence[Buffer], packing: Packing, capacity: int | None = None, width: int = 80, height: int = 20
) -> str:
    """Offset over time; the shade of a character is the share of its bytes and time that is used."""
    columns = max(width, WIDTH_MIN) - LABEL_WIDTH - 1
    first = min((buffer.lower for buffer in buffers), default=0)
    last = max((buffer.upper for buffer in buffers), default=1)
    top = max(packing.height, height)
    if capacity is not None:
        top = max(top, min(capacity, packing.height * 2))
    used = _used_shares(buffers, packing, Scale(first, last, 0, columns), Scale(0, top, 0, height))
    levels = np.clip(np.ceil(used * (len(SHADES) - 1) - ROUNDING), 0, len(SHADES) - 1).astype(int)
    lines = []
    for row in reversed(range(height)):
        label = bytes_text(top * (row + 1) // height) if row == height - 1 or row % 4 == 3 else ""
        lines.append(f"{label:>{LABEL_WIDTH}}│{''.join(SHADES[level] for level in levels[row])}")
    times = f"{first:,}".ljust(columns - len(f"{last:,}")) + f"{last:,}"
    ratio = f", {packing.height / packing.peak:.3f} × peak" if packing.peak else ""
    within = "" if capacity is None else f", capacity {bytes_text(capacity)}"
    lines += [
        f"{'0 B':>{LABEL_WIDTH}}└{'─' * columns}",
        f"{'time':>{LABEL_WIDTH}} {times}",
        f"height {bytes_text(packing.height)}{ratio}, peak live {bytes_text(packing.peak)}{within}",
    ]
    return "\n".join(lines)


def blocks_text(blocks: Sequence[MemoryBlock], title: str = "", width: int = 80, rows: int = 8) -> str:
    """The memory in rows; a character shows the status that most of its bytes have."""
    columns = max(width, WIDTH_MIN) - LABEL_WIDTH - 1
    total = max((block.offset + block.size for block in blocks), default=0)
    cells = rows * columns
    shares: npt.NDArray[np.float64] = np.zeros((len(MARKS), cells))
    scale = Scale(0, total, 0, cells)
    numbers = {status: number for number, status in enumerate(MARKS)}
    for block in blocks:
        found, share = _covered(scale(block.offset), scale(block.offset + block.size), cells)
        shares[numbers[block.status], found] += share
    marks = np.array(list(MARKS.values()))[shares.argmax(axis=0)].reshape(rows, columns)
    lines = [
        f"{bytes_text(total * row // rows):>{LABEL_WIDTH}}│{''.join(marks[row])}" for row in range(rows if total else 0)
    ]
    named = "  ".join(f"{MARKS[status]} {text}" for status, text in block_map.legend(blocks))
    return "\n".join([block_map.headline(blocks, title), *lines, named])


def _used_shares(buffers: Sequence[Buffer], packing: Packing, x: Scale, y: Scale) -> npt.NDArray[np.float64]:
    """Which share of each cell is used, by row from the bottom and by column."""
    evicted = packing.evicted if isinstance(packing, Replay) else {}
    used = np.zeros((int(y.end), int(x.end)))
    for buffer in buffers:
        offset = packing.offsets.get(buffer.id)
        if offset is not None:
            rows, of_rows = _covered(y(offset), y(offset + buffer.size), int(y.end))
            end = evicted.get(buffer.id, buffer.upper)
            columns, of_columns = _covered(x(buffer.lower), x(end), int(x.end))
            used[rows, columns] += np.outer(of_rows, of_columns)
    return used


def _covered(first: float, last: float, cells: int) -> tuple[slice, npt.NDArray[np.float64]]:
    """The cells between the two, and which share of each is."""
    begin, end = int(first), min(int(last) + 1, cells)
    edges = np.arange(begin, end + 1)
    return slice(begin, end), np.clip(np.minimum(edges[1:], last) - np.maximum(edges[:-1], first), 0.0, 1.0)
