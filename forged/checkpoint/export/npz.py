"""Numpy archives: zip files with one `.npy` file per array.

Types that numpy lacks are stored as bytes, with the type's name in the member's comment.

Invariants:
- `numpy.load` opens written archives without pickle.
- Of an archive that is read, all checksums are verified first, and no member takes more memory than it declares.
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, storage_error
from forged.checkpoint.export.external_files import (
    ArrayLocation,
    FileArrays,
    invalid_file,
    require_valid_names,
    tree_for_names,
)
from forged.checkpoint.format.boxes import Shape
from forged.checkpoint.format.dtypes import EXTENDED, dtype_of, name_of
from forged.checkpoint.format.manifest import SIZE_MAX, Tensors
from forged.checkpoint.model import AXES_MAX
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Reader, Storage
from forged.checkpoint.saving.files.assembly import Assembly, TensorSource
from forged.checkpoint.saving.files.image import layout_of
from forged.checkpoint.saving.files.plan import Share

ENDING = ".npy"
COMMENT = b"forged:"
LONG_BYTES = 1 << 30
"""From this size on, an array's member is written with 64-bit sizes."""
LOCAL_HEADER_BYTES = 30

Array = np.ndarray[Any, Any]


# Writing.


class Archive:
    """An archive of arrays that are read from an origin; a `ports.Source`.

    The arrays are read twice, because the checksum of an array precedes it in the archive.
    """

    def __init__(self, origin: TensorSource, names: Sequence[str], token: CancelToken) -> None:
        """`names` are the arrays' names in the archive."""
        tensors = origin.tensors
        share = Share(list(range(len(tensors.names))), {})
        layout = layout_of(tensors, share, {})
        before = len(layout.header)
        self._arrays = Assembly(
            replace(layout, header=b"", starts=[start - before for start in layout.starts]), share, origin
        )
        archive_layout = _ArchiveLayout()
        with zipfile.ZipFile(archive_layout, "w", allowZip64=True) as archive:
            for number, name in enumerate(names):
                token.check()
                _add_array_to(archive, archive_layout, self._arrays, tensors.dtypes[number], number, name)
        self._segments = archive_layout.segments
        self._starts = archive_layout.starts
        self.size = archive_layout.size

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


def _add_array_to(
    archive: zipfile.ZipFile, layout: _ArchiveLayout, arrays: Assembly, dtype_name: str, number: int, name: str
) -> None:
    """Add one array."""
    shape = arrays.layout.boxes[number].shape
    dtype = dtype_of(dtype_name)
    about = zipfile.ZipInfo(name + ENDING)
    is_raw = dtype_name in EXTENDED
    if is_raw:
        about.comment = COMMENT + dtype_name.encode()
    described = {
        "descr": f"|V{dtype.itemsize}" if is_raw else np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    start, end = arrays.layout.starts[number : number + 2]
    with archive.open(about, "w", force_zip64=end - start >= LONG_BYTES) as member:
        np.lib.format.write_array_header_1_0(member, described)
        layout.is_array_data = True
        for at in range(start, end, BLOCK_BYTES):
            member.write(arrays.run(at, min(BLOCK_BYTES, end - at)).data)
        layout.is_array_data = False


class _ArchiveLayout(io.RawIOBase):
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


# Reading.


@contextmanager
def open_npz(storage: Storage, file: str, token: CancelToken) -> Iterator[FileArrays]:
    """The arrays of an archive, under their names in the archive."""
    with ExitStack() as stack:
        reader = stack.enter_context(storage.open(file))
        try:
            archive = stack.enter_context(zipfile.ZipFile(_SeekableReader(reader)))
            found = [_entry(archive, about, reader, stack, token) for about in archive.infolist()]
        except _BROKEN as error:
            raise invalid_file(file, f"{error!s:.100}") from None
        tensors = Tensors([one.name for one in found], [one.dtype for one in found], [one.shape for one in found])
        require_valid_names(tensors.names, file)
        yield FileArrays(tensors, [one.location for one in found], tree_for_names(tensors.names), token)


_BROKEN = (
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


class _ArrayEntry(NamedTuple):
    """An array in an archive."""

    name: str
    dtype: str
    shape: Shape
    location: ArrayLocation


def _entry(
    archive: zipfile.ZipFile, about: zipfile.ZipInfo, reader: Reader, stack: ExitStack, token: CancelToken
) -> _ArrayEntry:
    with archive.open(about) as member:
        shape, is_fortran, dtype = _npy_header(member)
        header = member.tell()
        name = about.filename.removesuffix(ENDING)
        named = _dtype_name(about, dtype)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > SIZE_MAX or header + size != about.file_size:
            raise ValueError(f"the bytes of {name[:80]!r} do not match its shape")
        if about.compress_type == zipfile.ZIP_STORED and not is_fortran:
            _read_to_end(member, None, token)
            return _ArrayEntry(name, named, shape, ArrayLocation(reader, _data_offset(reader, about) + header))
        temporary = _temporary_file(stack)
        _read_to_end(member, temporary, token)
    if is_fortran and size:
        temporary = _in_c_order(temporary, shape, dtype, stack)
    return _ArrayEntry(name, named, shape, ArrayLocation(_TemporaryReader(temporary, size), 0))


def _npy_header(member: IO[bytes]) -> tuple[Shape, bool, np.dtype[Any]]:
    """An array's shape, whether it is in Fortran order, and its type."""
    try:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"unknown version {version} of the npy format")
        shape, is_fortran, dtype = _HEADERS[version](member)
    except Exception as error:  # noqa: BLE001 - numpy's header parser raises many types
        raise ValueError(f"it is not an array: {error!s:.60}") from None
    if len(shape) > AXES_MAX or any(type(size) is not int or not 0 <= size <= SIZE_MAX for size in shape):
        raise ValueError("an array has an invalid shape")
    return tuple(shape), bool(is_fortran), dtype


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def _dtype_name(about: zipfile.ZipInfo, dtype: np.dtype[Any]) -> str:
    """The manifest's name of an array's type."""
    described = about.comment.removeprefix(COMMENT).decode("ascii", "replace")
    if about.comment.startswith(COMMENT) and described in EXTENDED and dtype_of(described).itemsize == dtype.itemsize:
        return described
    return name_of(dtype)


def _read_to_end(member: IO[bytes], into: IO[bytes] | None, token: CancelToken) -> None:
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
        raise _temp_space_error(error) from None


def _temporary_file(stack: ExitStack) -> IO[bytes]:
    """A file that is deleted when it is closed."""
    return stack.enter_context(tempfile.TemporaryFile())


def _temp_space_error(error: OSError) -> CheckpointException:
    folder = tempfile.gettempdir()
    return storage_error(
        f"{folder} cannot hold the unpacked array: {error.strerror}", folder, "set TMPDIR to a folder with more space"
    )


def _data_offset(reader: Reader, about: zipfile.ZipInfo) -> int:
    """The offset of a member's data in the archive."""
    header = bytearray(LOCAL_HEADER_BYTES)
    reader.read_into(about.header_offset, memoryview(header))
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return about.header_offset + LOCAL_HEADER_BYTES + lengths


def _in_c_order(temporary: IO[bytes], shape: Shape, dtype: np.dtype[Any], stack: ExitStack) -> IO[bytes]:
    """The array in another temporary file, in C order."""
    turned = _temporary_file(stack)
    try:
        os.posix_fallocate(turned.fileno(), 0, int(np.prod(shape, dtype=object)) * dtype.itemsize)
    except OSError as error:
        raise _temp_space_error(error) from None
    raw = np.dtype(f"V{dtype.itemsize}")
    there: Array = np.memmap(turned, raw, "r+", 0, shape, "C")
    there[...] = np.memmap(temporary, raw, "r", 0, shape, "F")
    return turned


class _TemporaryReader:
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


class _SeekableReader(io.RawIOBase):
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
