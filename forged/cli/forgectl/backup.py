"""Writing a backup, or another file for somebody to keep.

Law: the file is there whole or not at all, and what was there before stays until then. Nobody but its owner reads a
backup: it holds all that the daemon knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from forged.errors import ForgedError
from forged.file_sync import sync_directory

PRIVATE = 0o600


def write_whole(
    name: str, pieces: Iterable[bytes | memoryview], *, mode: int = PRIVATE, code: str = "backup_failed"
) -> None:
    """Put the pieces into a file of that name, durably."""
    target = Path(name)
    unfinished = target.with_name(f"{target.name}.part")
    try:
        try:
            with open(unfinished, "wb", opener=partial(_open_new, mode=mode)) as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
            sync_directory(target.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ForgedError(code, f"{name} cannot be written: {error.strerror}", "name another file") from error


def _open_new(name: str, flags: int, mode: int) -> int:
    # One that a killed backup left may have another mode, and may be open elsewhere.
    Path(name).unlink(missing_ok=True)
    return os.open(name, flags | os.O_EXCL, mode)
