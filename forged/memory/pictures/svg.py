"""Writes a drawing as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from forged.memory.pictures.drawing import CHAR_HEIGHT, Drawing, Line, Rectangle, Text


def to_svg(drawing: Drawing) -> str:
    size = f'width="{drawing.width}" height="{drawing.height}" viewBox="0 0 {drawing.width} {drawing.height}"'
    font = f'font-family="monospace" font-size="{CHAR_HEIGHT}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *_elements(drawing), "</svg>\n"])


def _elements(drawing: Drawing) -> Iterator[str]:
    for shape in drawing.shapes:
        match shape:
            case Rectangle(left, top, width, height, fill, outline):
                stroke = f' stroke="{outline}" stroke-width="0.6"' if outline else ""
                box = f'x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
                yield f'<rect {box} fill="{fill}"{stroke}/>'
            case Line(left, top, right, bottom, color, is_dashed, width):
                ends = f'x1="{left:.2f}" y1="{top:.2f}" x2="{right:.2f}" y2="{bottom:.2f}"'
                dashes = ' stroke-dasharray="10 6"' if is_dashed else ""
                yield f'<line {ends} stroke="{color}" stroke-width="{width}"{dashes}/>'
            case Text(x, y, text, anchor, color):
                place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" dominant-baseline="central"'
                yield f'<text {place} fill="{color}">{_plain(text)}</text>'


def _plain(text: str) -> str:
    """XML has no control characters and no surrogates, not even escaped ones."""
    return escape("".join(char if char.isprintable() else "?" for char in text))
