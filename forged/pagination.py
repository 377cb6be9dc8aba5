"""Long lists, page by page.

Law: a page fits into a frame, whatever was asked for, and holds one entry at least while there are any; so whoever
reads on from the last entry of each page comes to the end. Pages are read one after the other while entries come and
go: one that was there all the time is told once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop
from typing import TypeVar

import msgspec

from forged.errors import RequestRefused

T = TypeVar("T")

PAGE_ENTRIES_MAX = 500
PAGE_BYTES_MAX = 1 << 20
"""Half of the smallest frame that can be configured. An entry alone is smaller still."""

_encode = msgspec.msgpack.Encoder().encode


def ascending(names: Iterable[str], after: str) -> Iterator[str]:
    """The names behind `after`, in order; no more of them are sorted than are taken."""
    heap = [name for name in names if name > after]
    heapify(heap)
    while heap:
        yield heappop(heap)


def take_page(entries: Iterator[T], limit: int) -> tuple[list[T], bool]:
    """The first entries, `limit` at most, and whether there are more."""
    if limit < 1:
        raise RequestRefused("page_invalid", f"a page of {limit} entries holds nothing", "ask for 1 or more")
    page: list[T] = []
    room_bytes = PAGE_BYTES_MAX
    for entry in entries:
        room_bytes -= len(_encode(entry))
        if page and (room_bytes < 0 or len(page) >= min(limit, PAGE_ENTRIES_MAX)):
            return page, True
        page.append(entry)
    return page, False
