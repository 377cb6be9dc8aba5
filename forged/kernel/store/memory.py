"""The store in memory: for tests, and for embedding without durability."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Iterable, Sequence

from forged.kernel.store.batch import Write, decide, expected_keys
from forged.kernel.store.changes import CHANGES_BYTES_MAX, CHANGES_MAX, ChangeLog
from forged.kernel.store.keys import prefix_end
from forged.kernel.store.port import (
    PAGE_ENTRIES_MAX,
    Change,
    Conflict,
    Entry,
    Transaction,
    check,
    check_key,
    check_page,
    closed,
    key_bytes,
)


class MemoryStore:
    """A dict of entries and a sorted list of their keys."""

    def __init__(
        self, history: str, *, changes_max: int = CHANGES_MAX, changes_bytes_max: int = CHANGES_BYTES_MAX
    ) -> None:
        self._history = history
        self._revision = 0
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []
        self._log = ChangeLog(0, changes_max=changes_max, changes_bytes_max=changes_bytes_max)

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def history(self) -> str:
        return self._history

    async def get(self, key: str) -> Entry | None:
        check_key(key)
        self._require_open()
        return self._entries.get(key)

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        check_page(prefix, after, limit)
        self._require_open()
        first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
        end = min(bisect_left(self._keys, prefix_end(prefix)), first + limit)
        return [self._entries[key] for key in self._keys[first:end]]

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        for transaction in batch:
            check(transaction)
        self._require_open()
        known = self._entries.keys() & expected_keys(batch)
        outcome = decide(batch, self._revision, {key: self._entries[key].revision for key in known})
        self._apply(outcome.writes.values())
        self._revision = outcome.revision
        self._log.append(outcome.applied)
        return outcome.conflicts

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        self._require_open()
        key_bytes(prefix)
        return self._log.watch(prefix, after)

    async def close(self) -> None:
        self._log.close()

    def _require_open(self) -> None:
        if self._log.closed:
            raise closed()

    def _apply(self, writes: Iterable[Write]) -> None:
        for key, value, revision in writes:
            if value is not None:
                self._put(Entry(key, value, revision))
            elif self._entries.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    def _put(self, entry: Entry) -> None:
        if entry.key not in self._entries:
            insort(self._keys, entry.key)
        self._entries[entry.key] = entry
