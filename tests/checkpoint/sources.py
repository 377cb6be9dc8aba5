"""Bytes to be written, from memory of several kinds."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from forged.checkpoint.ports import BLOCK_BYTES

PAGE = 4096


class Given:
    """Bytes that are copied into the room."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def block(self, offset: int, room: memoryview) -> memoryview:
        room[:] = self._data[offset : offset + len(room)]
        return room


class Lying:
    """Bytes that lie in memory already, so many bytes behind the beginning of a page."""

    def __init__(self, data: bytes, behind: int = 0) -> None:
        self._memory = memoryview(mmap.mmap(-1, len(data) + behind + 1))[behind : behind + len(data)]
        self._memory[:] = data
        self.size = len(data)

    def block(self, offset: int, room: memoryview) -> memoryview:
        return self._memory[offset : offset + len(room)]


class Failing(Given):
    """Bytes of which those from an offset on cannot be had."""

    def __init__(self, data: bytes, offset: int, fail: Callable[[], object]) -> None:
        super().__init__(data)
        self._offset = offset
        self._fail = fail

    def block(self, offset: int, room: memoryview) -> memoryview:
        if offset >= self._offset:
            self._fail()
        return super().block(offset, room)


def pattern(size: int) -> bytes:
    """Bytes that are nowhere the same as a block or a page before."""
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


SIZES = (0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK_BYTES, 2 * BLOCK_BYTES + PAGE + 5)
