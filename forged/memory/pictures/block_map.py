"""Draws the blocks of a pool: its memory in rows, from the lowest offset to the highest one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from forged.memory.model import BlockStatus, MemoryBlock
from forged.memory.pictures.drawing import CHAR_WIDTH, INK, PAPER, Drawing, Rectangle, Text, fitting
from forged.memory.pictures.scales import Scale
from forged.phrases import bytes_text

COLORS = {
    BlockStatus.FREE: "#e8ecf0",
    BlockStatus.ALLOCATED: "#2e6da4",
    BlockStatus.PINNED: "#6b3fa0",
    BlockStatus.CACHED: "#f0b43c",
}
TEXT_COLORS = {BlockStatus.ALLOCATED: PAPER, BlockStatus.PINNED: PAPER}
LEFT, RIGHT, TOP, BOTTOM = 130, 30, 100, 30
ROW_GAP = 10


def draw_blocks(
    blocks: Sequence[MemoryBlock], title: str = "", width: int = 1280, height: int = 720, rows: int = 12
) -> Drawing:
    """The blocks, free ones too, in the order of their offsets; a tensor's name is in its block if it fits."""
    drawing = Drawing(width, height, [Rectangle(0, 0, width, height, PAPER)])
    total = max((block.offset + block.size for block in blocks), default=0)
    rows = max(min(rows, total), 1)
    per_row = -(-total // rows) or 1
    row_height = (height - TOP - BOTTOM) / rows - ROW_GAP
    for row in range(rows):
        top = TOP + row * (row_height + ROW_GAP)
        drawing.shapes.append(Text(LEFT - 8, top + row_height / 2, bytes_text(row * per_row), "end"))
    for block in blocks:
        for row, first, last in _pieces(block, per_row):
            x = Scale(row * per_row, (row + 1) * per_row, LEFT, width - RIGHT)
            top = TOP + row * (row_height + ROW_GAP)
            _draw_piece(drawing, block, x(first), x(last), top, row_height)
    drawing.shapes.append(Text(LEFT, 22, fitting(headline(blocks, title), width - LEFT)))
    drawing.shapes.append(Text(8, TOP - 8, "offset"))
    drawing.legend(44, LEFT, [(COLORS[status], text) for status, text in legend(blocks)])
    return drawing


def headline(blocks: Sequence[MemoryBlock], title: str) -> str:
    total = sum(block.size for block in blocks)
    used = sum(block.size for block in blocks if block.status is not BlockStatus.FREE)
    share = f", {used / total:.0%} in use" if total else ""
    return f"{title}{': ' if title else ''}{bytes_text(total)}{share}, {len(blocks):,} blocks"


def legend(blocks: Iterable[MemoryBlock]) -> list[tuple[BlockStatus, str]]:
    """Each status with its bytes and its number of blocks."""
    sizes: dict[BlockStatus, list[int]] = {status: [] for status in COLORS}
    for block in blocks:
        sizes[block.status].append(block.size)
    return [(status, f"{status} {bytes_text(sum(found))} in {len(found):,}") for status, found in sizes.items()]


def _pieces(block: MemoryBlock, per_row: int) -> Iterator[tuple[int, int, int]]:
    """The row, the first byte and the end of each part of a block."""
    first, end = block.offset, block.offset + block.size
    while first < end:
        row = first // per_row
        last = min(end, (row + 1) * per_row)
        yield row, first, last
        first = last


def _draw_piece(drawing: Drawing, block: MemoryBlock, left: float, right: float, top: float, height: float) -> None:
    width = max(right - left, 1.0 if block.status is not BlockStatus.FREE else 0.0)
    outline = PAPER if width >= 4 else ""
    drawing.shapes.append(Rectangle(left, top, width, height, COLORS[block.status], outline))
    name = block.tensor_id or ""
    if name and width >= 4 * CHAR_WIDTH:
        color = TEXT_COLORS.get(block.status, INK)
        drawing.shapes.append(Text(left + 6, top + height / 2, fitting(name, width - 12), color=color))
