"""A shard store in memory, for simulations and tests.

A simulated process that is killed leaves the object to its successor, as a real one leaves its disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from forged.data.model import check_shard
from forged.data.store.errors import (
    ShardCorrupt,
    StoreFailed,
    already_arriving,
    already_held,
    no_longer_arriving,
    not_held,
)
from forged.data.store.port import ArrivingShard, OpenShard, PartialShard, ShardStore, Stamp


class MemoryShardStore(ShardStore):
    """Holds at most `bytes_max` bytes."""

    def __init__(self, bytes_max: int | None = None) -> None:
        self._bytes_max = bytes_max
        self._held: dict[int, tuple[Stamp, bytes]] = {}
        self._partial: dict[int, tuple[Stamp, bytearray]] = {}
        self._arriving: set[int] = set()

    def held(self) -> Mapping[int, Stamp]:
        """All shards that are held now."""
        return {shard: stamp for shard, (stamp, _) in self._held.items()}

    def holds(self, shard: int) -> bool:
        """Whether the shard is held."""
        return shard in self._held

    def read(self, shard: int) -> bytes:
        """The bytes of a shard."""
        if shard not in self._held:
            raise not_held(shard)
        return self._held[shard][1]

    def open(self, shard: int) -> OpenShard:
        """Open a held shard for reading."""
        return _OpenMemory(self.read(shard), self._held[shard][0])

    def partial(self, shard: int) -> PartialShard | None:
        """What is stored of a shard whose writer closed it before the end."""
        found = self._partial.get(shard)
        return None if found is None else PartialShard(found[0], len(found[1]))

    def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        """Write a shard; without a `stamp` it takes its stamp from the bytes written."""
        shard = check_shard(shard)
        if shard in self._held:
            raise already_held(shard)
        if shard in self._arriving:
            raise already_arriving(shard)
        before = self._partial.pop(shard, None)
        data = bytearray() if before is None or before[0] != stamp else before[1]
        del data[offset:]
        self._arriving.add(shard)
        return _ArrivingMemory(self, shard, stamp, data)

    def drop(self, shard: int) -> None:
        """Delete a shard, or what was received of it."""
        if shard in self._arriving:
            raise already_arriving(shard)
        self._held.pop(shard, None)
        self._partial.pop(shard, None)

    def has_room_for(self, count: int) -> bool:
        """Whether so many more bytes fit; bytes of arriving shards do not count."""
        if self._bytes_max is None:
            return True
        used = sum(stamp.size for stamp, _ in self._held.values()) + sum(
            len(data) for _, data in self._partial.values()
        )
        return used + count <= self._bytes_max


class _OpenMemory(OpenShard):
    def __init__(self, data: bytes, stamp: Stamp) -> None:
        self.stamp = stamp
        self.fd = os.memfd_create("shard", os.MFD_CLOEXEC)
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, memoryview(data)[written:], written)

    def has_changed(self) -> bool:
        """Never: the bytes are a copy."""
        return False

    def close(self) -> None:
        """Release it; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _ArrivingMemory(ArrivingShard):
    def __init__(self, store: MemoryShardStore, shard: int, stamp: Stamp | None, data: bytearray) -> None:
        self._store = store
        self._shard = shard
        self._stamp = stamp
        self._data = data
        self._is_resumed = bool(data)
        self._is_open = True

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._require_open()
        if not self._store.has_room_for(len(self._data) + len(data)):
            self.drop()
            raise StoreFailed("disk_full", f"no space for shard {self._shard}", "free some space")
        self._data += data

    def commit(self) -> Stamp:
        """Hold the shard; or drop its bytes and raise `ShardCorrupt`."""
        self._require_open()
        found = Stamp.of(memoryview(self._data))
        if found != (self._stamp or found):
            self.drop()
            raise ShardCorrupt(self._shard, is_whole=not self._is_resumed)
        self._store._held[self._shard] = (found, bytes(self._data))
        self.drop()
        return found

    def drop(self) -> None:
        """Delete the received bytes."""
        if self._is_open:
            self._is_open = False
            self._store._arriving.discard(self._shard)

    def close(self) -> None:
        """Keep the received bytes for a later attempt."""
        if self._is_open:
            self.drop()
            if self._stamp is not None:
                self._store._partial[self._shard] = (self._stamp, self._data)

    def _require_open(self) -> None:
        if not self._is_open:
            raise no_longer_arriving(self._shard)
