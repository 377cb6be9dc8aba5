"""What makes a new file survive a power cut.

Law: the bytes of a file and its name last separately: the one when the file was synced, the other when its directory
was.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, as they are now."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
