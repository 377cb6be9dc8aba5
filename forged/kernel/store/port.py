"""The port behind which decisions become durable.

Law: a store is an ordered map of keys to small values with one revision counter. A batch of transactions becomes
durable together or not at all; when `commit` returns, every applied one survives a power cut. The caller groups; the
store does not wait for more. Nothing here knows facts, replies or jobs: those are keys.
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
    """A key, its value, and the revision of the transaction that wrote it last."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """Writes that apply together if every expected key is at its expected revision.

    `revision` is the revision to which the transaction brings the store; it must be greater than the current one, so
    that a writer who lost its place is fenced. A key that is both put and deleted is deleted.
    """

    revision: int
    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: Sequence[str] = ()
    expect: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a transaction was not applied: this key was not at the revision it expected."""

    key: str
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Change:
    """One key as a transaction left it: `value` is None where it was deleted."""

    key: str
    value: bytes | None
    revision: int


class StoreUnavailable(Unavailable):
    """The medium refused a write or a read: full, read-only, failing. Nothing of the batch was applied."""


class StoreCorrupt(ConfigError):
    """What is on the medium is not what a store wrote; it is named and left as it is, never rebuilt."""


class StoreFenced(Unavailable):
    """A transaction's revision is not ahead of the store's: somebody else has written."""


class Compacted(RequestRefused):
    """The changes after the revision asked for are no longer kept; list, then watch from the store's revision."""


@runtime_checkable
class BackedUp(Protocol):
    """A store that can copy itself while it is used."""

    async def backup(self, path: Path) -> None:
        """Make a consistent, durable copy at `path`, which appears there whole or not at all."""
        ...


class Store(Protocol):
    """What a store does. All of it may be awaited from one event loop only."""

    @property
    def revision(self) -> int:
        """The revision of the last durable transaction; 0 for an empty store."""
        ...

    @property
    def history(self) -> str:
        """A random name, given when the store was made: two stores with one name have one past."""
        ...

    async def get(self, key: str) -> Entry | None:
        """The key's entry, or None."""
        ...

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        """The first `limit` entries whose keys start with `prefix` and sort behind `after`, in key order."""
        ...

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        """Apply the batch in order and make it durable as one; a conflict leaves out that transaction alone.

        Raises `StoreUnavailable`, `StoreFenced`, or `RequestRefused` for a limit, when nothing of the batch was
        applied. When the caller is cancelled, the batch is applied whole or not at all, and a later `get` tells which.
        """
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """The changes under `prefix` of revisions greater than `after`, in order, then new ones as they become durable.

        Raises `Compacted` when changes since `after` have been forgotten, also in the middle, for a watcher that is
        too slow. Ends when the store closes, after the last change.
        """
        ...

    async def close(self) -> None:
        """Make what was committed durable, let go of the medium, end the watchers. Idempotent."""
        ...


def check(transaction: Transaction) -> None:
    """Raise `RequestRefused` when a transaction is over a limit."""
    operations = len(transaction.puts) + len(transaction.deletes) + len(transaction.expect)
    if operations > OPERATIONS_MAX:
        raise RequestRefused(
            "transaction_too_large",
            f"a transaction of {operations} operations is over the limit of {OPERATIONS_MAX}",
            "split the request",
        )
    if transaction.revision > REVISION_MAX:
        raise RequestRefused(
            "revision_invalid", f"revision {transaction.revision} is over {REVISION_MAX}", "count revisions from 1"
        )
    for key in chain(transaction.puts, transaction.deletes, transaction.expect):
        # Almost all are short and ASCII, and need no closer look.
        if not (key.isascii() and 0 < len(key) <= KEY_BYTES_MAX):
            check_key(key)
    for key, value in transaction.puts.items():
        if len(value) > VALUE_BYTES_MAX:
            raise RequestRefused(
                "value_too_large",
                f"the value of {key!r} has {len(value)} bytes, over the limit of {VALUE_BYTES_MAX}",
                "keep bulk bytes outside the store and store a reference",
            )


def check_key(key: str) -> None:
    """Raise `RequestRefused` for what cannot be a key."""
    size_bytes = key_bytes(key)
    if not 0 < size_bytes <= KEY_BYTES_MAX:
        raise RequestRefused(
            "key_invalid", f"a key of {size_bytes} bytes is outside 1..{KEY_BYTES_MAX}", "use shorter names"
        )


def check_page(prefix: str, after: str, limit: int) -> None:
    """Raise `RequestRefused` for an impossible page: a lowered limit would make any page look like the last one."""
    key_bytes(prefix)
    key_bytes(after)
    if not 0 < limit <= PAGE_ENTRIES_MAX:
        raise RequestRefused(
            "page_invalid", f"a page of {limit} entries is outside 1..{PAGE_ENTRIES_MAX}", "ask for several pages"
        )


def key_bytes(text: str) -> int:
    """How long a key or a part of one is in UTF-8, in whose order keys are kept."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestRefused("key_invalid", f"{text!r} is not Unicode text", "leave out lone surrogates") from None


def closed() -> StoreUnavailable:
    """What an operation on a store raises after `close`."""
    return StoreUnavailable("store_closed", "the store is closed", "open it again")
