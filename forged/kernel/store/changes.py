"""The log of recent changes that serves a store's watchers.

Invariants:
- The log holds durable transactions in order and drops the oldest beyond its limits.
- A watcher that needs dropped changes gets `Compacted`.
- Each watcher holds only an index into the log, so a slow watcher costs nothing.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator

from forged.kernel.store.port import Change, Compacted, Transaction

CHANGES_MAX = 1 << 16
CHANGES_BYTES_MAX = 64 << 20


class ChangeLog:
    """The transactions since a revision, by index. `append` and `close` wake the watchers."""

    def __init__(
        self, revision: int, *, changes_max: int = CHANGES_MAX, changes_bytes_max: int = CHANGES_BYTES_MAX
    ) -> None:
        self.dropped = revision
        self.closed = False
        self._changes_max = changes_max
        self._changes_bytes_max = changes_bytes_max
        self._kept: dict[int, Transaction] = {}
        self._first = self._end = 0
        self._changes = self._bytes = 0
        self._appended = asyncio.Event()

    def append(self, transactions: Iterable[Transaction]) -> None:
        """Add durable transactions."""
        for transaction in transactions:
            self._kept[self._end] = transaction
            self._end += 1
            self._count_size(transaction, 1)
        while self._changes > self._changes_max or self._bytes > self._changes_bytes_max:
            self._drop_first()
        self._wake()

    def close(self) -> None:
        """End every watcher after it has received the kept changes."""
        self.closed = True
        self._wake()

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """The changes under `prefix` of every revision greater than `after`."""
        return Watch(self, prefix, after)

    def index_after(self, revision: int) -> int:
        """The index of the first transaction after `revision`; less than the first index if it was dropped."""
        if revision < self.dropped:
            return self._first - 1
        return bisect_right(range(self._first, self._end), revision, key=self._revision_at) + self._first

    def at(self, index: int) -> Transaction | None:
        """The transaction at this index, None if it does not exist yet; raises `Compacted` if it was dropped."""
        if index < self._first:
            raise Compacted(
                "changes_forgotten",
                f"changes up to revision {self.dropped} have been dropped",
                "list, then watch from the store's revision",
            )
        return self._kept.get(index)

    async def wait_for_append(self) -> None:
        """Return at the next append, or when the log is closed."""
        await self._appended.wait()

    def _revision_at(self, index: int) -> int:
        return self._kept[index].revision

    def _drop_first(self) -> None:
        transaction = self._kept.pop(self._first)
        self._first += 1
        self._count_size(transaction, -1)
        self.dropped = transaction.revision

    def _count_size(self, transaction: Transaction, sign: int) -> None:
        self._changes += sign * (1 + len(transaction.puts) + len(transaction.deletes))
        self._bytes += sign * sum(map(len, transaction.puts.values()))

    def _wake(self) -> None:
        # `set` wakes the current waiters; `clear` makes later ones wait for the next append.
        self._appended.set()
        self._appended.clear()


class Watch:
    """One watcher's index into the log."""

    def __init__(self, log: ChangeLog, prefix: str, after: int) -> None:
        self._log = log
        self._prefix = prefix
        self._after = after
        self._index = log.index_after(after)
        self._pending: Iterator[Change] = iter(())

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Change:
        while (change := next(self._pending, None)) is None:
            transaction = await self._take()
            # `after` may be a revision that the store had not reached when the watch began.
            if transaction.revision > self._after:
                self._pending = changes_of(transaction, self._prefix)
        return change

    async def _take(self) -> Transaction:
        while (transaction := self._log.at(self._index)) is None:
            if self._log.closed:
                raise StopAsyncIteration
            await self._log.wait_for_append()
        self._index += 1
        return transaction


def changes_of(transaction: Transaction, prefix: str) -> Iterator[Change]:
    """The changes of a transaction under `prefix`; a delete is reported also if the key did not exist."""
    for key, value in transaction.puts.items():
        if key.startswith(prefix) and key not in transaction.deletes:
            yield Change(key, value, transaction.revision)
    for key in transaction.deletes:
        if key.startswith(prefix):
            yield Change(key, None, transaction.revision)
