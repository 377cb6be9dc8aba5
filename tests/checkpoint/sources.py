"""Sources of bytes to write."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from forged.checkpoint.ports import BLOCK_BYTES

PAGE = 4096


class CopiedSource:
    """Bytes that are copied into the given buffer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def block(self, offset: int, buffer: memoryview) -> memoryview:
        buffer[:] = self._data[offset : offset + len(buffer)]
        return buffer


class MemorySource:
    """Bytes in memory, at an offset from the beginning of a page."""

    def __init__(self, data: bytes, offset_in_page: int = 0) -> None:
        self._memory = memoryview(mmap.mmap(-1, len(data) + offset_in_page + 1))[
            offset_in_page : offset_in_page + len(data)
        ]
        self._memory[:] = data
        self.size = len(data)

    def block(self, offset: int, buffer: memoryview) -> memoryview:
        return self._memory[offset : offset + len(buffer)]


class FailingSource(CopiedSource):
    """Bytes that fail from an offset on."""

    def __init__(self, data: bytes, offset: int, fail: Callable[[], object]) -> None:
        super().__init__(data)
        self._offset = offset
        self._fail = fail

    def block(self, offset: int, buffer: memoryview) -> memoryview:
        if offset >= self._offset:
            self._fail()
        return super().block(offset, buffer)


def pattern(size: int) -> bytes:
    """Bytes that differ from block to block and from page to page."""
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


SIZES = (0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK_BYTES, 2 * BLOCK_BYTES + PAGE + 5)
