"""Rooms that are filled one after another have what one large room would have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.storage.rooms import fill, rooms_between
from tests.checkpoint.fixtures.sources import pattern

LENGTHS = st.lists(st.integers(0, 9), max_size=8)


def rooms_of(lengths: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in lengths]


@given(LENGTHS)
def test_rooms_are_filled_one_after_another(lengths: list[int]) -> None:
    rooms = rooms_of(lengths)
    fill(rooms, memoryview(pattern(sum(lengths))))
    assert b"".join(rooms) == pattern(sum(lengths))


@given(LENGTHS, st.integers(0, 80), st.integers(0, 80))
def test_rooms_between_two_bytes_are_the_same_memory_without_empty_rooms(
    lengths: list[int], start: int, end: int
) -> None:
    rooms = rooms_of(lengths)
    fill(rooms, memoryview(pattern(sum(lengths))))
    found = rooms_between(rooms, start, end)
    assert b"".join(found) == pattern(sum(lengths))[start:end]
    assert all(len(room) for room in found)
    assert {id(room.obj) for room in found} <= {id(room.obj) for room in rooms}
