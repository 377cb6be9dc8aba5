"""Writing a backup.

Law: the file is there whole or not at all, and what was there before stays until then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from forged.errors import ForgedError


def write_whole(name: str, pieces: Iterable[bytes]) -> None:
    """Put the pieces into a file of that name, durably."""
    target = Path(name)
    unfinished = target.with_name(f"{target.name}.part")
    try:
        try:
            with unfinished.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
            _sync_directory(target.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ForgedError(
            "backup_failed", f"{name} cannot be written: {error.strerror}", "name another file"
        ) from error


def _sync_directory(directory: Path) -> None:
    """Make the new name survive a power cut, too."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
