"""A drawing: rectangles, lines and texts in pixels, from which SVG and PNG are made alike."""

from __future__ import annotations

from dataclasses import dataclass, field

INK = "#1f2933"
FAINT = "#d5dae0"
PAPER = "#ffffff"
CHAR_WIDTH, CHAR_HEIGHT = 12, 14
"""Of a character of a text."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    left: float
    top: float
    width: float
    height: float
    fill: str
    """As `#rrggbb`."""
    outline: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal or a vertical line."""

    left: float
    top: float
    right: float
    bottom: float
    color: str = INK
    is_dashed: bool = False
    width: int = 1


@dataclass(frozen=True, slots=True)
class Text:
    """A text that begins, is centred or ends at `x`, with its middle at the height `y`."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    """`start`, `middle` or `end`."""
    color: str = INK


@dataclass(slots=True)
class Drawing:
    """What is drawn, the first shape at the bottom."""

    width: int
    height: int
    shapes: list[Rectangle | Line | Text] = field(default_factory=list)

    def legend(self, top: float, left: float, entries: list[tuple[str, str]]) -> None:
        """Colour and text of each entry, side by side, in as many lines as are needed."""
        x = left
        for color, text in entries:
            width = CHAR_HEIGHT + 8 + (len(text) + 2) * CHAR_WIDTH
            if x + width > self.width and x > left:
                x, top = left, top + CHAR_HEIGHT + 8
            self.shapes.append(Rectangle(x, top, CHAR_HEIGHT, CHAR_HEIGHT, color, INK))
            self.shapes.append(Text(x + CHAR_HEIGHT + 8, top + CHAR_HEIGHT / 2, text))
            x += width


def fitting(text: str, width: float) -> str:
    """The text, shortened to so many pixels; control characters are replaced."""
    chars = max(int(width) // CHAR_WIDTH, 0)
    plain = "".join(char if char.isprintable() else "?" for char in text[: chars + 1])
    return plain if len(plain) <= chars else f"{plain[: max(chars - 2, 0)]}.."
