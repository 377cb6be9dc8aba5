"""Draws a packing: each buffer a rectangle from its allocation to its release, at its offset."""

from __future__ import annotations

from collections.abc import Sequence

from forged.memory.pictures.drawing import CHAR_WIDTH, FAINT, PAPER, Drawing, Line, Rectangle, Text, fitting
from forged.memory.pictures.scales import Scale, byte_ticks, ticks
from forged.memory.traces import Buffer, Packing, Replay
from forged.phrases import bytes_text

LIVES = ((0.01, "#9ecae1", "life < 1 %"), (0.1, "#4f9ac8", "< 10 %"), (0.5, "#2e6da4", "< 50 %"))
"""The share of the trace that a buffer lives, its colour and name; longer lives have the last one."""
LONG = ("#173f66", "longer")
EVICTED = "#e8853d"
UNUSED = "#f4f6f8"
CAPACITY = "#c81e1e"
PEAK = "#0b8043"
LEFT, RIGHT, TOP, BOTTOM = 130, 30, 100, 66
"""The margins around the plot."""
CAPACITY_SHOWN_MAX = 1.6
"""A capacity larger than this multiple of the height is told, not drawn."""


def draw_packing(
    buffers: Sequence[Buffer],
    packing: Packing,
    capacity: int | None = None,
    title: str = "",
    width: int = 1280,
    height: int = 720,
) -> Drawing:
    drawing = Drawing(width, height, [Rectangle(0, 0, width, height, PAPER)])
    first = min((buffer.lower for buffer in buffers), default=0)
    last = max((buffer.upper for buffer in buffers), default=1)
    is_capacity_shown = capacity is not None and capacity <= max(packing.height, packing.peak) * CAPACITY_SHOWN_MAX
    top = max(packing.height, packing.peak, capacity if capacity is not None and is_capacity_shown else 0, 1)
    x, y = Scale(first, last, LEFT, width - RIGHT), Scale(0, top, height - BOTTOM, TOP)
    drawing.shapes.append(Rectangle(LEFT, TOP, width - RIGHT - LEFT, height - BOTTOM - TOP, UNUSED))
    _draw_axes(drawing, x, y)
    _draw_buffers(drawing, buffers, packing, x, y)
    entries = [(color, name) for _, color, name in LIVES] + [LONG]
    if isinstance(packing, Replay) and packing.evicted:
        entries.append((EVICTED, f"evicted, {bytes_text(packing.evicted_bytes)}"))
    entries.append((PEAK, f"peak live {bytes_text(packing.peak)}"))
    _draw_level(drawing, y(packing.peak), PEAK)
    if capacity is not None:
        entries.append((CAPACITY, f"capacity {bytes_text(capacity)}" + ("" if is_capacity_shown else " (above)")))
        if is_capacity_shown:
            _draw_level(drawing, y(capacity), CAPACITY)
    drawing.shapes.append(Text(LEFT, 22, fitting(_headline(title, packing), width - LEFT)))
    drawing.legend(44, LEFT, entries)
    return drawing


def _headline(title: str, packing: Packing) -> str:
    ratio = f", {packing.height / packing.peak:.3f} x peak" if packing.peak else ""
    return f"{title}{': ' if title else ''}{len(packing.offsets):,} buffers, height {bytes_text(packing.height)}{ratio}"


def _draw_axes(drawing: Drawing, x: Scale, y: Scale) -> None:
    shapes = drawing.shapes
    for offset in byte_ticks(y.last, 8):
        shapes.append(Line(x.begin, y(offset), x.end, y(offset), FAINT))
        shapes.append(Text(x.begin - 8, y(offset), bytes_text(offset), "end"))
    for time in ticks(x.first, x.last, 8):
        shapes.append(Line(x(time), y.begin, x(time), y.begin + 6))
        if x(time) + len(f"{time:,}") / 2 * CHAR_WIDTH <= drawing.width:
            shapes.append(Text(x(time), y.begin + 18, f"{time:,}", "middle"))
    shapes.append(Text((x.begin + x.end) / 2, y.begin + 46, "time (units of the trace)", "middle"))
    shapes.append(Text(8, y.end - 24, "offset"))
    shapes.append(Line(x.begin, y.begin, x.end, y.begin))
    shapes.append(Line(x.begin, y.end, x.begin, y.begin))


def _draw_buffers(drawing: Drawing, buffers: Sequence[Buffer], packing: Packing, x: Scale, y: Scale) -> None:
    evicted = packing.evicted if isinstance(packing, Replay) else {}
    span = max(x.last - x.first, 1)
    for buffer in buffers:
        offset = packing.offsets.get(buffer.id)
        if offset is None:
            continue
        share = (buffer.upper - buffer.lower) / span
        color = next((color for limit, color, _ in LIVES if share < limit), LONG[0])
        left, top = x(buffer.lower), y(offset + buffer.size)
        right, bottom = x(evicted.get(buffer.id, buffer.upper)), y(offset)
        is_large = right - left >= 4 and bottom - top >= 4
        drawing.shapes.append(
            Rectangle(
                left,
                top,
                max(right - left, 0.5),
                max(bottom - top, 0.5),
                EVICTED if buffer.id in evicted else color,
                PAPER if is_large else "",
            )
        )


def _draw_level(drawing: Drawing, y: float, color: str) -> None:
    drawing.shapes.append(Line(LEFT, y, drawing.width - RIGHT, y, color, is_dashed=True, width=2))
