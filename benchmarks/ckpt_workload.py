"""The arrays that the checkpoint benchmarks save, and the directory they save to.

It needs only numpy, because torch's processes import it in an environment of their own. All subjects save the same
arrays to the same disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
GIB = 1 << 30
DISK = Path("/var/tmp")
COLUMNS = 1024
ITEM_BYTES = 4
SEED = 7

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Some float32 arrays of one shape."""

    count: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return self.count * int(np.prod(self.shape)) * ITEM_BYTES

    @property
    def gib(self) -> float:
        """The same in GiB."""
        return self.nbytes / GIB

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments for a process that makes the same arrays."""
        return [str(self.count), *map(str, self.shape)]

    def names(self) -> list[str]:
        """The names of the arrays."""
        return [f"layer.{number:05}.weight" for number in range(self.count)]

    def arrays(self) -> Iterator[np.ndarray[Any, Any]]:
        """The arrays one by one, with reproducible random bytes."""
        random = np.random.default_rng(SEED)
        for _ in range(self.count):
            array = np.empty(self.shape, np.float32)
            array.view(np.uint8).reshape(-1)[:] = np.frombuffer(random.bytes(array.nbytes), np.uint8)
            yield array

    def state(self) -> Arrays:
        """All arrays by name."""
        return dict(zip(self.names(), self.arrays(), strict=True))


def workload_from(arguments: list[str]) -> Workload:
    """The workload from command-line arguments."""
    count, *shape = map(int, arguments)
    return Workload(count, tuple(shape))


def rows_of(rows: int, rank: int, world: int) -> slice:
    """The rows of a rank, divided as torch divides them: the last ranks may have fewer."""
    each = -(-rows // world)
    return slice(min(rows, rank * each), min(rows, (rank + 1) * each))


def large(mib: int, count: int) -> Workload:
    """`count` arrays of `mib` MiB together, rounded to whole rows."""
    return Workload(count, (max(1, round(mib * MIB / count / COLUMNS / ITEM_BYTES)), COLUMNS))


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory on the benchmark's disk, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="forged-ckpt-", dir=DISK) as path:
        yield Path(path)


def files_in(path: Path) -> list[Path]:
    """All files in a directory, sorted; or the file itself."""
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def fill_page_cache(path: Path) -> None:
    """Read all files into the page cache."""
    block = bytearray(MIB)
    for file in files_in(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def drop_page_cache(path: Path) -> None:
    """Remove all files from the page cache."""
    for file in files_in(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
