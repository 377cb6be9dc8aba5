"""Small file systems that tests fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BLOCK = bytes(4096)


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[Path]:
    """A file system of its own in a new directory; skips the test where nothing can be mounted."""
    place.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, left: int = 0) -> Path:
    """Fill the disk with a file but for some blocks; returns the file."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(BLOCK)
    os.truncate(filler, filler.stat().st_size - left * len(BLOCK))
    assert shutil.disk_usage(disk).free == left * len(BLOCK)
    return filler
