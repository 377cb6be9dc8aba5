"""The port for a worker's shard store.

Invariants:
- A shard is held when all of its bytes are stored durably and match its stamp. Until then it is arriving, and nothing
  may read it.
- A stamp is taken once, when the shard is first put, and travels with it, so every holder can verify its copy.

`DirectoryShardStore` keeps shards as files. Another store implements `ShardStore`; all of its methods may block, and
may be called from several threads at once. They raise `StoreFailed` for what the host refuses, and `RequestRefused` for
a shard that is not held or damaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import xxhash

from forged.data.model import Dataset

CHECKSUM_BYTES = 16


class Stamp(NamedTuple):
    """A shard's size in bytes and its xxh3-128 checksum."""

    size: int
    checksum: bytes

    @classmethod
    def of(cls, data: bytes | memoryview) -> Stamp:
        return cls(memoryview(data).nbytes, xxhash.xxh3_128_digest(data))


class PartialShard(NamedTuple):
    """A partly received shard: its stamp when complete, and how many bytes are stored."""

    stamp: Stamp
    offset: int


class Closing:
    """Is closed at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release it; a second call does nothing."""


class OpenShard(Closing, ABC):
    """A held shard, open for reading."""

    fd: int
    """Readable at any offset."""
    stamp: Stamp

    @abstractmethod
    def has_changed(self) -> bool:
        """Whether the bytes may have been modified since it was opened."""


class ArrivingShard(Closing, ABC):
    """A shard that is being written, from its first missing byte on.

    Closing it keeps the stored bytes, so that a later attempt can resume, also in another process. Without a stamp
    nothing can be resumed, and the bytes are dropped.

    One thread at a time uses it. Another thread may close it while the first one hangs in an origin; from then on a new
    writer may write the shard, and calls on this one raise without any effect.
    """

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. When the disk is full, all bytes of the shard are dropped to free space."""

    @abstractmethod
    def commit(self) -> Stamp:
        """Hold the shard durably; or drop its bytes and raise `ShardCorrupt`."""

    @abstractmethod
    def drop(self) -> None:
        """Delete the stored bytes."""


class ShardStore(ABC):
    """The shards that a worker holds."""

    @abstractmethod
    def held(self) -> Mapping[int, Stamp]:
        """All shards that are held now."""

    @abstractmethod
    def holds(self, shard: int) -> bool:
        """Whether the shard is held."""

    @abstractmethod
    def open(self, shard: int) -> OpenShard:
        """Open a held shard for reading."""

    @abstractmethod
    def partial(self, shard: int) -> PartialShard | None:
        """What is stored of a shard whose writer closed it before the end."""

    @abstractmethod
    def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        """Write a shard; without a `stamp` it takes its stamp from the bytes written.

        With an `offset`, which needs the stamp from `partial`, the bytes before it are kept. Refused for a shard that
        is held or has a writer.
        """

    @abstractmethod
    def drop(self, shard: int) -> None:
        """Delete a shard, or what was received of it; open readers may finish."""

    def dedicate(self, dataset: Dataset) -> None:
        """Reserve the store for this dataset and process; raises where it belongs to another."""
        return

    def put(self, shard: int, pieces: Iterable[bytes | memoryview]) -> Stamp:
        """Hold a shard that was made on this host; returns its stamp."""
        # Without a stamp, bytes that are not committed are dropped.
        with self.receive(shard, None) as arriving:
            for piece in pieces:
                arriving.write(piece)
            return arriving.commit()


class FlowControl(Protocol):
    """Counts, limits and cancels the bytes of one shard transfer; called by the thread that moves them."""

    def started(self, offset: int, size: int | None) -> None:
        """`offset` bytes were stored before this transfer; `size` is None while it is unknown."""
        ...

    def received(self, count: int) -> None:
        """So many more bytes have arrived; raises when the shard is no longer wanted."""
        ...

    def delay_before(self, count: int) -> float:
        """How many seconds to wait before receiving so many bytes."""
        ...
