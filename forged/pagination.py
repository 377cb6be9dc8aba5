"""Pages of long lists: in replies, and in the requests of a client.

Invariants:
- A page fits into a frame, and has at least one entry if there is one, so reading on after each page's last entry ends.
- Entries may be added and removed between pages; an entry that exists all the time is returned exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop
from typing import TypeVar

import msgspec

from forged.errors import RequestRefused

T = TypeVar("T")

PAGE_ENTRIES_MAX = 500
PAGE_BYTES_MAX = 1 << 20
"""Half of the smallest configurable frame; a single entry is smaller."""

_encode = msgspec.msgpack.Encoder().encode


def ascending(names: Iterable[str], after: str) -> Iterator[str]:
    """The names greater than `after`, in order; sorts only as many as are consumed."""
    heap = [name for name in names if name > after]
    heapify(heap)
    while heap:
        yield heappop(heap)


def take_page(entries: Iterator[T], limit: int) -> tuple[list[T], bool]:
    """The first entries, at most `limit`, and whether there are more."""
    if limit < 1:
        raise RequestRefused("page_invalid", f"limit must be >= 1, got {limit}", "use 1 or more")
    page: list[T] = []
    room_bytes = PAGE_BYTES_MAX
    for entry in entries:
        room_bytes -= len(_encode(entry))
        if page and (room_bytes < 0 or len(page) >= min(limit, PAGE_ENTRIES_MAX)):
            return page, True
        page.append(entry)
    return page, False


def in_batches(
    items: Iterable[T], encode: Callable[[T], bytes], items_max: int, bytes_max: int = PAGE_BYTES_MAX
) -> Iterator[list[T]]:
    """All items in order, at most `items_max` in a batch; an item of more than `bytes_max` is alone in its batch."""
    batch: list[T] = []
    room_bytes = bytes_max
    for one in items:
        size_bytes = len(encode(one))
        if batch and (size_bytes > room_bytes or len(batch) == items_max):
            yield batch
            batch, room_bytes = [], bytes_max
        room_bytes -= size_bytes
        batch.append(one)
    if batch:
        yield batch
