"""A simulated disk with append-only files, power cuts and kills.

Invariants:
- After a power cut, everything that a returned `sync` covered is there, and every name after `sync_directory`; of later
  writes any part may be there.
- A file has the content that its process reads (`cache`) and the durable content (`platter`). Up to `dirty_from` the
  kernel treats them as equal, even after a failed sync, as Linux does: a second sync succeeds without writing.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn

from tests.simulation.environment.links import Range


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """The disk's delays and fault probabilities per operation."""

    sync_s: Range = (0.0005, 0.01)
    append_fails: float = 0.0
    sync_fails: float = 0.0
    directory_sync_fails: float = 0.0


GOOD = DiskFaults()


@dataclass(slots=True)
class _File:
    cache: bytearray = field(default_factory=bytearray)
    platter: bytearray = field(default_factory=bytearray)
    dirty_from: int = 0
    shortest: int = 0
    """The minimum size since the last sync began."""
    syncing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def write(self, start: int, data: bytes) -> None:
        """Make the dirty range from `start` durable; earlier bytes that never became durable are zeros."""
        del self.platter[start:]
        self.platter += bytes(start - len(self.platter)) + data

    def after_power_cut(self, random: Random) -> bytearray:
        """The content after a power cut: the old, the new, or the new up to a random point and then arbitrary bytes."""
        old, start = self.platter, self.dirty_from
        new = old[:start].ljust(start, b"\0") + self.cache[start:]
        cut = random.randint(start, len(new))
        torn = new[:cut] + random.choice((b"", bytes(len(new) - cut), old[cut:]))
        return random.choice((old, new, torn))


class SimulatedDisk:
    """The disk as one process sees it; `crash` and `kill` return the disk of the next process."""

    def __init__(self, random: Random, faults: DiskFaults = GOOD, *, capacity_bytes: int | None = None) -> None:
        self.faults = faults
        self.capacity_bytes = capacity_bytes
        self._random = random
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._renames: list[Callable[[dict[str, _File]], object]] = []
        self._directory_syncing = asyncio.Lock()
        self._dead = False

    @property
    def used_bytes(self) -> int:
        """The used capacity."""
        return sum(len(file.cache) for file in self._names.values())

    def append(self, name: str, data: bytes) -> None:
        """Append to a file, creating it if needed. On failure a part may have been written."""
        self._check_alive()
        file = self._file_or_new(name)
        room = len(data) if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes)
        if self._chance(self.faults.append_fails):
            file.cache += data[: self._random.randint(0, min(room, len(data)))]
            _fail(errno.EIO, name)
        file.cache += data[:room]
        if room < len(data):
            _fail(errno.ENOSPC, name)

    async def sync(self, name: str) -> None:
        """Make the current content durable; bytes that are appended meanwhile are not covered."""
        self._check_alive()
        file = self._file(name)
        async with file.syncing:
            start, data = file.dirty_from, bytes(file.cache[file.dirty_from :])
            file.shortest = end = start + len(data)
            await self._work()
            if self._chance(self.faults.sync_fails):
                file.platter = file.after_power_cut(self._random)
                file.dirty_from = len(file.cache)
                _fail(errno.EIO, name)
            file.write(start, data)
            file.dirty_from = min(end, file.shortest)

    def read(self, name: str) -> bytes:
        """The file's content."""
        self._check_alive()
        return bytes(self._file(name).cache)

    def names(self) -> tuple[str, ...]:
        """The names of the files."""
        self._check_alive()
        return tuple(self._names)

    def truncate(self, name: str, size: int) -> None:
        """Truncate a file; durable after `sync`."""
        self._check_alive()
        file = self._file(name)
        del file.cache[size:]
        file.dirty_from = min(file.dirty_from, size)
        file.shortest = min(file.shortest, size)

    def replace(self, source: str, target: str) -> None:
        """Rename a file, replacing the target; durable after `sync_directory`."""
        self._check_alive()
        self._file(source)
        self._rename(lambda names: names.update({target: names.pop(source)}))

    async def sync_directory(self) -> None:
        """Make the names durable."""
        self._check_alive()
        async with self._directory_syncing:
            renames = len(self._renames)
            await self._work()
            if self._chance(self.faults.directory_sync_fails):
                _fail(errno.EIO, ".")
            for rename in self._renames[:renames]:
                rename(self._durable_names)
            del self._renames[:renames]

    def crash(self) -> SimulatedDisk:
        """Cut the power; returns the disk after the restart."""
        after = self._successor()
        names = dict(self._durable_names)
        for rename in self._renames[: self._random.randint(0, len(self._renames))]:
            rename(names)
        for name, file in names.items():
            found = file.after_power_cut(self._random)
            after._names[name] = _File(bytearray(found), bytearray(found), len(found))
        after._durable_names = dict(after._names)
        return after

    def kill(self) -> SimulatedDisk:
        """Kill the process; returns the disk of the next process, with all writes, synced or not."""
        after = self._successor()
        after._names, after._durable_names, after._renames = self._names, self._durable_names, self._renames
        return after

    def _successor(self) -> SimulatedDisk:
        self._check_alive()
        self._dead = True
        return SimulatedDisk(self._random, self.faults, capacity_bytes=self.capacity_bytes)

    def _file(self, name: str) -> _File:
        return self._names[name] if name in self._names else _fail(errno.ENOENT, name)

    def _file_or_new(self, name: str) -> _File:
        if name not in self._names:
            file = _File()
            self._rename(lambda names: names.update({name: file}))
        return self._names[name]

    def _rename(self, change: Callable[[dict[str, _File]], object]) -> None:
        change(self._names)
        self._renames.append(change)

    async def _work(self) -> None:
        await asyncio.sleep(self._random.uniform(*self.faults.sync_s))
        self._check_alive()

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _check_alive(self) -> None:
        if self._dead:
            raise OSError(errno.EIO, "the process with this disk was killed")


def _fail(code: int, name: str) -> NoReturn:
    raise OSError(code, os.strerror(code), name)
