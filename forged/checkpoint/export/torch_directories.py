"""Directories of `torch.distributed.checkpoint` (DCP), read and written without torch.

A directory has files of pieces, each of which is a file of `torch.save`, and `.metadata`, a pickle that says where the
pieces are. DCP writes integer keys as texts; they are read as integers where all keys of a dict are such.

Invariants:
- Only files of the directory are read, and a tensor's pieces fill it.
- The directory appears with its metadata, which is written last; files that exist are never replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.export.external_files import ArrayLocation, FileArrays
from forged.checkpoint.export.torch_files import (
    ForeignTensor,
    StoredState,
    TorchArchive,
    archive_layout,
    arrays_of,
    assembly_of,
)
from forged.checkpoint.export.torch_pickle import (
    FUNCTIONS,
    PICKLE_BYTES_MAX,
    Call,
    Global,
    Instance,
    Pairs,
    StoredTensor,
    dtype_named,
    encode,
    refused,
)
from forged.checkpoint.export.zip_archive import ArchiveImage, TemporaryReader, temp_space_error, temporary_file
from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.names import TORCH_METADATA, check_name
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Reader, Storage
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.files.assembly import Assembly, TensorSource
from forged.pickle_reader import PickleRefused, Record, read_pickle

FILE = "__0_0.distcp"
VERSION = "1.0.0"
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX = re.compile(r"0|[1-9][0-9]{0,14}")


# Reading.


class _Piece(NamedTuple):
    """Where a piece of a tensor, or a value, is stored."""

    file: str
    start: int
    size: int


def _record(*_: Any) -> Record:
    return Record()


def _first(value: Any = None, *_: Any) -> Any:
    return value


_FUNCTIONS = {
    **FUNCTIONS,
    **{
        f"{_METADATA}.{name}": _record
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
            *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta"),
        )
    },
    f"{_METADATA}._MEM_FORMAT_ENCODING": _first,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _record,
    "torch.serialization._get_layout": _first,
    **{f"{module}.{kind}": _first for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")},
}


@contextmanager
def open_torch_directory(storage: Storage, token: CancelToken) -> Iterator[FileArrays]:
    """The tensors of a directory, under the names that they have in its state."""
    with ExitStack() as stack:
        directory = _Directory(storage, stack, token)
        yield arrays_of(directory.state(), directory.name, token)


def is_torch_directory(storage: Storage) -> bool:
    """Whether the storage's folder is such a directory."""
    try:
        with storage.open(TORCH_METADATA):
            return True
    except CheckpointException:
        return False


class _Directory:
    """A directory that is read."""

    def __init__(self, storage: Storage, stack: ExitStack, token: CancelToken) -> None:
        self.name = f"{storage.url}/{TORCH_METADATA}"
        self._storage = storage
        self._stack = stack
        self._token = token
        self._readers: dict[str, Reader] = {}

    def state(self) -> Any:
        """The state, with foreign tensors."""
        data = self._storage.read(TORCH_METADATA, PICKLE_BYTES_MAX)
        try:
            metadata = _fields(read_pickle(data, _FUNCTIONS), "state_dict_metadata", "storage_data")
            pieces = self._pieces(metadata["storage_data"])
            paths = metadata.get("planner_data") or {}
            nested: dict[Any, Any] = {}
            for key, described in metadata["state_dict_metadata"].items():
                path = paths.get(key, (key,)) if isinstance(paths, dict) else (key,)
                _put(nested, path, self._value(key, described, pieces))
        except PickleRefused as error:
            raise refused(self.name, str(error), "use a directory as torch.distributed.checkpoint writes it") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise refused(self.name, f"it is malformed: {error!s:.100}", "use another copy") from None
        return _listed(nested, 0)

    def _pieces(self, stored: Any) -> dict[str, dict[Any, _Piece]]:
        """By key and offset, the pieces."""
        found: dict[str, dict[Any, _Piece]] = {}
        for index, info in stored.items():
            at, where = _fields(index, "fqn"), _fields(info, "relative_path", "offset", "length")
            if where.get("transform_descriptors"):
                raise ValueError(f"{at['fqn']!s:.60} is compressed; save it without extensions")
            piece = _Piece(check_name(where["relative_path"]), _count(where["offset"]), _count(where["length"]))
            found.setdefault(at["fqn"], {})[at.get("offset")] = piece
        return found

    def _value(self, key: str, described: Any, pieces: Mapping[str, Mapping[Any, _Piece]]) -> Any:
        if not isinstance(described, Record):
            raise ValueError(f"{key!s:.60} has no description")
        if not isinstance(described.state, dict) or "chunks" not in described.state:
            return self._archive(pieces[key][None]).state()
        properties, shape = described.state["properties"].state, described.state["size"]
        dtype = dtype_named(properties[0] if isinstance(properties, tuple) else properties["dtype"])
        boxes = [_box(_fields(chunk, "offsets", "sizes"), shape) for chunk in described.state["chunks"]]
        volume = sum(math.prod(box.shape) for box in boxes)
        if volume != math.prod(shape) or len({box.offset for box in boxes if 0 not in box.shape}) < sum(
            0 not in box.shape for box in boxes
        ):
            raise ValueError(f"the pieces of {key:.60} do not fill it")
        stored = [_StoredBox(box, pieces[key][box.offset]) for box in boxes if 0 not in box.shape]
        return ForeignTensor(dtype, shape, partial(self._locate, key, dtype, shape, stored))

    def _locate(self, key: str, dtype: str, shape: tuple[int, ...], boxes: list[_StoredBox]) -> ArrayLocation:
        """Where the elements lie: in a file of the directory, or several pieces in a temporary one."""
        tensors = [self._tensor(key, dtype, one) for one in boxes]
        if len(tensors) == 1:
            return tensors[0].locate()
        if not tensors:
            return ArrayLocation(TemporaryReader(temporary_file(self._stack), 0), 0)
        raw = np.dtype(f"V{dtype_of(dtype).itemsize}")
        size = math.prod(shape) * raw.itemsize
        file = temporary_file(self._stack)
        try:
            file.truncate(size)
            there: Any = np.memmap(file, raw, "r+", 0, shape, "C")
            for tensor, stored in zip(tensors, boxes, strict=True):
                _copy(tensor.locate(), there, stored.box, self._token)
        except OSError as error:
            raise temp_space_error(error) from None
        return ArrayLocation(TemporaryReader(file, size), 0)

    def _tensor(self, key: str, dtype: str, stored: _StoredBox) -> ForeignTensor:
        tensor = self._archive(stored.piece).state()
        if not isinstance(tensor, ForeignTensor) or (tensor.dtype, tensor.shape) != (dtype, stored.box.shape):
            raise refused(self.name, f"a piece of {key:.60} is not {dtype} {stored.box.shape}", "use another copy")
        return tensor

    def _archive(self, piece: _Piece) -> TorchArchive:
        if piece.file not in self._readers:
            try:
                self._readers[piece.file] = self._stack.enter_context(self._storage.open(piece.file))
            except CheckpointException as error:
                if error.code != "checkpoint_file_missing":
                    raise
                raise refused(self.name, f"its file {piece.file} is missing", "use another copy") from None
        reader = self._readers[piece.file]
        if piece.start + piece.size > reader.size:
            raise refused(piece.file, f"it has {reader.size} bytes, and a piece ends behind that", "use another copy")
        return TorchArchive(_Slice(reader, piece.start, piece.size), piece.file, self._stack, self._token)


class _StoredBox(NamedTuple):
    """A part of a tensor, and where it is stored."""

    box: Box
    piece: _Piece


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a file; a `ports.Reader`."""

    reader: Reader
    start: int
    size: int

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        if offset + sum(map(len, rooms)) > self.size:
            raise ValueError("it ends too early")
        self.reader.read_into(self.start + offset, *rooms)

    def mapped(self) -> memoryview | None:
        return None


def _fields(record: Any, *needed: str) -> dict[str, Any]:
    """The fields of an object."""
    state = getattr(record, "state", None)
    if not isinstance(state, dict) or not all(name in state for name in needed):
        raise ValueError(f"an object lacks {', '.join(needed)}")
    return state


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no offset")
    return value


def _box(chunk: Mapping[str, Any], shape: tuple[int, ...]) -> Box:
    box = Box(tuple(map(_count, chunk["offsets"])), tuple(map(_count, chunk["sizes"])))
    if not len(box.offset) == len(box.shape) == len(shape) or not whole(shape).covers(box):
        raise ValueError(f"a piece {box.shape} at {box.offset} is outside of {shape}")
    return box


def _copy(location: ArrayLocation, there: Any, box: Box, token: CancelToken) -> None:
    """Copy a piece into its place, some rows of the first axis at a time."""
    target = there[tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))]
    row_bytes = target[0].nbytes
    rows = max(1, BLOCK_BYTES // row_bytes)
    for row in range(0, box.shape[0], rows):
        token.check()
        data: Any = np.empty((min(rows, box.shape[0] - row), *box.shape[1:]), there.dtype)
        location.reader.read_into(location.start + row * row_bytes, data.reshape(-1).view(np.uint8).data)
        target[row : row + rows] = data


def _put(nested: dict[Any, Any], path: Any, value: Any) -> None:
    """Put a value where its path leads."""
    if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
        raise ValueError(f"the path {path!r:.60} is invalid")
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
        if not isinstance(nested, dict):
            raise ValueError(f"the path {path!r:.60} leads through a value")
    if path[-1] in nested:
        raise ValueError(f"the path {path!r:.60} is there twice")
    nested[path[-1]] = value


def _listed(value: Any, depth: int) -> Any:
    """The state with lists where all keys are positions, and with the integer keys that were written as texts."""
    if not isinstance(value, dict) or not value or depth > 100:
        return value
    inner = {key: _listed(one, depth + 1) for key, one in value.items()}
    if all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner)]
    if all(type(key) is str and _INDEX.fullmatch(key) for key in inner):
        return {int(key): one for key, one in inner.items()}
    return inner


# Writing.


def write_torch_directory(storage: Storage, origin: TensorSource, state: StoredState, token: CancelToken) -> int:
    """Write a new directory with this state; returns its size in bytes."""
    if is_torch_directory(storage) or next(storage.entries(), None) is not None:
        raise invalid(f"{storage.url} is not empty", "give a new directory", code="checkpoint_exists")
    if not isinstance(state.value, dict):
        raise invalid("the state is no dict", "a directory of torch.distributed.checkpoint has a dict")
    directory = _Writer(assembly_of(origin, state.numbers), state, token)
    parts.write_durably(storage, FILE, directory.image(), token)
    try:
        metadata = directory.metadata()
        storage.publish(TORCH_METADATA, metadata)
    except BaseException:
        storage.delete([FILE])
        raise
    return directory.size + len(metadata)


class _Writer:
    """The only file of a directory, which has all pieces."""

    def __init__(self, arrays: Assembly, state: StoredState, token: CancelToken) -> None:
        self.size = 0
        self._arrays = arrays
        self._places = {str(number): place for place, number in enumerate(state.numbers)}
        self._token = token
        self._segments: list[bytearray | int] = []
        self._starts: list[int] = []
        self._described: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._stored: list[tuple[Instance, Instance]] = []
        for path, value in _flat(state.value, ()):
            self._add(path, value)

    def image(self) -> ArchiveImage:
        return ArchiveImage(self._arrays, self._segments, self._starts, self.size)

    def metadata(self) -> bytes:
        """The description of the directory."""
        fields = {
            "state_dict_metadata": self._described,
            "planner_data": self._paths,
            "storage_data": Pairs(self._stored),
            "storage_meta": None,
            "version": VERSION,
        }
        return encode(_object("Metadata", fields))

    def _add(self, path: tuple[Any, ...], value: Any) -> None:
        key = ".".join(map(str, path))
        if key in self._paths:
            raise invalid(f"two values of the state have the name {key}", "rename one of them")
        self._paths[key] = path
        offset = None
        start = self.size
        if isinstance(value, StoredTensor):
            self._described[key], offset = _tensor_metadata(value), _size((0,) * len(value.shape))
            place = self._places[value.storage]
            begin, end = self._arrays.layout.starts[place : place + 2]
            self._append(value._replace(storage="0"), [("0", begin, end)], begin)
        else:
            self._described[key] = _object("BytesStorageMetadata", {})
            self._append(value, [], 0)
        index = {"fqn": key, "offset": offset, "index": None if offset is None else 0}
        info = {"relative_path": FILE, "offset": start, "length": self.size - start}
        where = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        self._stored.append((_object("MetadataIndex", index), Instance(where, info)))

    def _append(self, value: Any, storages: list[tuple[str, int, int]], begin: int) -> None:
        """Add a file of torch.save to the end."""
        layout = archive_layout(value, storages, self._arrays, self._token)
        for start, segment in zip(layout.starts, layout.segments, strict=True):
            self._starts.append(self.size + start)
            self._segments.append(segment + begin if isinstance(segment, int) else segment)
        self.size += layout.size


def _flat(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of a state and their paths, as DCP's planner divides it."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(one, (*path, str(key)))
    elif isinstance(value, (list, tuple)) and not isinstance(value, StoredTensor) and _is_divided(value):
        for place, one in enumerate(value):
            yield from _flat(one, (*path, place))
    else:
        yield path, value


def _is_divided(values: Any) -> bool:
    """Whether a list has tensors or dicts."""
    return any(
        isinstance(one, (StoredTensor, dict)) or (isinstance(one, (list, tuple)) and _is_divided(one)) for one in values
    )


def _tensor_metadata(tensor: StoredTensor) -> Instance:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Global("torch", tensor.dtype), layout, False, contiguous, False)
    chunk = {"offsets": _size((0,) * len(tensor.shape)), "sizes": _size(tensor.shape)}
    fields = {
        "properties": Instance(Global(_METADATA, "TensorProperties"), properties),
        "size": _size(tensor.shape),
        "chunks": [_object("ChunkStorageMetadata", chunk)],
    }
    return _object("TensorStorageMetadata", fields)


def _object(name: str, fields: dict[str, Any]) -> Instance:
    return Instance(Global(_METADATA, name), fields)


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (shape,))
