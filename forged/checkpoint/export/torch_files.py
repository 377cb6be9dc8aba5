"""Files of `torch.save`, read and written without torch.

Invariants:
- Members are stored as they are, do not overlap, and their checksums are verified before a tensor is used.
- `torch.load` opens written files, with `weights_only=True` too.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.export.external_files import ArrayLocation, FileArrays
from forged.checkpoint.export.torch_pickle import (
    LEFT_OUT,
    PICKLE_BYTES_MAX,
    StoredTensor,
    TensorRef,
    can_hold,
    encode,
    plain_value,
    read_state,
    refused,
)
from forged.checkpoint.export.zip_archive import (
    BROKEN,
    LOCAL_HEADER_BYTES,
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
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Manifest, Tensors
from forged.checkpoint.format.tree import child_name, flatten, unflatten
from forged.checkpoint.loading.resharding import tree_for
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Reader, Storage
from forged.checkpoint.saving.files.assembly import Assembly, TensorSource
from forged.checkpoint.saving.files.image import layout_of
from forged.checkpoint.saving.files.plan import Share
from forged.leaf_types import LeafType

ENDINGS = (".pt", ".pth")
ROOT = "archive"
ALIGNMENT = 64
"""Of storages in a file, so that torch can map them."""
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that torch before 1.6 wrote."""
TOO_OLD = "load it with torch.load and save it again with torch.save of torch 1.6 or newer"


# Reading.


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of a file, in the state that the file has."""

    dtype: str
    shape: tuple[int, ...]
    locate: Callable[[], ArrayLocation]
    """Verifies the tensor's bytes, and gives their place."""


@contextmanager
def open_torch_file(storage: Storage, file: str, token: CancelToken) -> Iterator[FileArrays]:
    """The tensors of a file, under the names that they have in its state."""
    with ExitStack() as stack:
        reader = stack.enter_context(storage.open(file))
        yield arrays_of(TorchArchive(reader, file, stack, token).state(), file, token)


def arrays_of(state: Any, file: str, token: CancelToken) -> FileArrays:
    """The arrays of a state with foreign tensors."""
    found: list[ForeignTensor] = []

    def shown(tensor: ForeignTensor) -> Any:
        found.append(tensor)
        return np.broadcast_to(np.empty((), dtype_of(tensor.dtype)), tensor.shape)

    def accepts(value: Any) -> bool:
        return isinstance(value, ForeignTensor)

    try:
        tree, leaves = flatten(state, [LeafType(accepts, shown, lambda array, _: array)])
    except CheckpointException as error:
        raise refused(file, error.message, error.fix) from None
    names = [leaf.name for leaf in leaves]
    tensors = Tensors(names, [tensor.dtype for tensor in found], [tensor.shape for tensor in found])
    return FileArrays(tensors, [tensor.locate() for tensor in found], tree, token)


class TorchArchive:
    """A file of `torch.save` that is read."""

    def __init__(self, reader: Reader, file: str, stack: ExitStack, token: CancelToken) -> None:
        self._reader = reader
        self._file = file
        self._stack = stack
        self._token = token
        self._starts: dict[str, int] = {}
        """By name, where the verified members begin."""
        head = bytearray(min(len(LEGACY), reader.size))
        reader.read_into(0, memoryview(head))
        if bytes(head) == LEGACY:
            raise refused(file, "it has the format of torch before 1.6", TOO_OLD)
        try:
            self._archive = stack.enter_context(zipfile.ZipFile(SeekableReader(reader)))
            self._members = _members_of(self._archive, file)
        except BROKEN as error:
            raise refused(file, f"{error!s:.100}", "use another copy") from None
        roots = [name.removesuffix("/data.pkl") for name in self._members if name.endswith("/data.pkl")]
        if len(roots) != 1 or f"{roots[0]}/constants.pkl" in self._members:
            raise refused(file, "it is no file of torch.save with a state")
        self._root = roots[0]

    def state(self) -> Any:
        """The state, with foreign tensors."""
        if self._content("byteorder", 8, b"little").strip() != b"little":
            raise refused(self._file, "its tensors are big-endian", "save it on a little-endian machine")
        return self._with_tensors(read_state(self._content("data.pkl", PICKLE_BYTES_MAX), self._file))

    def _with_tensors(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            return ForeignTensor(value.dtype, value.shape, lambda: self._locate(value))
        if isinstance(value, dict):
            return {key: self._with_tensors(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._with_tensors, value))
        return value

    def _content(self, name: str, bytes_max: int, missing: bytes | None = None) -> bytes:
        member = self._members.get(f"{self._root}/{name}")
        if member is None and missing is not None:
            return missing
        if member is None or member.file_size > bytes_max:
            raise refused(self._file, f"its member {name} is missing or has more than {bytes_max} bytes")
        try:
            return self._archive.read(member)
        except BROKEN as error:
            raise refused(self._file, f"{error!s:.100}", "use another copy") from None

    def _locate(self, tensor: TensorRef) -> ArrayLocation:
        """Where the elements lie in C order: in the file, or in a temporary one."""
        start = self._verified(f"data/{tensor.storage}", tensor.storage_bytes) + tensor.offset * tensor.itemsize
        if tensor.is_contiguous:
            return ArrayLocation(self._reader, start)
        return _in_c_order(self._reader, start, tensor, self._stack, self._token)

    def _verified(self, name: str, size: int) -> int:
        """Where a member of this size begins, whose checksum is right."""
        if name not in self._starts:
            member = self._members.get(f"{self._root}/{name}")
            if member is None or member.file_size != size:
                found = "is missing" if member is None else f"has {member.file_size} bytes instead of {size}"
                raise refused(self._file, f"its member {name[:60]} {found}", "use another copy")
            try:
                with self._archive.open(member) as content:
                    read_to_end(content, None, self._token)
            except BROKEN as error:
                raise refused(self._file, f"{error!s:.100}", "use another copy") from None
            self._starts[name] = data_offset(self._reader, member)
        return self._starts[name]


def _members_of(archive: zipfile.ZipFile, file: str) -> dict[str, zipfile.ZipInfo]:
    """The members by name; refused if they are compressed or share bytes of the file."""
    end = 0
    for member in sorted(archive.infolist(), key=lambda one: one.header_offset):
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise refused(file, f"its member {member.filename[:60]} is compressed")
        if member.header_offset < end:
            raise refused(file, f"its member {member.filename[:60]} overlaps with another one", "use another copy")
        end = member.header_offset + LOCAL_HEADER_BYTES + len(member.orig_filename.encode()) + member.file_size
    return {member.filename: member for member in archive.infolist()}


def _in_c_order(reader: Reader, start: int, tensor: TensorRef, stack: ExitStack, token: CancelToken) -> ArrayLocation:
    """A strided tensor in a temporary file."""
    strides = [stride * tensor.itemsize for stride in tensor.strides]
    size = sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True)) + tensor.itemsize
    source, turned = temporary_file(stack), temporary_file(stack)
    raw = np.dtype(f"V{tensor.itemsize}")
    try:
        for at in range(0, size, BLOCK_BYTES):
            token.check()
            block = bytearray(min(BLOCK_BYTES, size - at))
            reader.read_into(start + at, memoryview(block))
            source.write(block)
        source.flush()
        os.posix_fallocate(turned.fileno(), 0, tensor.nbytes)
    except OSError as error:
        raise temp_space_error(error) from None
    flat: Any = np.memmap(source, raw, "r", 0, (size // tensor.itemsize,))
    there: Any = np.memmap(turned, raw, "r+", 0, tensor.shape or (1,), "C")
    there[...] = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides)
    return ArrayLocation(TemporaryReader(turned, tensor.nbytes), 0)


# Writing.


class StoredState(NamedTuple):
    """A checkpoint's state as torch's files hold it."""

    value: Any
    """With `StoredTensor`s, whose storages are the tensors' numbers."""
    numbers: list[int]
    """The tensors in it."""
    left_out: list[str]
    """The names of values that it cannot hold."""


def stored_state(manifest: Manifest) -> StoredState:
    """The state that one process loads; per-rank values are those of rank 0."""
    tensors = manifest.tensors
    numbers: list[int] = []
    left_out = [f"{tensors.names[number]}@{rank}" for number, rank in tensors.ranks.items() if rank]

    def tensor(number: int) -> Any:
        if not can_hold(tensors.dtypes[number]):
            return LEFT_OUT
        numbers.append(number)
        return StoredTensor(str(number), tensors.dtypes[number], tuple(tensors.shapes[number]))

    value = _held(unflatten(tree_for(manifest, 0, 1), tensor), "", left_out)
    if value is LEFT_OUT:
        raise invalid(f"{manifest.prefix} has nothing that torch's files can hold")
    return StoredState(value, sorted(set(numbers)), left_out)


def _held(value: Any, name: str, left_out: list[str]) -> Any:
    """The value without what a file cannot hold; in lists and tuples None stands for that."""
    if isinstance(value, StoredTensor):
        return value
    if isinstance(value, dict):
        held = {key: _held(one, child_name(name, key), left_out) for key, one in value.items()}
        return {key: one for key, one in held.items() if one is not LEFT_OUT}
    if isinstance(value, (list, tuple)):
        some = [_held(one, child_name(name, place), left_out) for place, one in enumerate(value)]
        return type(value)(None if one is LEFT_OUT else one for one in some)
    plain = plain_value(value)
    if plain is LEFT_OUT:
        left_out.append(name)
    return plain


def assembly_of(origin: TensorSource, numbers: Sequence[int]) -> Assembly:
    """The bytes of these tensors, one after another."""
    share = Share(list(numbers), {})
    layout = layout_of(origin.tensors, share, {})
    before = len(layout.header)
    starts = [start - before for start in layout.starts]
    return Assembly(replace(layout, header=b"", starts=starts), share, origin)


def archive_layout(
    value: Any, storages: Sequence[tuple[str, int, int]], arrays: Assembly, token: CancelToken
) -> ArchiveLayout:
    """The layout of a file with this state; `storages` are the names of its storages, and where they begin and end."""
    layout = ArchiveLayout()
    with zipfile.ZipFile(layout, "w", allowZip64=True) as archive:
        for name, data in (("data.pkl", encode(value)), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"{ROOT}/{name}"), data)
        for name, start, end in storages:
            token.check()
            is_long = end - start >= LONG_BYTES
            about = zipfile.ZipInfo(f"{ROOT}/data/{name}")
            about.extra = _padding(layout.tell() + LOCAL_HEADER_BYTES + len(about.filename) + 20 * is_long)
            with archive.open(about, "w", force_zip64=is_long) as member:
                layout.is_array_data = True
                for at in range(start, end, BLOCK_BYTES):
                    member.write(arrays.run(at, min(BLOCK_BYTES, end - at)).data)
                layout.is_array_data = False
    return layout


def _padding(offset: int) -> bytes:
    """An extra field after which a member's content is aligned."""
    missing = -(offset + 4) % ALIGNMENT
    return b"FB" + missing.to_bytes(2, "little") + bytes(missing)


def torch_file(origin: TensorSource, state: StoredState, token: CancelToken) -> ArchiveImage:
    """A file of `torch.save`. The tensors are read twice, because their checksums precede them."""
    arrays = assembly_of(origin, state.numbers)
    starts = arrays.layout.starts
    storages = [(str(number), starts[place], starts[place + 1]) for place, number in enumerate(state.numbers)]
    layout = archive_layout(state.value, storages, arrays, token)
    return ArchiveImage(arrays, layout.segments, layout.starts, layout.size)
