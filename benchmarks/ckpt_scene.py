"""What the benchmarks of checkpoints save, and where: shared by them and by the peers' processes.

Law: all who are compared save the same arrays and write to the same disk. Needs numpy and nothing else, because the
peers import it in an environment of their own.
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
class Load:
    """So many arrays of float32, all of one shape."""

    count: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.count * int(np.prod(self.shape)) * ITEM_BYTES

    @property
    def gib(self) -> float:
        """The same, to divide by seconds."""
        return self.nbytes / GIB

    @property
    def words(self) -> list[str]:
        """For the command line of a process that has to make the same."""
        return [str(self.count), *map(str, self.shape)]

    def names(self) -> list[str]:
        """What the arrays are called."""
        return [f"layer.{number:05}.weight" for number in range(self.count)]

    def arrays(self) -> Iterator[np.ndarray[Any, Any]]:
        """One after the other, of random bytes that are always the same."""
        random = np.random.default_rng(SEED)
        for _ in range(self.count):
            array = np.empty(self.shape, np.float32)
            array.view(np.uint8).reshape(-1)[:] = np.frombuffer(random.bytes(array.nbytes), np.uint8)
            yield array

    def state(self) -> Arrays:
        """All of them, by name."""
        return dict(zip(self.names(), self.arrays(), strict=True))


def load_of(words: list[str]) -> Load:
    """The load that these words tell of."""
    count, *shape = map(int, words)
    return Load(count, tuple(shape))


def rows_of(rows: int, rank: int, world: int) -> slice:
    """Those that a rank has, when they are dealt as torch does it: the last ones may have fewer."""
    each = -(-rows // world)
    return slice(min(rows, rank * each), min(rows, (rank + 1) * each))


def large(mib: int, count: int) -> Load:
    """So many arrays that have so much together, as near as whole rows come to it."""
    return Load(count, (max(1, round(mib * MIB / count / COLUMNS / ITEM_BYTES)), COLUMNS))


@contextmanager
def room() -> Iterator[Path]:
    """A directory on a disk, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="forged-ckpt-", dir=DISK) as path:
        yield Path(path)


def files_in(path: Path) -> list[Path]:
    """All files there, by name; the file itself if it is one."""
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def warm(path: Path) -> None:
    """Have all of it in the page cache."""
    block = bytearray(MIB)
    for file in files_in(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def chill(path: Path) -> None:
    """Have nothing of it in the page cache."""
    for file in files_in(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
