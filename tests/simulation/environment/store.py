"""The store of simulations: an append-only log on a simulated disk, and a `MemoryStore` with its durable content.

Invariants:
- A batch is one record with length and checksum. It is appended, synced, and then applied, so reads are durable.
- A failed commit is truncated, and the truncation synced if the disk allows it; a torn record is truncated at the next
  open.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from random import Random
from struct import Struct
from typing import Self
from zlib import crc32

import msgspec

from forged.kernel.store.batch import decide, expected_keys
from forged.kernel.store.changes import CHANGES_BYTES_MAX, CHANGES_MAX, ChangeLog
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import (
    ABSENT,
    PAGE_ENTRIES_MAX,
    Change,
    Conflict,
    Entry,
    StoreUnavailable,
    Transaction,
    check,
    closed,
    key_bytes,
)
from tests.simulation.environment.disk import SimulatedDisk

LOG = "store.log"
NEW = "store.log.new"
HISTORY_BITS = 128

_HEADER = Struct("<II")
"""Length and checksum of the payload."""


class _Written(msgspec.Struct, array_like=True):
    """A transaction in the log, without its expectations."""

    revision: int
    puts: dict[str, bytes]
    deletes: list[str]


_history_of = msgspec.msgpack.Decoder(str).decode
_batch_of = msgspec.msgpack.Decoder(list[_Written]).decode


class LogStore:
    """Implements `forged.kernel.store.port.Store`; use `open`."""

    def __init__(self, disk: SimulatedDisk, memory: MemoryStore, changes: ChangeLog, end: int) -> None:
        self._disk = disk
        self._memory = memory
        self._changes = changes
        self._end = end
        self._lock = asyncio.Lock()
        self.failed_commits = 0

    @classmethod
    async def open(
        cls,
        disk: SimulatedDisk,
        random: Random,
        *,
        changes_max: int = CHANGES_MAX,
        changes_bytes_max: int = CHANGES_BYTES_MAX,
    ) -> Self:
        """Read the log, or create it with a history name from `random`."""
        try:
            log = await _whole_log(disk, random)
        except OSError as error:
            raise _unavailable(error) from error
        history, *batches = _payloads(log)
        memory = MemoryStore(_history_of(history), changes_max=0)
        for batch in batches:
            await memory.commit([Transaction(it.revision, it.puts, it.deletes) for it in _batch_of(batch)])
        changes = ChangeLog(memory.revision, changes_max=changes_max, changes_bytes_max=changes_bytes_max)
        return cls(disk, memory, changes, len(log))

    @property
    def revision(self) -> int:
        return self._memory.revision

    @property
    def history(self) -> str:
        return self._memory.history

    async def get(self, key: str) -> Entry | None:
        return await self._memory.get(key)

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        return await self._memory.list(prefix, after=after, limit=limit)

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        if self._changes.closed:
            raise closed()
        key_bytes(prefix)
        return self._changes.watch(prefix, after)

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        # As with a store thread, a cancelled caller does not stop the commit, whose error is then ignored.
        committing = asyncio.ensure_future(self._commit(batch))
        committing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait((committing,))
        return committing.result()

    async def close(self) -> None:
        async with self._lock:
            self._changes.close()
            await self._memory.close()

    async def _commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        async with self._lock:
            if self._changes.closed:
                raise closed()
            for transaction in batch:
                check(transaction)
            found = {key: await self._revision_of(key) for key in expected_keys(batch)}
            outcome = decide(batch, self.revision, found)
            if outcome.applied:
                await self._write(_record(_encoded(outcome.applied)))
                await self._memory.commit(outcome.applied)
                self._changes.append(outcome.applied)
            return outcome.conflicts

    async def _revision_of(self, key: str) -> int:
        entry = await self._memory.get(key)
        return entry.revision if entry else ABSENT

    async def _write(self, record: bytes) -> None:
        try:
            self._disk.append(LOG, record)
            await self._disk.sync(LOG)
        except OSError as error:
            self.failed_commits += 1
            await self._cut_back()
            raise _unavailable(error) from error
        self._end += len(record)

    async def _cut_back(self) -> None:
        """Truncate a failed commit. If that fails too, the commit may reappear after a power cut."""
        with contextlib.suppress(OSError):
            self._disk.truncate(LOG, self._end)
            await self._disk.sync(LOG)


async def _whole_log(disk: SimulatedDisk, random: Random) -> bytes:
    """Return the complete records of the log, durable; create the log if it has none.

    The log is rewritten at each open: after a failed sync its readable content may not be durable, and another sync
    would not report that.
    """
    found = disk.read(LOG) if LOG in disk.names() else b""
    end = sum(_HEADER.size + len(payload) for payload in _payloads(found))
    log = found[:end] or _record(msgspec.msgpack.encode(f"{random.getrandbits(HISTORY_BITS):032x}"))
    disk.append(NEW, b"")
    disk.truncate(NEW, 0)
    disk.append(NEW, log)
    await disk.sync(NEW)
    disk.replace(NEW, LOG)
    await disk.sync_directory()
    return log


def _payloads(log: bytes) -> Iterator[bytes]:
    """The complete records from the start."""
    end = 0
    while len(log) >= end + _HEADER.size:
        size, checksum = _HEADER.unpack_from(log, end)
        payload = log[end + _HEADER.size : end + _HEADER.size + size]
        if not size or len(payload) < size or crc32(payload) != checksum:
            return
        end += _HEADER.size + size
        yield payload


def _record(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), crc32(payload)) + payload


def _encoded(transactions: Iterable[Transaction]) -> bytes:
    return msgspec.msgpack.encode(
        [
            _Written(transaction.revision, dict(transaction.puts), list(transaction.deletes))
            for transaction in transactions
        ]
    )


def _unavailable(error: OSError) -> StoreUnavailable:
    if error.errno == errno.ENOSPC:
        return StoreUnavailable("store_full", f"the store cannot write: {error}", "free some space")
    return StoreUnavailable("store_failed", f"the store cannot write: {error}", "check the disk")
