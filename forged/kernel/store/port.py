"""The store port: an ordered map of keys to small values with one revision counter.

Invariants:
- A batch of transactions becomes durable as a whole or not at all; when `commit` returns, it survives a power cut.
- Batching is the caller's: the store does not wait for more transactions.
- The store knows no facts, replies or jobs; they are keys and values to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

from forged.errors import ConfigError, RequestRefused, Unavailable

KEY_BYTES_MAX = 512
VALUE_BYTES_MAX = 1 << 20
OPERATIONS_MAX = 128
PAGE_ENTRIES_MAX = 4096
REVISION_MAX = (1 << 63) - 1
ABSENT = 0
"""The revision to expect of a key that must not exist."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its value, and the revision of its last write."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """Writes that apply together if every expected key is at its expected revision.

    `revision` is the store's revision after the transaction. It must be greater than the current one, so an outdated
    writer is fenced. A key that is both put and deleted is deleted.
    """

    revision: int
    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: Sequence[str] = ()
    expect: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a transaction was not applied: this key was not at the expected revision."""

    key: str
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Change:
    """A write of a transaction; `value` is None for a delete."""

    key: str
    value: bytes | None
    revision: int


class StoreUnavailable(Unavailable):
    """A write or read failed: disk full, read-only or failing. Nothing of the batch was applied."""


class StoreCorrupt(ConfigError):
    """The stored data is damaged. It is never repaired or rebuilt."""


class StoreFenced(Unavailable):
    """A transaction's revision is not greater than the store's: another process has written."""


class Compacted(RequestRefused):
    """The requested changes have been dropped; list, then watch from the store's revision."""


@runtime_checkable
class BackedUp(Protocol):
    """A store that can copy itself while it is used."""

    async def backup(self, path: Path) -> None:
        """Make a consistent, durable copy at `path`, which appears there whole or not at all."""
        ...


class Store(Protocol):
    """A store. Use it from one event loop only."""

    @property
    def revision(self) -> int:
        """The revision of the last durable transaction; 0 for an empty store."""
        ...

    @property
    def history(self) -> str:
        """A random name given at creation. Stores with the same history name are the same store."""
        ...

    async def get(self, key: str) -> Entry | None:
        """The key's entry, or None."""
        ...

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        """The first `limit` entries whose keys start with `prefix` and are greater than `after`, in key order."""
        ...

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        """Apply the batch in order and make it durable as a whole; a conflict skips that transaction only.

        Raises `StoreUnavailable`, `StoreFenced`, or `RequestRefused` for a limit; then nothing of the batch was
        applied. If the caller is cancelled, the batch is applied whole or not at all.
        """
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """The changes under `prefix` of revisions greater than `after`, in order, then new ones as they become durable.

        Raises `Compacted` if changes after `after` have been dropped, also later, if the watcher is too slow. Ends
        after the last change when the store closes.
        """
        ...

    async def close(self) -> None:
        """Finish commits, close the files, end the watchers. Idempotent."""
        ...


def check(transaction: Transaction) -> None:
    """Raise `RequestRefused` if a transaction exceeds a limit."""
    operations = len(transaction.puts) + len(transaction.deletes) + len(transaction.expect)
    if operations > OPERATIONS_MAX:
        raise RequestRefused(
            "transaction_too_large",
            f"a transaction must have at most {OPERATIONS_MAX} operations, got {operations}",
            "split the request",
        )
    if transaction.revision > REVISION_MAX:
        raise RequestRefused(
            "revision_invalid",
            f"a revision must be <= {REVISION_MAX}, got {transaction.revision}",
            "count revisions from 1",
        )
    for key in chain(transaction.puts, transaction.deletes, transaction.expect):
        # Almost all keys are short and ASCII; skip the full check for them.
        if not (key.isascii() and 0 < len(key) <= KEY_BYTES_MAX):
            check_key(key)
    for key, value in transaction.puts.items():
        if len(value) > VALUE_BYTES_MAX:
            raise RequestRefused(
                "value_too_large",
                f"the value of {key!r} must have at most {VALUE_BYTES_MAX} bytes, got {len(value)}",
                "keep bulk bytes outside the store and store a reference",
            )


def check_key(key: str) -> None:
    """Raise `RequestRefused` for an invalid key."""
    size_bytes = key_bytes(key)
    if not 0 < size_bytes <= KEY_BYTES_MAX:
        raise RequestRefused(
            "key_invalid", f"a key must have 1..{KEY_BYTES_MAX} bytes, got {size_bytes}", "use shorter names"
        )


def check_page(prefix: str, after: str, limit: int) -> None:
    """Raise `RequestRefused` for an invalid page. The limit is not lowered: a short page means the end of the list."""
    key_bytes(prefix)
    key_bytes(after)
    if not 0 < limit <= PAGE_ENTRIES_MAX:
        raise RequestRefused(
            "page_invalid", f"limit must be 1..{PAGE_ENTRIES_MAX}, got {limit}", "ask for several pages"
        )


def key_bytes(text: str) -> int:
    """The length of a key or prefix in UTF-8; raises `RequestRefused` for lone surrogates."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestRefused("key_invalid", f"key {text!r} contains lone surrogates", "use valid Unicode") from None


def closed() -> StoreUnavailable:
    """The error of operations after `close`."""
    return StoreUnavailable("store_closed", "the store is closed", "open it again")
