"""Writing a backup, or another file, atomically.

Invariants:
- The file exists completely or not at all; until then a previous file stays.
- Only its owner can read a backup, because it contains the daemon's whole state.
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
    """Write the pieces to a file, durably."""
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
        raise ForgedError(code, f"cannot write {name}: {error.strerror}", "choose another file") from error


def _open_new(name: str, flags: int, mode: int) -> int:
    # A file left by a killed backup may have another mode, or be open in another process.
    Path(name).unlink(missing_ok=True)
    return os.open(name, flags | os.O_EXCL, mode)
