"""Pictures of memory: in the terminal, and in files."""

from __future__ import annotations

import shutil
from pathlib import Path

from forged.cli.process import plain
from forged.errors import ConfigError
from forged.memory.errors import MemoryRefused
from forged.memory.pictures import Drawing, rendered

COLUMNS_MAX = 120


def columns() -> int:
    """The width of a picture: that of the terminal, within bounds."""
    return min(shutil.get_terminal_size().columns, COLUMNS_MAX)


def show(text: str) -> None:
    """Print a picture of characters."""
    for line in text.splitlines():
        print(plain(line))


def write(drawing: Drawing, file: str) -> None:
    """Write a picture in the format that the name of the file ends in."""
    try:
        content = rendered(drawing, file)
    except MemoryRefused as error:
        raise ConfigError("picture_format_unknown", error.message, "use .svg or .png") from error
    try:
        Path(file).write_bytes(content)
    except OSError as error:
        raise ConfigError(
            "picture_unwritable", f"{file} cannot be written: {error.strerror}", "choose another file"
        ) from error
