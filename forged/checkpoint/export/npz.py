"""Numpy archives: zip files with one `.npy` file per array.

Types that numpy lacks are stored as bytes, with the type's name in the member's comment.

Invariants:
- `numpy.load` opens written archives without pickle.
- Of an archive that is read, all checksums are verified first, and no member takes more memory than it declares.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, Any, NamedTuple

import numpy as np

from forged.checkpoint.export.external_files import (
    ArrayLocation,
    FileArrays,
    invalid_file,
    require_valid_names,
    tree_for_names,
)
from forged.checkpoint.export.zip_archive import (
    BROKEN,
    LONG_BYTES,
    ArchiveImage,
    ArchiveLayout,
    SeekableReader,
    TemporaryReader,
    data_offset,
    read_to_end,
    temp_space_error,
    temporary_file,
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

Array = np.ndarray[Any, Any]


# Writing.


class Archive(ArchiveImage):
    """An archive of arrays that are read from an origin; a `ports.Source`.

    The arrays are read twice, because the checksum of an array precedes it in the archive.
    """

    def __init__(self, origin: TensorSource, names: Sequence[str], token: CancelToken) -> None:
        """`names` are the arrays' names in the archive."""
        tensors = origin.tensors
        share = Share(list(range(len(tensors.names))), {})
        layout = layout_of(tensors, share, {})
        before = len(layout.header)
        arrays = Assembly(
            replace(layout, header=b"", starts=[start - before for start in layout.starts]), share, origin
        )
        archive_layout = ArchiveLayout()
        with zipfile.ZipFile(archive_layout, "w", allowZip64=True) as archive:
            for number, name in enumerate(names):
                token.check()
                _add_array_to(archive, archive_layout, arrays, tensors.dtypes[number], number, name)
        super().__init__(arrays, archive_layout.segments, archive_layout.starts, archive_layout.size)


def _add_array_to(
    archive: zipfile.ZipFile, layout: ArchiveLayout, arrays: Assembly, dtype_name: str, number: int, name: str
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


# Reading.


@contextmanager
def open_npz(storage: Storage, file: str, token: CancelToken) -> Iterator[FileArrays]:
    """The arrays of an archive, under their names in the archive."""
    with ExitStack() as stack:
        reader = stack.enter_context(storage.open(file))
        try:
            archive = stack.enter_context(zipfile.ZipFile(SeekableReader(reader)))
            found = [_entry(archive, about, reader, stack, token) for about in archive.infolist()]
        except BROKEN as error:
            raise invalid_file(file, f"{error!s:.100}") from None
        tensors = Tensors([one.name for one in found], [one.dtype for one in found], [one.shape for one in found])
        require_valid_names(tensors.names, file)
        yield FileArrays(tensors, [one.location for one in found], tree_for_names(tensors.names), token)


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
            read_to_end(member, None, token)
            return _ArrayEntry(name, named, shape, ArrayLocation(reader, data_offset(reader, about) + header))
        temporary = temporary_file(stack)
        read_to_end(member, temporary, token)
    if is_fortran and size:
        temporary = _in_c_order(temporary, shape, dtype, stack)
    return _ArrayEntry(name, named, shape, ArrayLocation(TemporaryReader(temporary, size), 0))


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


def _in_c_order(temporary: IO[bytes], shape: Shape, dtype: np.dtype[Any], stack: ExitStack) -> IO[bytes]:
    """The array in another temporary file, in C order."""
    turned = temporary_file(stack)
    try:
        os.posix_fallocate(turned.fileno(), 0, int(np.prod(shape, dtype=object)) * dtype.itemsize)
    except OSError as error:
        raise temp_space_error(error) from None
    raw = np.dtype(f"V{dtype.itemsize}")
    there: Array = np.memmap(turned, raw, "r+", 0, shape, "C")
    there[...] = np.memmap(temporary, raw, "r", 0, shape, "F")
    return turned
