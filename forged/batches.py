"""Batches of what a client sends: the parts of a long list that one request each can carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

REQUEST_BYTES_MAX = 1 << 20
"""Half of the smallest frame that a daemon can be configured for."""


def in_batches(
    items: Iterable[T], encode: Callable[[T], bytes], items_max: int, bytes_max: int = REQUEST_BYTES_MAX
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
