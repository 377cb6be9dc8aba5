"""Writes a drawing as PNG."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from forged.memory.pictures import font
from forged.memory.pictures.drawing import CHAR_WIDTH, Drawing, Line, Rectangle, Text

_DOT = 2
"""Pixels of a dot of the font."""
_DASH, _PERIOD = 10, 16
_ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}

Pixels = npt.NDArray[np.uint8]


def to_png(drawing: Drawing) -> bytes:
    pixels = np.full((drawing.height, drawing.width, 3), 255, np.uint8)
    for shape in drawing.shapes:
        match shape:
            case Rectangle():
                _fill_rectangle(pixels, shape)
            case Line():
                _draw_line(pixels, shape)
            case Text():
                _draw_text(pixels, shape)
    return _encoded(pixels)


def _fill_rectangle(pixels: Pixels, shape: Rectangle) -> None:
    left, right = _span(shape.left, shape.left + shape.width, pixels.shape[1])
    top, bottom = _span(shape.top, shape.top + shape.height, pixels.shape[0])
    pixels[top:bottom, left:right] = _color(shape.fill)
    if shape.outline:
        # On the right and at the top only: so neighbours have one line between them.
        pixels[top:bottom, right - 1 : right] = _color(shape.outline)
        pixels[top : top + 1, left:right] = _color(shape.outline)


def _draw_line(pixels: Pixels, shape: Line) -> None:
    left, right = _span(shape.left, max(shape.right, shape.left + shape.width), pixels.shape[1])
    top, bottom = _span(shape.top, max(shape.bottom, shape.top + shape.width), pixels.shape[0])
    target = pixels[top:bottom, left:right]
    if shape.is_dashed:
        along = 1 if right - left > bottom - top else 0
        is_drawn = np.arange(target.shape[along]) % _PERIOD < _DASH
        target = np.moveaxis(target, along, 0)
        target[is_drawn] = _color(shape.color)
    else:
        target[:] = _color(shape.color)


def _draw_text(pixels: Pixels, shape: Text) -> None:
    left = round(shape.x - len(shape.text) * CHAR_WIDTH * _ANCHORS[shape.anchor])
    top = round(shape.y - font.HEIGHT * _DOT / 2)
    for number, char in enumerate(shape.text):
        rows, columns = np.nonzero(np.kron(font.dots(char), np.ones((_DOT, _DOT), bool)))
        rows, columns = rows + top, columns + left + number * CHAR_WIDTH
        is_inside = (rows >= 0) & (rows < pixels.shape[0]) & (columns >= 0) & (columns < pixels.shape[1])
        pixels[rows[is_inside], columns[is_inside]] = _color(shape.color)


def _span(begin: float, end: float, limit: int) -> tuple[int, int]:
    """The pixels from one edge to the other one, at least one."""
    first = min(max(round(begin), 0), limit - 1)
    return first, min(max(round(end), first + 1), limit)


def _color(code: str) -> tuple[int, int, int]:
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)


def _encoded(pixels: Pixels) -> bytes:
    height, width, _ = pixels.shape
    # Each row begins with the number of its filter; 0 is none.
    rows = np.zeros((height, 1 + width * 3), np.uint8)
    rows[:, 1:] = pixels.reshape(height, width * 3)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
