"""The port behind which a worker's shards lie on its host.

Law: a shard is held when all of its bytes are here, durable, and found to be what its stamp says; before that it is
arriving, and nobody is given a byte of it. The stamp is taken once, when the shard is first put, and travels with it:
whoever holds a copy can tell whether it is one.

`DirectoryShardStore` keeps shards as files. Whoever keeps them elsewhere implements `ShardStore`, of which every method
may be called from several threads at once and may block. What the world refuses is a `StoreFailed`; a shard
that is not held, or no longer what it was, is a `RequestRefused` that names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import xxhash

from forged.data.arguments import whole
from forged.data.dataset import Dataset
from forged.errors import RequestRefused, Unavailable

SHARD_ID_MAX = 2**63 - 1
CHECKSUM_BYTES = 16


class Stamp(NamedTuple):
    """What tells whether bytes are those of a shard: how many they are, and their xxh3-128."""

    size: int
    checksum: bytes

    @classmethod
    def of(cls, data: bytes | memoryview) -> Stamp:
        """That of bytes in memory."""
        return cls(memoryview(data).nbytes, xxhash.xxh3_128_digest(data))


class Begun(NamedTuple):
    """A shard of which the first bytes are here: what it is to become, and how many they are."""

    stamp: Stamp
    offset: int


class StoreFailed(Unavailable):
    """What keeps the shards on this host does not take or give one just now; no other worker is to blame."""


class ShardCorrupt(Unavailable):
    """What has arrived is not what was announced; `is_whole` if all of it came from the same source."""

    def __init__(self, shard: int, is_whole: bool) -> None:
        super().__init__(
            "shard_corrupt", f"the bytes of shard {shard} are not what its stamp says", "take another copy"
        )
        self.shard = shard
        self.is_whole = is_whole

    def __reduce__(self) -> tuple[type[ShardCorrupt], tuple[int, bool]]:
        return ShardCorrupt, (self.shard, self.is_whole)


class Closing:
    """Something that is closed at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Be done with it."""


class OpenShard(Closing, ABC):
    """A held shard that is being read."""

    fd: int
    """Of the bytes, from the file's beginning on; anybody may read it at any offset."""
    stamp: Stamp

    @abstractmethod
    def has_changed(self) -> bool:
        """Whether somebody may have touched the bytes since it was opened."""


class ArrivingShard(Closing, ABC):
    """A shard that is being written, from its first missing byte on.

    Closing it keeps what is here, so that a later attempt can go on, also one of another process. Without a stamp
    nobody can, and nothing is kept.

    It is used by one thread at a time, which need not be the same one always: from a thread that hangs in an origin the
    shard is taken back by another, which closes it. From then on somebody else may write the shard, and whatever is
    done with this one touches nothing.
    """

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. When the disk is full, all of them are dropped, so that others find room."""

    @abstractmethod
    def commit(self) -> Stamp:
        """Hold the shard from now on, durably; or drop all, and raise `ShardCorrupt`."""

    @abstractmethod
    def drop(self) -> None:
        """Forget all that is here."""


class ShardStore(ABC):
    """What a worker holds."""

    @abstractmethod
    def held(self) -> Mapping[int, Stamp]:
        """All shards that are held, at this moment."""

    @abstractmethod
    def holds(self, shard: int) -> bool:
        """Whether this one is."""

    @abstractmethod
    def open(self, shard: int) -> OpenShard:
        """Read a shard."""

    @abstractmethod
    def begun(self, shard: int) -> Begun | None:
        """How far a shard is that somebody began to write and did not finish."""

    @abstractmethod
    def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        """Write a shard that is to be what the stamp says, or whatever it becomes.

        With an `offset`, which needs the stamp that `begun` told, what is here up to there stays. A shard that is held
        is written by nobody, and one that is not by one at a time.
        """

    @abstractmethod
    def drop(self, shard: int) -> None:
        """Hold a shard no more, and forget what was begun of it; readers who have it open finish."""

    def dedicate(self, dataset: Dataset) -> None:
        """Hold shards of this dataset, for this process; refused by a store that can tell that it is not to."""
        return

    def put(self, shard: int, pieces: Iterable[bytes | memoryview]) -> Stamp:
        """Hold a shard that was made here, and take its stamp."""
        with self.receive(shard, None) as arriving:
            try:
                for piece in pieces:
                    arriving.write(piece)
                return arriving.commit()
            except BaseException:
                arriving.drop()
                raise


class Passage(Protocol):
    """What a shard on its way is told, and asked; from the thread that moves it."""

    def begins(self, offset: int, size: int | None) -> None:
        """So many bytes were here before, of so many in all."""
        ...

    def moved(self, count: int) -> None:
        """So many more have arrived; raises if no more are wanted."""
        ...

    def pause_before(self, count: int) -> float:
        """How many seconds to wait before so many are taken."""
        ...


def check_shard(shard: object) -> int:
    """The number, if it can be a shard's; what only looks like one would name what no restart recognises."""
    number = whole(shard)
    if number is None or not 0 <= number <= SHARD_ID_MAX:
        raise RequestRefused("shard_invalid", f"{shard!r:.100} is no number of a shard", f"use 0 to {SHARD_ID_MAX}")
    return number


def not_held(shard: int) -> RequestRefused:
    """The refusal that names a shard which is not here."""
    return RequestRefused("shard_not_held", f"shard {shard} is not held here", "ask who holds it")


def damaged(shard: int, what: str) -> RequestRefused:
    """The refusal that names a shard which is no longer what it was."""
    return RequestRefused("shard_damaged", f"shard {shard} is damaged here: {what}", "take another copy")


def already_held(shard: int) -> RequestRefused:
    """The refusal that names a shard which is here."""
    return RequestRefused("shard_held", f"shard {shard} is held here already", "drop it first")


def already_arriving(shard: int) -> StoreFailed:
    """The refusal that names a shard which somebody else is writing."""
    return StoreFailed("shard_arriving", f"shard {shard} is being written already", "wait for that")


def no_longer_arriving(shard: int) -> StoreFailed:
    """The refusal that names a shard whose writer has closed it, or was taken it from."""
    return StoreFailed("shard_closed", f"shard {shard} is no longer written by this one", "begin anew")
