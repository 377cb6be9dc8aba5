"""Reads a file through the page cache where the cache has it, else with direct I/O.

Invariants:
- Both ways return the same bytes.
- Direct I/O is used only by the sole reader of a file: other readers would have to read the disk again for bytes that
  the cache could have kept.
- A file system that refuses direct I/O is read through the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from forged.checkpoint.storage.direct_write import NOT_SUPPORTED, BlockBuffers, retry_interrupted
from forged.checkpoint.storage.files import READ, ROOMS_MAX, Files
from forged.checkpoint.storage.rooms import fill, rooms_between
from forged.file_sync import PAGE

FILE_BYTES_MIN = 32 << 20
"""Smaller files are read through the cache: direct I/O gains little, and they may be read again."""
READ_BYTES_MIN = 1 << 20
PIECE_BYTES = 2 << 20
"""Direct reads are this large, so that the processor's cache still has the bytes when they are copied."""


class FileReader:
    """Reads one open file; thread-safe."""

    def __init__(self, files: Files, fd: int, path: str, buffers: BlockBuffers) -> None:
        self.size = files.size(fd)
        self._files = files
        self._fd = fd
        self._buffers = buffers
        self._direct_fd = self._opened_past_cache(path) if self.size >= FILE_BYTES_MIN else None
        self._is_direct = self._direct_fd is not None
        # Read-ahead after a small read would make a cold file look cached.
        with suppress(OSError):
            files.read_ahead(fd, on=not self._is_direct)

    def close(self) -> None:
        """Close the descriptor for direct I/O."""
        if self._direct_fd is not None:
            with suppress(OSError):
                self._files.close(self._direct_fd)

    def read(self, offset: int, rooms: Sequence[memoryview]) -> int:
        """Fill the rooms, one after another, with the bytes from `offset` on; returns how many the file has there."""
        size, done = sum(map(len, rooms)), 0
        if self._is_direct and size >= READ_BYTES_MIN and self._is_cold(offset, size):
            done = self._read_past_cache(offset, rooms, size)
        while done < size:
            left = rooms_between(rooms, done, size) if done else rooms
            count = retry_interrupted(self._files.read, self._fd, left[:ROOMS_MAX], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _opened_past_cache(self, path: str) -> int | None:
        try:
            if not self._files.lock_alone(self._fd):
                return None
            fd = self._files.open(path, READ)
        except OSError:
            return None
        try:
            self._files.bypass_cache(fd, on=True)
        except OSError:
            self._files.close(fd)
            return None
        return fd

    def _is_cold(self, offset: int, length: int) -> bool:
        """Whether the middle of a range is not cached; its edges may be cached by read-ahead of neighbours."""
        middle = offset + length // 2
        try:
            return middle < self.size and not self._files.is_cached(self._fd, middle)
        except OSError:
            return False

    def _read_past_cache(self, offset: int, rooms: Sequence[memoryview], size: int) -> int:
        """Read in whole pages with direct I/O; returns how many bytes were read before the end or a refusal."""
        assert self._direct_fd is not None
        done = 0
        with self._buffers.buffer() as pages:
            while done < size:
                start = (offset + done) // PAGE * PAGE
                length = min(PIECE_BYTES, -(-(offset + size - start) // PAGE) * PAGE)
                try:
                    count = retry_interrupted(self._files.read, self._direct_fd, [pages[:length]], start)
                except OSError as error:
                    if error.errno not in NOT_SUPPORTED:
                        raise
                    # Some file systems refuse direct I/O only at the first read.
                    self._is_direct = False
                    return done
                skipped = offset + done - start
                taken = min(count - skipped, size - done)
                if taken <= 0:
                    return done
                fill(rooms_between(rooms, done, done + taken), pages[skipped : skipped + taken])
                done += taken
        return done
