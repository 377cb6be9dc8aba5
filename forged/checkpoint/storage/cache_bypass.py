"""How a file is read: out of the page cache where it has been read lately, past it where not.

Law: what is read is what the file has, by either way. Past the cache goes who is alone with a file: others would have
to fetch from the disk again what the cache could have given them. A file system that reads in one way only is read in
that one.
"""

from __future__ import annotations

from contextlib import suppress

from forged.checkpoint.storage.direct_write import NOT_SUPPORTED, BlockBuffers, copy_bytes, retry_interrupted
from forged.checkpoint.storage.files import READ, Files
from forged.file_sync import PAGE

FILE_BYTES_MIN = 32 << 20
"""Smaller files are read through the cache: there is little to win, and they may be wanted again."""
READ_BYTES_MIN = 1 << 20
PIECE_BYTES = 2 << 20
"""What is read past the cache at once: it is still in the processor's own cache when it is copied from there."""


class FileReader:
    """One file that is read, by several threads."""

    def __init__(self, files: Files, fd: int, path: str, rooms: BlockBuffers) -> None:
        self.size = files.size(fd)
        self._files = files
        self._fd = fd
        self._rooms = rooms
        self._direct_fd = self._opened_past_cache(path) if self.size >= FILE_BYTES_MIN else None
        self._is_direct = self._direct_fd is not None
        # What the kernel read ahead behind a small read would look like a file that is warm.
        with suppress(OSError):
            files.read_ahead(fd, on=not self._is_direct)

    def close(self) -> None:
        """Let go of what was opened besides."""
        if self._direct_fd is not None:
            with suppress(OSError):
                self._files.close(self._direct_fd)

    def read(self, offset: int, room: memoryview) -> int:
        """Fill the room with the bytes from `offset` on; returns how many there were."""
        done = 0
        if self._is_direct and len(room) >= READ_BYTES_MIN and self._is_cold(offset, len(room)):
            done = self._read_past_cache(offset, room)
        while done < len(room):
            count = retry_interrupted(self._files.read, self._fd, room[done:], offset + done)
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
        """Whether the middle has to come from the disk; reading ahead takes the edges from one side to the other."""
        middle = offset + length // 2
        try:
            return middle < self.size and not self._files.is_cached(self._fd, middle)
        except OSError:
            return False

    def _read_past_cache(self, offset: int, room: memoryview) -> int:
        """Read it in whole pages; returns how much there was, or could be read so."""
        assert self._direct_fd is not None
        done = 0
        with self._rooms.one() as pages:
            while done < len(room):
                start = (offset + done) // PAGE * PAGE
                length = min(PIECE_BYTES, -(-(offset + len(room) - start) // PAGE) * PAGE)
                try:
                    count = retry_interrupted(self._files.read, self._direct_fd, pages[:length], start)
                except OSError as error:
                    if error.errno not in NOT_SUPPORTED:
                        raise
                    # It says only now that it cannot.
                    self._is_direct = False
                    return done
                skipped = offset + done - start
                taken = min(count - skipped, len(room) - done)
                if taken <= 0:
                    return done
                copy_bytes(pages[skipped : skipped + taken], room[done : done + taken])
                done += taken
        return done
