"""Zip archives of arrays: those that are written without copying the arrays, and parts of those that are read.

Invariants:
- An archive that is written has the bytes that `zipfile` would write.
- No member takes more memory than a block.
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
import zlib
from bisect import bisect_right
from contextlib import ExitStack
from typing import IO, Any

import numpy as np

from forged.checkpoint.errors import CheckpointException, storage_error
from forged.checkpoint.export.external_files import invalid_file
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Reader
from forged.checkpoint.saving.files.assembly import Assembly

LOCAL_HEADER_BYTES = 30
LONG_BYTES = 1 << 30
"""From this size on, an array's member is written with 64-bit sizes."""
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    TypeError,
    LookupError,
)
"""What zipfile and numpy raise for a malformed archive."""

Array = np.ndarray[Any, Any]


class ArchiveImage:
    """An archive, or several files in a row, with array data from an assembly; a `ports.ByteSource`."""

    def __init__(self, arrays: Assembly, segments: list[bytearray | int], starts: list[int], size: int) -> None:
        """`segments` and `starts` as an `ArchiveLayout` has them."""
        self._arrays = arrays
        self._segments = segments
        self._starts = starts
        self.size = size

    def block(self, offset: int, out: memoryview) -> memoryview:
        end = min(offset + len(out), self.size)
        at, number = offset, bisect_right(self._starts, offset) - 1
        while at < end:
            start, segment = self._starts[number], self._segments[number]
            stop = min(end, self._starts[number + 1] if number + 1 < len(self._starts) else self.size)
            into = out[at - offset : stop - offset]
            if isinstance(segment, int):
                into[:] = self._arrays.run(segment + at - start, stop - at).data
            else:
                into[:] = memoryview(segment)[at - start : stop - start]
            at, number = stop, number + 1
        return out[: end - offset]


class ArchiveLayout(io.RawIOBase):
    """A file that keeps everything written to it except array data, of which it keeps the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[bytearray | int] = []
        """Bytes; or, for array data, how many bytes of array data precede it."""
        self.starts: list[int] = []
        self.size = 0
        self.is_array_data = False
        self._arrays = 0
        self._at = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._at < self.size:
            self._overwrite(view)
        elif self.is_array_data:
            self._add_array(view.nbytes)
        else:
            self._add_literal(view)
        self._at += view.nbytes
        self.size = max(self.size, self._at)
        return view.nbytes

    def _overwrite(self, view: memoryview) -> None:
        """Overwrite a member's header, when its checksum is known."""
        number = bisect_right(self.starts, self._at) - 1
        literal, at = self.segments[number], self._at - self.starts[number]
        assert isinstance(literal, bytearray)
        assert at + view.nbytes <= len(literal)
        literal[at : at + view.nbytes] = view

    def _add_array(self, count: int) -> None:
        if not self.segments or not isinstance(self.segments[-1], int):
            self._begin(self._arrays)
        self._arrays += count

    def _add_literal(self, view: memoryview) -> None:
        if not self.segments or isinstance(self.segments[-1], int):
            self._begin(bytearray())
        literal = self.segments[-1]
        assert isinstance(literal, bytearray)
        literal += view

    def _begin(self, what: bytearray | int) -> None:
        self.segments.append(what)
        self.starts.append(self.size)


def read_to_end(member: IO[bytes], into: IO[bytes] | None, token: CancelToken) -> None:
    """Read the rest of a member, which verifies its checksum; write it to `into` if given."""
    while data := member.read(BLOCK_BYTES):
        token.check()
        if into is not None:
            _keep(into, data)


def _keep(into: IO[bytes], data: bytes) -> None:
    try:
        into.write(data)
        into.flush()
    except OSError as error:
        raise temp_space_error(error) from None


def temporary_file(stack: ExitStack) -> IO[bytes]:
    """A file that is deleted when it is closed."""
    return stack.enter_context(tempfile.TemporaryFile())


def temp_space_error(error: OSError) -> CheckpointException:
    folder = tempfile.gettempdir()
    return storage_error(
        f"{folder} cannot hold the unpacked array: {error.strerror}", folder, "set TMPDIR to a folder with more space"
    )


def data_offset(reader: Reader, about: zipfile.ZipInfo) -> int:
    """The offset of a member's data in the archive."""
    header = bytearray(LOCAL_HEADER_BYTES)
    reader.read_into(about.header_offset, memoryview(header))
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return about.header_offset + LOCAL_HEADER_BYTES + lengths


class TemporaryReader:
    """A temporary file; a `ports.Reader`."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.size = size

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        for room in rooms:
            done = 0
            while done < len(room):
                count = os.preadv(self._file.fileno(), [room[done:]], offset + done)
                if not count:
                    raise invalid_file("a temporary file", "it was truncated")
                done += count
            offset += len(room)

    def mapped(self) -> memoryview | None:
        return None


class SeekableReader(io.RawIOBase):
    """A reader as the file object that zipfile needs."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + (0, self._at, self._reader.size)[whence]
        if at < 0:
            raise OSError("negative seek position")
        self._at = at
        return at

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        count = max(0, min(len(view), self._reader.size - self._at))
        self._reader.read_into(self._at, view[:count])
        self._at += count
        return count
