"""Arrays in the files of other tools: safetensors files, one or many with an index, and numpy's archives.

Law: nothing that such a file says is believed before it was checked, and nothing in it is executed. A name that leads
to other files leads to none outside its own folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Tensors
from forged.checkpoint.format.names import check_name
from forged.checkpoint.format.safetensors import Header, read_header
from forged.checkpoint.format.tree import DEPTH_MAX, NAME_CHARS_MAX, Node, escape_key, unescape_key
from forged.checkpoint.loading.fetching import bytes_of
from forged.checkpoint.loading.read_plan import offset_in
from forged.checkpoint.ports import CancelToken, Reader, Storage

INDEX_BYTES_MAX = 100_000_000
SAFETENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
NPZ = ".npz"
MODEL = "model"
_INTEGER = re.compile(r"#(?:0|-?[1-9][0-9]{0,14})")

Array = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where an array lies, whole and in C order."""

    reader: Reader
    start: int


class Foreign:
    """Arrays that lie in files; an `assembly.Origin`."""

    def __init__(self, tensors: Tensors, places: Sequence[Place], tree: Node, token: CancelToken) -> None:
        self.tensors = tensors
        self.tree = tree
        self._places = places
        self._token = token

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], rooms: Mapping[int, Array]) -> None:
        for want, tensor in enumerate(wanted):
            self._token.check()
            outer = whole(self.tensors.shapes[tensor])
            at = offset_in(outer, boxes.get(want, outer))
            assert at is not None, "chunks of a whole array lie together"
            reader, start = self._places[tensor]
            itemsize = dtype_of(self.tensors.dtypes[tensor]).itemsize
            if rooms[want].nbytes:
                reader.read_into(start + at * itemsize, bytes_of(rooms[want]))


@contextmanager
def opened_safetensors(storage: Storage, file: str, token: CancelToken) -> Iterator[Foreign]:
    """The arrays of one file, under the names that they have there."""
    with storage.open(file) as reader:
        header = read_header(reader, file)
        yield _of_safetensors([(reader, header)], None, file, token)


@contextmanager
def opened_index(storage: Storage, file: str, token: CancelToken) -> Iterator[Foreign]:
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
        yield _of_safetensors(found, files, file, token)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _files_of(data: bytes, file: str) -> dict[str, str]:
    """In which file each array is."""
    try:
        files = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refused(file, f"it is no index: {error!s:.100}") from None
    if bad := next((name for name in files.values() if "/" in name or not name.endswith(SAFETENSORS)), None):
        raise refused(file, f"it names the file {bad[:80]!r}")
    return files


def _require_named(header: Header, name: str, files: Mapping[str, str], file: str) -> None:
    """Every array is in the file that the index says, and in no other."""
    there = {entry.name for entry in header.entries}
    said = {array for array, its in files.items() if its == name}
    if there != said:
        odd = sorted(there ^ said)[0]
        raise refused(file, f"{odd[:80]!r} {'is missing in' if odd in said else 'is not said to be in'} {name}")


def _of_safetensors(
    found: Sequence[tuple[Reader, Header]], files: Mapping[str, str] | None, file: str, token: CancelToken
) -> Foreign:
    names: list[str] = []
    tensors = Tensors([], [], [])
    places = []
    for reader, header in found:
        for entry, start in zip(header.entries, header.starts, strict=True):
            names.append(entry.name)
            tensors.names.append(f"{MODEL}/{escape_key(entry.name)}")
            tensors.dtypes.append(entry.dtype)
            tensors.shapes.append(entry.shape)
            places.append(Place(reader, start))
    check_names(tensors.names, file)
    tree = {"d": {MODEL: {"d": {name: number for number, name in enumerate(names)}}}}
    return Foreign(tensors, places, tree, token)


def check_names(names: Sequence[str], file: str) -> None:
    """Refuse names that a manifest would not take."""
    if len(set(names)) < len(names):
        raise refused(file, "two of its arrays have one name")
    if max(map(len, names), default=0) > NAME_CHARS_MAX:
        raise refused(file, "one of its arrays has too long a name")


def tree_of(names: Sequence[str]) -> Node:
    """The state that has arrays of these names: dicts, and lists where all keys are #0, #1 and so on.

    Names that cannot hang in one tree are keys of one dict, as they are.
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
    except _Twice:
        return _flat(names)


class _Twice(Exception):
    """Two names lead to one place."""


def _node(found: dict[str, Any]) -> Node:
    parts = list(found)
    inner = [_node(value) if isinstance(value, dict) else value for value in found.values()]
    if parts and parts == [f"#{number}" for number in range(len(parts))]:
        return {"l": inner}
    keys = [unescape_key(part) for part in parts]
    if len(set(keys)) < len(keys):
        raise _Twice
    if not any(part.startswith("#") for part in parts):
        return {"d": dict(zip(keys, inner, strict=True))}
    return {"m": [[_key(part), value] for part, value in zip(parts, inner, strict=True)]}


def _key(part: str) -> int | str:
    return int(part[1:]) if _INTEGER.fullmatch(part) else unescape_key(part)


def _flat(names: Sequence[str]) -> Node:
    return {"d": {name: number for number, name in enumerate(names)}}


def refused(file: str, why: str) -> CheckpointException:
    """The file is not what it has to be."""
    return corrupted(f"{file} cannot be read: {why}", file, "use another copy", code="checkpoint_file_malformed")
