"""What the engine needs of the world: a storage, the other ranks, and a way to be stopped.

Law: storages are called from threads and block; they know names and bytes, and nothing of checkpoints. What `write` and
`publish` have returned from, and `settle` has covered, outlives a power cut. Ranks are called from the event loop, all
of them in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from forged.checkpoint.errors import CheckpointException, ExceptionType

BLOCK_BYTES = 8 << 20
"""So much is written, and read, at a time."""


class Halt:
    """Tells the threads of one operation when to stop: it was cancelled, or its time is over."""

    def __init__(self, timeout_s: float | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._monotonic = monotonic
        self._ends_at = None if timeout_s is None else monotonic() + timeout_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop it."""
        self._cancelled.set()

    def hurry(self, seconds: float) -> None:
        """Let it take no longer than that from now on."""
        ends_at = self._monotonic() + seconds
        if self._ends_at is None or ends_at < self._ends_at:
            self.timeout_s, self._ends_at = seconds, ends_at

    def later(self, seconds: float) -> Halt:
        """One that is cancelled with this one, and has so much more time."""
        other = copy(self)
        if other.timeout_s is not None and other._ends_at is not None:
            other.timeout_s, other._ends_at = other.timeout_s + seconds, other._ends_at + seconds
        return other

    def remaining_s(self) -> float | None:
        """How long it may still take; None for as long as it likes."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._monotonic())

    def check(self) -> None:
        """Raise if it is to stop. Called between any two blocks."""
        if self._cancelled.is_set():
            raise CheckpointException("it was cancelled", type=ExceptionType.UNKNOWN, code="checkpoint_cancelled")
        if self._ends_at is not None and self._monotonic() >= self._ends_at:
            raise CheckpointException(
                f"it was not done within {self.timeout_s:g} s",
                type=ExceptionType.TIMEOUT,
                fix="give it a larger timeout, or find out what is slow",
            )

    def wait(self, seconds: float) -> None:
        """Pause, and raise as soon as it is to stop."""
        remaining = self.remaining_s()
        self._cancelled.wait(seconds if remaining is None else min(seconds, remaining))
        self.check()


class Source(Protocol):
    """Bytes that are to be written; asked for by several threads, any part once or more often."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def block(self, offset: int, room: memoryview) -> memoryview:
        """Those from `offset` on, as many as there is room for: put there, or where they lie anyhow.

        `offset` is a multiple of `BLOCK_BYTES` and `room` is that large; the last block is shorter. Where the bytes lie
        anyhow, they begin at a page.
        """
        ...


class Reader(Protocol):
    """A file that is read; by several threads."""

    @property
    def size(self) -> int:
        """How many bytes it has."""
        ...

    def read_into(self, offset: int, room: memoryview) -> None:
        """Fill the room with the bytes from `offset` on; an error if there are not so many."""
        ...

    def mapped(self) -> memoryview | None:
        """The file as memory, read-only; None where that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a storage."""

    name: str
    size: int
    modified_at: float
    """By the wall clock."""


class Storage(Protocol):
    """Where checkpoints lie. Names are relative, with `/` between their parts, and checked."""

    @property
    def url(self) -> str:
        """What a person would call it."""
        ...

    def write(self, name: str, source: Source, halt: Halt) -> None:
        """A new file, whose bytes are durable then; its name is when `settle` was called. An error if there is one."""
        ...

    def settle(self, names: Collection[str]) -> None:
        """Make the names of new files durable."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """A new small file, whole or not there at all, and durable; refused if there is one: `checkpoint_exists`."""
        ...

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Read a file; `checkpoint_file_missing` if there is none."""
        ...

    def read(self, name: str, bytes_max: int) -> bytes:
        """A small file; `checkpoint_file_missing`, or `checkpoint_file_large`."""
        ...

    def entries(self, under: str = "") -> Iterator[Entry]:
        """The files whose names begin so, in any order."""
        ...

    def move(self, name: str, to: str) -> None:
        """Give a small file another name, durably; what stood there is replaced. It may be done again after a crash."""
        ...

    def delete(self, names: Collection[str]) -> None:
        """Have these no more, durably; who is not there is no error. Directories that are empty then go, too."""
        ...

    def free_bytes(self) -> int | None:
        """How much can still be written; None where nobody knows."""
        ...


@runtime_checkable
class Remote(Storage, Protocol):
    """A storage that waits for somebody else, and can be told how long."""

    def bounded(self, halt: Halt) -> Storage:
        """The same storage, whose requests end when the halt says so."""
        ...


def bounded(storage: Storage, halt: Halt) -> Storage:
    """The storage as one operation uses it: nothing that it waits for outlasts the halt."""
    return storage.bounded(halt) if isinstance(storage, Remote) else storage


@runtime_checkable
class Coordinator(Protocol):
    """The ranks that save and load together. An `ElasticWorker` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    async def barrier(self) -> None:
        """Wait for all."""
        ...

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """What every rank has given, by rank, at the root; None elsewhere. Values are bytes."""
        ...

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        """What the root has given."""
        ...
