"""Arrays in the files of other tools: safetensors files, alone or with an index, and numpy archives.

Invariants:
- Every statement of such a file is checked before it is used; nothing in it is executed.
- An index refers only to files in its own folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.boxes import Box, offset_in, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Tensors
from forged.checkpoint.format.names import check_name
from forged.checkpoint.format.safetensors import Header, read_header
from forged.checkpoint.format.tree import DEPTH_MAX, NAME_CHARS_MAX, Node, escape_key, unescape_key
from forged.checkpoint.loading.fetching import bytes_of
from forged.checkpoint.ports import CancelToken, Reader, Storage

INDEX_BYTES_MAX = 100_000_000
SAFETENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
NPZ = ".npz"
MODEL = "model"
_INTEGER = re.compile(r"#(?:0|-?[1-9][0-9]{0,14})")

Array = np.ndarray[Any, Any]


class ArrayLocation(NamedTuple):
    """Where an array lies, contiguous and in C order."""

    reader: Reader
    start: int


class FileArrays:
    """Arrays in files; an `assembly.TensorSource`."""

    def __init__(self, tensors: Tensors, locations: Sequence[ArrayLocation], tree: Node, token: CancelToken) -> None:
        self.tensors = tensors
        self.tree = tree
        self._locations = locations
        self._token = token

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], into: Mapping[int, Array]) -> None:
        for want, tensor in enumerate(wanted):
            self._token.check()
            outer = whole(self.tensors.shapes[tensor])
            at = offset_in(outer, boxes.get(want, outer))
            assert at is not None, "chunks of a whole array lie together"
            reader, start = self._locations[tensor]
            itemsize = dtype_of(self.tensors.dtypes[tensor]).itemsize
            if into[want].nbytes:
                reader.read_into(start + at * itemsize, bytes_of(into[want]))


@contextmanager
def open_safetensors(storage: Storage, file: str, token: CancelToken) -> Iterator[FileArrays]:
    """The arrays of one file, under their names in the file."""
    with storage.open(file) as reader:
        header = read_header(reader, file)
        yield _file_arrays([(reader, header)], None, file, token)


@contextmanager
def open_index(storage: Storage, file: str, token: CancelToken) -> Iterator[FileArrays]:
    """The arrays of all files that an index names."""
    files = _files_of(storage.read(file, INDEX_BYTES_MAX), file)
    folder = file.rpartition("/")[0]
    with ExitStack() as stack:
        found = []
        for name in sorted(set(files.values())):
            token.check()
            path = check_name(f"{folder}/{name}" if folder else name)
            reader = stack.enter_context(storage.open(path))
            header = read_header(reader, path)
            _require_named(header, name, files, file)
            found.append((reader, header))
        yield _file_arrays(found, files, file, token)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _files_of(data: bytes, file: str) -> dict[str, str]:
    """The file of each array."""
    try:
        files = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid_file(file, f"it is not an index: {error!s:.100}") from None
    if bad := next((name for name in files.values() if "/" in name or not name.endswith(SAFETENSORS)), None):
        raise invalid_file(file, f"it names the file {bad[:80]!r}")
    return files


def _require_named(header: Header, name: str, files: Mapping[str, str], file: str) -> None:
    """Require that each array is in exactly the file that the index states."""
    found = {entry.name for entry in header.entries}
    indexed = {array for array, file_of_array in files.items() if file_of_array == name}
    if found != indexed:
        odd = sorted(found ^ indexed)[0]
        problem = "is missing in" if odd in indexed else "is not in the index for"
        raise invalid_file(file, f"{odd[:80]!r} {problem} {name}")


def _file_arrays(
    found: Sequence[tuple[Reader, Header]], files: Mapping[str, str] | None, file: str, token: CancelToken
) -> FileArrays:
    names: list[str] = []
    tensors = Tensors([], [], [])
    locations = []
    for reader, header in found:
        for entry, start in zip(header.entries, header.starts, strict=True):
            names.append(entry.name)
            tensors.names.append(f"{MODEL}/{escape_key(entry.name)}")
            tensors.dtypes.append(entry.dtype)
            tensors.shapes.append(entry.shape)
            locations.append(ArrayLocation(reader, start))
    require_valid_names(tensors.names, file)
    tree = {"d": {MODEL: {"d": {name: number for number, name in enumerate(names)}}}}
    return FileArrays(tensors, locations, tree, token)


def require_valid_names(names: Sequence[str], file: str) -> None:
    """Refuse names that a manifest does not accept."""
    if len(set(names)) < len(names):
        raise invalid_file(file, "two of its arrays have the same name")
    if max(map(len, names), default=0) > NAME_CHARS_MAX:
        raise invalid_file(file, f"the name of an array has more than {NAME_CHARS_MAX} characters")


def tree_for_names(names: Sequence[str]) -> Node:
    """The state with arrays of these names: nested dicts, and lists where all keys are #0, #1 and so on.

    Names that do not form a tree become the keys of one dict.
    """
    top: dict[str, Any] = {}
    if any(name.count("/") >= DEPTH_MAX for name in names):
        return _flat(names)
    for number, name in enumerate(names):
        *parts, last = name.split("/")
        node: Any = top
        for part in parts:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return _flat(names)
        if last in node:
            return _flat(names)
        node[last] = number
    try:
        return _node(top)
    except _DuplicateKey:
        return _flat(names)


class _DuplicateKey(Exception):
    """Two names lead to the same key."""


def _node(found: dict[str, Any]) -> Node:
    parts = list(found)
    inner = [_node(value) if isinstance(value, dict) else value for value in found.values()]
    if parts and parts == [f"#{number}" for number in range(len(parts))]:
        return {"l": inner}
    keys = [unescape_key(part) for part in parts]
    if len(set(keys)) < len(keys):
        raise _DuplicateKey
    if not any(part.startswith("#") for part in parts):
        return {"d": dict(zip(keys, inner, strict=True))}
    return {"m": [[_key(part), value] for part, value in zip(parts, inner, strict=True)]}


def _key(part: str) -> int | str:
    return int(part[1:]) if _INTEGER.fullmatch(part) else unescape_key(part)


def _flat(names: Sequence[str]) -> Node:
    return {"d": {name: number for number, name in enumerate(names)}}


def invalid_file(file: str, why: str) -> CheckpointException:
    """The error for a malformed file."""
    return corrupted(f"{file} is malformed: {why}", file, "use another copy", code="checkpoint_file_malformed")
