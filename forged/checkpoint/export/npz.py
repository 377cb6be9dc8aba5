"""Numpy's archives: a zip file with one `.npy` file for each array.

Law: what is written, `numpy.load` opens without pickle. Of an archive that is read, all checksums are verified first,
and nothing takes more room than it says. Types that numpy itself lacks are bytes to it; a comment says which they are.
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
from forged.checkpoint.export.foreign import Foreign, Place, check_names, refused, tree_of
from forged.checkpoint.format.boxes import Shape
from forged.checkpoint.format.dtypes import EXTENDED, dtype_of, name_of
from forged.checkpoint.format.manifest import SIZE_MAX, Tensors
from forged.checkpoint.model import AXES_MAX
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Reader, Storage
from forged.checkpoint.saving.assembly import Assembly, TensorSource
from forged.checkpoint.saving.image import layout_of
from forged.checkpoint.saving.plan import Share

ENDING = ".npy"
COMMENT = b"forged:"
LONG_BYTES = 1 << 30
"""From this size on a file in the archive has places for sizes of 64 bits."""
LOCAL_HEADER_BYTES = 30

Array = np.ndarray[Any, Any]


# Writing.


class Archive:
    """An archive of arrays that lie somewhere else; a `ports.Source`.

    They are read twice, because what stands before an array in an archive has its checksum in it.
    """

    def __init__(self, origin: TensorSource, names: Sequence[str], token: CancelToken) -> None:
        """`names` are those of the arrays in the archive."""
        tensors = origin.tensors
        share = Share(list(range(len(tensors.names))), {})
        layout = layout_of(tensors, share, {})
        before = len(layout.header)
        self._arrays = Assembly(
            replace(layout, header=b"", starts=[start - before for start in layout.starts]), share, origin
        )
        drawing = _Drawing()
        with zipfile.ZipFile(drawing, "w", allowZip64=True) as archive:
            for number, name in enumerate(names):
                token.check()
                _draw(archive, drawing, self._arrays, tensors.dtypes[number], number, name)
        self._segments = drawing.segments
        self._starts = drawing.starts
        self.size = drawing.size

    def block(self, offset: int, room: memoryview) -> memoryview:
        """Make a block."""
        end = min(offset + len(room), self.size)
        at, number = offset, bisect_right(self._starts, offset) - 1
        while at < end:
            start, segment = self._starts[number], self._segments[number]
            stop = min(end, self._starts[number + 1] if number + 1 < len(self._starts) else self.size)
            into = room[at - offset : stop - offset]
            if isinstance(segment, int):
                into[:] = self._arrays.run(segment + at - start, stop - at).data
            else:
                into[:] = memoryview(segment)[at - start : stop - start]
            at, number = stop, number + 1
        return room[: end - offset]


def _draw(
    archive: zipfile.ZipFile, drawing: _Drawing, arrays: Assembly, dtype_name: str, number: int, name: str
) -> None:
    """One array of an archive."""
    shape = arrays.layout.boxes[number].shape
    dtype = dtype_of(dtype_name)
    about = zipfile.ZipInfo(name + ENDING)
    is_raw = dtype_name in EXTENDED
    if is_raw:
        about.comment = COMMENT + dtype_name.encode()
    said = {
        "descr": f"|V{dtype.itemsize}" if is_raw else np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    start, end = arrays.layout.starts[number : number + 2]
    with archive.open(about, "w", force_zip64=end - start >= LONG_BYTES) as member:
        np.lib.format.write_array_header_1_0(member, said)
        drawing.draws_arrays = True
        for at in range(start, end, BLOCK_BYTES):
            member.write(arrays.run(at, min(BLOCK_BYTES, end - at)).data)
        drawing.draws_arrays = False


class _Drawing(io.RawIOBase):
    """A file of which all is kept but the arrays themselves; of those, where they go."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[bytearray | int] = []
        """Bytes; or in their place, how many bytes of arrays there were before those that go there."""
        self.starts: list[int] = []
        self.size = 0
        self.draws_arrays = False
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
            self._mend(view)
        elif self.draws_arrays:
            self._add_array(view.nbytes)
        else:
            self._add_literal(view)
        self._at += view.nbytes
        self.size = max(self.size, self._at)
        return view.nbytes

    def _mend(self, view: memoryview) -> None:
        """Write over bytes that are there: what stands before an array, when its checksum is known."""
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
def opened_npz(storage: Storage, file: str, token: CancelToken) -> Iterator[Foreign]:
    """The arrays of an archive, under the names that they have there."""
    with ExitStack() as stack:
        reader = stack.enter_context(storage.open(file))
        try:
            archive = stack.enter_context(zipfile.ZipFile(_Seekable(reader)))
            found = [_found(archive, about, reader, stack, token) for about in archive.infolist()]
        except _BROKEN as error:
            raise refused(file, f"{error!s:.100}") from None
        tensors = Tensors([one.name for one in found], [one.dtype for one in found], [one.shape for one in found])
        check_names(tensors.names, file)
        yield Foreign(tensors, [one.place for one in found], tree_of(tensors.names), token)


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
"""What zipfile and numpy raise where an archive is not as it has to be."""


class _Found(NamedTuple):
    """An array in an archive."""

    name: str
    dtype: str
    shape: Shape
    place: Place


def _found(
    archive: zipfile.ZipFile, about: zipfile.ZipInfo, reader: Reader, stack: ExitStack, token: CancelToken
) -> _Found:
    with archive.open(about) as member:
        shape, is_fortran, dtype = _npy_header(member)
        header = member.tell()
        name = about.filename.removesuffix(ENDING)
        named = _named(about, dtype)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > SIZE_MAX or header + size != about.file_size:
            raise ValueError(f"{name[:80]!r} has not as many bytes as its shape")
        if about.compress_type == zipfile.ZIP_STORED and not is_fortran:
            _read_to_end(member, None, token)
            return _Found(name, named, shape, Place(reader, _data_offset(reader, about) + header))
        spool = _spool(stack)
        _read_to_end(member, spool, token)
    if is_fortran and size:
        spool = _in_c_order(spool, shape, dtype, stack)
    return _Found(name, named, shape, Place(_Spooled(spool, size), 0))


def _npy_header(member: IO[bytes]) -> tuple[Shape, bool, np.dtype[Any]]:
    """What stands before an array: its shape, whether it is in Fortran's order, and its type."""
    try:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"version {version} of the npy format is not known")
        shape, is_fortran, dtype = _HEADERS[version](member)
    except Exception as error:  # noqa: BLE001 - whatever Python's tokenizer and parser have to say
        raise ValueError(f"it is no array: {error!s:.60}") from None
    if len(shape) > AXES_MAX or any(type(size) is not int or not 0 <= size <= SIZE_MAX for size in shape):
        raise ValueError("an array has no possible shape")
    return tuple(shape), bool(is_fortran), dtype


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def _named(about: zipfile.ZipInfo, dtype: np.dtype[Any]) -> str:
    """The type of an array, as a manifest calls it."""
    said = about.comment.removeprefix(COMMENT).decode("ascii", "replace")
    if about.comment.startswith(COMMENT) and said in EXTENDED and dtype_of(said).itemsize == dtype.itemsize:
        return said
    return name_of(dtype)


def _read_to_end(member: IO[bytes], into: IO[bytes] | None, token: CancelToken) -> None:
    """Read what is left, whose checksum is verified thereby; keep it, if there is somewhere to."""
    while data := member.read(BLOCK_BYTES):
        token.check()
        if into is not None:
            _keep(into, data)


def _keep(into: IO[bytes], data: bytes) -> None:
    try:
        into.write(data)
        into.flush()
    except OSError as error:
        raise _no_room(error) from None


def _spool(stack: ExitStack) -> IO[bytes]:
    """A file that is gone when it is closed."""
    return stack.enter_context(tempfile.TemporaryFile())


def _no_room(error: OSError) -> CheckpointException:
    folder = tempfile.gettempdir()
    return storage_error(
        f"{folder} does not take what is unpacked: {error.strerror}", folder, "let TMPDIR name a folder with more room"
    )


def _data_offset(reader: Reader, about: zipfile.ZipInfo) -> int:
    """Where the bytes of a file begin in an archive."""
    header = bytearray(LOCAL_HEADER_BYTES)
    reader.read_into(about.header_offset, memoryview(header))
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return about.header_offset + LOCAL_HEADER_BYTES + lengths


def _in_c_order(spool: IO[bytes], shape: Shape, dtype: np.dtype[Any], stack: ExitStack) -> IO[bytes]:
    """The same array in another file, in the order in which checkpoints have it."""
    turned = _spool(stack)
    try:
        os.posix_fallocate(turned.fileno(), 0, int(np.prod(shape, dtype=object)) * dtype.itemsize)
    except OSError as error:
        raise _no_room(error) from None
    raw = np.dtype(f"V{dtype.itemsize}")
    there: Array = np.memmap(turned, raw, "r+", 0, shape, "C")
    there[...] = np.memmap(spool, raw, "r", 0, shape, "F")
    return turned


class _Spooled:
    """A file of this process's own; a `ports.Reader`."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.size = size

    def read_into(self, offset: int, room: memoryview) -> None:
        done = 0
        while done < len(room):
            count = os.preadv(self._file.fileno(), [room[done:]], offset + done)
            if not count:
                raise refused("a temporary file", "it is shorter than it was")
            done += count

    def mapped(self) -> memoryview | None:
        return None


class _Seekable(io.RawIOBase):
    """A reader as the file that zipfile wants."""

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
            raise OSError("a place before the beginning")
        self._at = at
        return at

    def readinto(self, room: Any) -> int:
        view = memoryview(room).cast("B")
        count = max(0, min(len(view), self._reader.size - self._at))
        self._reader.read_into(self._at, view[:count])
        self._at += count
        return count
