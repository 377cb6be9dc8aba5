"""Turns a drawing into the content of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from forged.memory.errors import argument_invalid
from forged.memory.pictures.drawing import Drawing
from forged.memory.pictures.png import to_png
from forged.memory.pictures.svg import to_svg

FORMATS: Mapping[str, Callable[[Drawing], bytes]] = {"png": to_png, "svg": lambda drawing: to_svg(drawing).encode()}


def rendered(drawing: Drawing, file_name: str) -> bytes:
    """The drawing in the format that the name of the file ends in."""
    render = FORMATS.get(PurePath(file_name).suffix[1:].lower())
    if render is None:
        raise argument_invalid("file_name", file_name, f"a name that ends in .{' or .'.join(FORMATS)}")
    return render(drawing)
