"""The recent changes that a store remembers for its watchers.

Law: the log holds what became durable, in order, and forgets the oldest beyond its bounds; whoever still needed it is
told by `Compacted`, never by silence. Watchers keep their own places, so a slow one costs nothing. There are no tasks.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator

from forged.kernel.store.port import Change, Compacted, Transaction

CHANGES_MAX = 1 << 16
CHANGES_BYTES_MAX = 64 << 20


class ChangeLog:
    """The transactions since some revision, numbered by their places; `append` and `close` wake the watchers."""

    def __init__(
        self, revision: int, *, changes_max: int = CHANGES_MAX, changes_bytes_max: int = CHANGES_BYTES_MAX
    ) -> None:
        self.forgotten = revision
        self.closed = False
        self._changes_max = changes_max
        self._changes_bytes_max = changes_bytes_max
        self._kept: dict[int, Transaction] = {}
        self._first = self._end = 0
        self._changes = self._bytes = 0
        self._news = asyncio.Event()

    def append(self, transactions: Iterable[Transaction]) -> None:
        """Remember what has become durable."""
        for transaction in transactions:
            self._kept[self._end] = transaction
            self._end += 1
            self._weigh(transaction, 1)
        while self._changes > self._changes_max or self._bytes > self._changes_bytes_max:
            self._forget_first()
        self._wake()

    def close(self) -> None:
        """End every watcher once it has seen what is kept."""
        self.closed = True
        self._wake()

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """The changes under `prefix` of every revision greater than `after`."""
        return Watch(self, prefix, after)

    def place_behind(self, revision: int) -> int:
        """Where the first transaction after `revision` is or will be; before the first place when that is forgotten."""
        if revision < self.forgotten:
            return self._first - 1
        return bisect_right(range(self._first, self._end), revision, key=self._revision_at) + self._first

    def at(self, place: int) -> Transaction | None:
        """The transaction in this place, or None when nothing has come there yet."""
        if place < self._first:
            raise Compacted(
                "changes_forgotten",
                f"the changes up to revision {self.forgotten} are no longer kept",
                "list, then watch from the store's revision",
            )
        return self._kept.get(place)

    async def news(self) -> None:
        """Return when something was appended, or the log was closed."""
        await self._news.wait()

    def _revision_at(self, place: int) -> int:
        return self._kept[place].revision

    def _forget_first(self) -> None:
        transaction = self._kept.pop(self._first)
        self._first += 1
        self._weigh(transaction, -1)
        self.forgotten = transaction.revision

    def _weigh(self, transaction: Transaction, sign: int) -> None:
        self._changes += sign * (1 + len(transaction.puts) + len(transaction.deletes))
        self._bytes += sign * sum(map(len, transaction.puts.values()))

    def _wake(self) -> None:
        # `set` releases those who wait now; `clear` makes the next one wait for the next news.
        self._news.set()
        self._news.clear()


class Watch:
    """One watcher's place in the log."""

    def __init__(self, log: ChangeLog, prefix: str, after: int) -> None:
        self._log = log
        self._prefix = prefix
        self._after = after
        self._place = log.place_behind(after)
        self._pending: Iterator[Change] = iter(())

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Change:
        while (change := next(self._pending, None)) is None:
            transaction = await self._take()
            # The caller may have asked for changes after a revision that the store has yet to reach.
            if transaction.revision > self._after:
                self._pending = changes_of(transaction, self._prefix)
        return change

    async def _take(self) -> Transaction:
        while (transaction := self._log.at(self._place)) is None:
            if self._log.closed:
                raise StopAsyncIteration
            await self._log.news()
        self._place += 1
        return transaction


def changes_of(transaction: Transaction, prefix: str) -> Iterator[Change]:
    """What a transaction changed under `prefix`; a delete is reported whether or not the key was there."""
    for key, value in transaction.puts.items():
        if key.startswith(prefix) and key not in transaction.deletes:
            yield Change(key, value, transaction.revision)
    for key in transaction.deletes:
        if key.startswith(prefix):
            yield Change(key, None, transaction.revision)
