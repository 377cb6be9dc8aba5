"""The ports of the checkpoint engine: storage, coordinator, byte sources and readers, and the cancel token.

Invariants:
- Storages are called from threads and may block, unless they are `nonblocking`. They know names and bytes, and nothing
  of checkpoints.
- A file that `publish` has returned for, or that `write` and then `sync_names` have returned for, survives a power cut.
- A coordinator is called from the event loop, by all ranks in the same order.
- An observer is called from any thread. It returns at once and raises nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from forged.catalog.cadence import Measured
from forged.checkpoint.errors import CheckpointException, ExceptionType

BLOCK_BYTES = 8 << 20
"""The unit in which files are written and read."""


class WouldBlock(Exception):
    """A call that may not wait would have to. It can be repeated by a call that may."""


class CancelToken:
    """Cancellation and deadline of one operation, shared by its threads."""

    def __init__(self, timeout_s: float | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._monotonic = monotonic
        self._ends_at = None if timeout_s is None else monotonic() + timeout_s
        self._cancelled = threading.Event()
        self.may_block = True
        """Whether the operation may wait for a storage."""

    def nonblocking(self) -> CancelToken:
        """A token of the same operation for an attempt that raises `WouldBlock` where it would have to wait."""
        other = copy(self)
        other.may_block = False
        return other

    def cancel(self) -> None:
        self._cancelled.set()

    def shorten(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, unless it is earlier already."""
        ends_at = self._monotonic() + seconds
        if self._ends_at is None or ends_at < self._ends_at:
            self.timeout_s, self._ends_at = seconds, ends_at

    def extended(self, seconds: float) -> CancelToken:
        """A token that is cancelled together with this one and has a deadline `seconds` later."""
        other = copy(self)
        if other.timeout_s is not None and other._ends_at is not None:
            other.timeout_s, other._ends_at = other.timeout_s + seconds, other._ends_at + seconds
        return other

    def remaining_s(self) -> float | None:
        """Seconds until the deadline; None without a deadline."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._monotonic())

    def check(self) -> None:
        """Raise if the operation was cancelled or its deadline has passed. Threads call it between two blocks."""
        if self._cancelled.is_set():
            raise CheckpointException(
                "the operation was cancelled", type=ExceptionType.UNKNOWN, code="checkpoint_cancelled"
            )
        if self._ends_at is not None and self._monotonic() >= self._ends_at:
            raise CheckpointException(
                f"the operation did not finish within {self.timeout_s:g} s",
                type=ExceptionType.TIMEOUT,
                fix="set a larger timeout, or find out which rank or storage is slow",
            )

    def wait(self, seconds: float) -> None:
        """Sleep; raise as soon as the operation is cancelled or its deadline passes."""
        if not self.may_block:
            raise WouldBlock
        remaining = self.remaining_s()
        self._cancelled.wait(seconds if remaining is None else min(seconds, remaining))
        self.check()


class ByteSource(Protocol):
    """The bytes of a file that is written. Several threads ask for blocks; a block may be asked for again."""

    @property
    def size(self) -> int: ...

    def block(self, offset: int, room: memoryview) -> memoryview:
        """The block at `offset`: either copied into `room`, or a view of memory of the source that begins at a page.

        `offset` is a multiple of `BLOCK_BYTES` and `room` is that large; the last block is shorter.
        """
        ...


class Reader(Protocol):
    """A file that is read, by several threads."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        """Fill the rooms, one after another, with the bytes from `offset` on; an error if the file has fewer."""
        ...

    def mapped(self) -> memoryview | None:
        """The file as read-only memory; None where the storage cannot map files."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a storage."""

    name: str
    size: int
    modified_at: float
    """Wall-clock seconds."""


class Storage(Protocol):
    """Files under relative names with `/` between their components. Implementations check the names."""

    @property
    def url(self) -> str:
        """The storage's name in messages."""
        ...

    @property
    def gap_bytes_max(self) -> int:
        """Up to so many unwanted bytes between two ranges of a file are read with them, to save a read."""
        ...

    def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
        """Create a file with durable bytes; its name is durable after `sync_names`. An error if the name is taken."""
        ...

    def sync_names(self, names: Collection[str]) -> None:
        """Make the names of new files durable."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Create a small file atomically and durably; `checkpoint_exists` if the name is taken."""
        ...

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading; `checkpoint_file_missing` if there is none."""
        ...

    def read(self, name: str, bytes_max: int) -> bytes:
        """Read a small file; `checkpoint_file_missing`, or `checkpoint_file_large`."""
        ...

    def entries(self, under: str = "") -> Iterator[StoredFile]:
        """The files whose names begin with `under`, in any order."""
        ...

    def move(self, name: str, to: str) -> None:
        """Rename a small file durably and replace what has that name. Repeating it after a crash is safe."""
        ...

    def delete(self, names: Collection[str]) -> None:
        """Delete durably; ignore missing files. Directories that become empty are removed, too."""
        ...

    def free_bytes(self) -> int | None:
        """Free space; None where the storage cannot tell."""
        ...


@runtime_checkable
class RemoteStorage(Storage, Protocol):
    """A storage whose requests can be cancelled."""

    def bounded(self, token: CancelToken) -> Storage:
        """The same storage with requests that end when the token is cancelled or its deadline passes."""
        ...


@runtime_checkable
class NonblockingStorage(Storage, Protocol):
    """A storage that knows what it can read at once."""

    def nonblocking(self) -> Storage:
        """The same storage, which raises `WouldBlock` for everything but reads of small files that are in memory."""
        ...


@runtime_checkable
class LockingStorage(Storage, Protocol):
    """A storage in which processes of one host see which files others use."""

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Be seen to use a file during the block; no effect where it cannot be locked."""
        ...

    def is_held(self, name: str) -> bool:
        """Whether a process uses a file."""
        ...


def hold(storage: Storage, name: str) -> AbstractContextManager[None]:
    """Be seen to use a file during the block, as far as the storage can show it."""
    return storage.hold(name) if _locks(storage) else nullcontext()


def is_held(storage: Storage, name: str) -> bool:
    """Whether a process uses a file, as far as the storage can tell."""
    return _locks(storage) and storage.is_held(name)


def _locks(storage: Storage) -> TypeGuard[LockingStorage]:
    # Without isinstance, which takes tens of microseconds for a protocol.
    return hasattr(storage, "hold") and hasattr(storage, "is_held")


def _is_remote(storage: Storage) -> TypeGuard[RemoteStorage]:
    return hasattr(storage, "bounded")


def _is_nonblocking(storage: Storage) -> TypeGuard[NonblockingStorage]:
    return hasattr(storage, "nonblocking")


def nonblocking(storage: Storage) -> Storage:
    """The storage as far as it can be read at once; raises `WouldBlock` if it cannot tell."""
    if not _is_nonblocking(storage):
        raise WouldBlock
    return storage.nonblocking()


def bounded(storage: Storage, token: CancelToken) -> Storage:
    """The storage for one operation: the requests of a remote one end with the token.

    If the operation may not wait, the storage raises `WouldBlock` instead.
    """
    if not token.may_block:
        return nonblocking(storage)
    return storage.bounded(token) if _is_remote(storage) else storage


@dataclass(frozen=True, slots=True)
class ObservedSave:
    """A save on whose name and id the ranks have agreed."""

    storage: Storage = field(repr=False, compare=False)
    prefix: str
    save_id: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    reason: str
    """Why it is saved now; empty if the script has not said."""
    keep: int | None
    """How many checkpoints the script wants to keep; None: all."""
    parent: str
    """The prefix of the checkpoint that it builds on; empty for a full one. Until it is committed: of its base."""

    @property
    def storage_path(self) -> str:
        """The checkpoint's path or URL, as `forged.checkpoint.load` takes it; absolute."""
        return f"{self.storage.url}/{self.prefix}"

    @property
    def parent_path(self) -> str:
        """The path or URL of the parent; empty for a full checkpoint."""
        return f"{self.storage.url}/{self.parent}" if self.parent else ""


class SaveObserver(Protocol):
    """Is told by the root of each save how it goes; the `checkpoint_catalog` of a coordinator."""

    def save_started(self, save: ObservedSave) -> None: ...

    def save_committed(self, save: ObservedSave, size_bytes: int, seconds: float) -> None:
        """The checkpoint exists, so many seconds after the ranks have agreed on it."""
        ...

    def save_failed(self, save: ObservedSave, reason: str) -> None:
        """There is no checkpoint, for certain. A save whose outcome is unknown has no end."""
        ...


@dataclass(frozen=True, slots=True)
class CataloguedCheckpoint:
    """A checkpoint that a run may be restored from."""

    checkpoint_id: str
    prefix: str
    step: int
    size_bytes: int
    reason: str
    """Why it is offered, in words."""


@dataclass(frozen=True, slots=True)
class RestoreAdvice:
    """What the catalogue says of the checkpoints in a folder."""

    points: Sequence[CataloguedCheckpoint]
    """Those that may be restored, the best first."""
    excluded: Mapping[str, str]
    """By prefix, why the other checkpoints may not be restored."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was loaded to continue from."""

    point: CataloguedCheckpoint | None
    """None if the catalogue does not know it."""
    step: int
    seconds: float
    size_bytes: int
    skipped: Sequence[str]
    """The better ones that could not be loaded, with reasons."""
    storage_path: str = ""
    """Empty if it was in memory."""
    save_id: str = ""
    repaired_chunks: int = 0
    """How many corrupt chunks were read from healthy copies."""


class CheckpointCatalog(SaveObserver, Protocol):
    """The catalogue of a job's checkpoints; a worker has one. Called from threads."""

    def find_restore_points(self, folder: str) -> RestoreAdvice | None:
        """What the catalogue says of a folder, given by its storage's URL; None if it does not answer in time."""
        ...

    def hold(self, checkpoint_id: str) -> AbstractContextManager[None]:
        """Have the catalogue keep a checkpoint during the block."""
        ...

    def report_corrupt(self, checkpoint_id: str, reason: str) -> None: ...

    def report_restore(self, restored: Restored) -> None:
        """The run continues from a checkpoint if its first world does."""
        ...

    def withdraw(self, storage_path: str, step: int) -> bool:
        """Whether the caller may delete a checkpoint of this step; then it is not reported any more."""
        ...

    def measured(self) -> Measured:
        """What is known of the job for the cadence, besides the cost of a save."""
        ...

    def tell_cadence(self, text: str) -> None:
        """When the run saves, and why, in words."""
        ...


class SlotMemory(NamedTuple):
    """A slot of this process."""

    memory: mmap
    """Writable, shared with the host."""
    fd: int
    """Locked alone while the slot is overwritten; the host locks what it reads. Its user closes it."""


class SlotLease(NamedTuple):
    """The slots of this process."""

    owner: bytes
    slots: list[SlotMemory]
    persists: bool
    """Whether the host can write the storage that the slots are for."""


class HostAway(CheckpointException):
    """The host does not answer; a save that it was asked for may have been written."""


class StagedStorage(Storage, Protocol):
    """A save in slots, to be read."""

    @property
    def prefix(self) -> str:
        """The checkpoint's name."""
        ...


class HostSlots(Protocol):
    """Memory of this host that outlives this process. Called from threads; a worker of a job provides it."""

    @property
    def owner(self) -> bytes:
        """The slots' owner; differs when slots that were opened before are no longer this process's."""
        ...

    def open(self, size: int, storage: str, token: CancelToken) -> SlotLease | None:
        """Two slots of at least so many bytes for saves into a storage, given by its URL; None if there are none.

        The slots that this process has already are returned again if they are large enough.
        """
        ...

    def staged(self, storage: str, token: CancelToken) -> AbstractContextManager[StagedStorage | None]:
        """The newest save for a storage that is in memory and newer than on disk, during the block; None without one.

        It is not overwritten meanwhile.
        """
        ...

    @property
    def is_present(self) -> bool:
        """Whether the host can be asked to persist a save."""
        ...

    def persist(self, save_id: str, token: CancelToken) -> int:
        """Have the host write the slots of a save to their storage; returns its size when the checkpoint exists.

        Raises `HostAway` when the host does not answer for long. It may write the checkpoint all the same.
        """
        ...

    def refusal_of(self, save_id: str) -> CheckpointException | None:
        """Why the host has not written a save that another rank has it persist; None as long as it may do so."""
        ...


@runtime_checkable
class Coordinator(Protocol):
    """The ranks that save and load together. An `ElasticWorker` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    async def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """At the root the values of all ranks, by rank; None at the other ranks. Values are bytes."""
        ...

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value, at every rank."""
        ...
