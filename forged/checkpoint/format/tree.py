"""State trees: a state is flattened into named arrays and a tree of everything else, and rebuilt from them.

Invariants:
- The rebuilt state equals the saved one bit for bit: keys, their types and order, containers, values.
- A name belongs to one place in the tree.
- No code is executed to build a value.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted, invalid
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.checkpoint.format.dtypes import dtype_of, name_of
from forged.checkpoint.model import AXES_MAX, ObjectState, PerRank, ShardedArray, is_stateful
from forged.leaf_types import Keys, LeafRefused, LeafType, leaf_type_for

DEPTH_MAX = 100
NAME_CHARS_MAX = 1_000
INTEGER_MAX = 1 << 53
"""JSON readers may change integers beyond it."""
INTEGER_DIGITS_MAX = 4_000

Node = Any
"""A node of the tree as it is written: an int for a tensor, else a dict whose one key is the node's kind."""
OWN = "o"
"""The kind of a placeholder in a frame; its value is the place's number."""


class Leaf(NamedTuple):
    """An array of the state."""

    name: str
    array: np.ndarray[Any, Any]
    global_shape: Shape
    is_per_rank: bool
    """Whether it belongs to this rank only (`PerRank`) rather than being a copy that ranks share."""
    sharded_box: Box | None
    """The box of the global array that it holds, if it was given as a `ShardedArray`."""

    @property
    def box(self) -> Box:
        """The box of the global array that it holds."""
        return whole(self.global_shape) if self.sharded_box is None else self.sharded_box


def flatten(state: Any, leaf_types: Sequence[LeafType] = ()) -> tuple[Node, list[Leaf]]:
    """The tree of a state, and its arrays in the order of their numbers in the tree."""
    flattening = _Flattening(tuple(leaf_types))
    return flattening.node(state, "", 0, is_per_rank=False), flattening.leaves


def unflatten(node: Node, tensor: Callable[[int], Any]) -> Any:
    """The state of a tree; `tensor` gives the array for a number."""
    return _build(node, tensor, 0, None)


def tensor_numbers(node: Node, depth: int = 0) -> Iterator[int]:
    """The numbers of the arrays in a tree, in order; `depth` is the tree's depth within another one."""
    found: list[int] = []
    _build(node, found.append, depth, None)
    return iter(found)


class OpenPlace(NamedTuple):
    """A place in a frame for a per-rank value."""

    number: int
    depth: int


def frame_content(frame: Node) -> tuple[list[int], list[OpenPlace]]:
    """The numbers of the arrays in a frame, and its placeholders, each in order."""
    numbers: list[int] = []
    places: list[OpenPlace] = []
    _build(frame, numbers.append, 0, lambda number, depth: places.append(OpenPlace(number, depth)))
    return numbers, places


def map_leaves(node: Node, convert: Callable[[Node], Node]) -> Node:
    """The same containers, with `convert` applied to everything in them."""
    if type(node) is int:
        return convert(node)
    ((kind, value),) = node.items()
    match kind:
        case "d":
            return {
                "d": {key: convert(one) if type(one) is int else map_leaves(one, convert) for key, one in value.items()}
            }
        case "m":
            return {"m": [[key, map_leaves(one, convert)] for key, one in value]}
        case "l" | "t":
            return {kind: [map_leaves(one, convert) for one in value]}
        case _:
            return convert(node)


def renumber_tensors(node: Node, numbers: Sequence[int]) -> Node:
    """The same tree with other numbers for its arrays."""

    def convert(one: Node) -> Node:
        if type(one) is int:
            return numbers[one]
        return {"p": map_leaves(one["p"], convert)} if "p" in one else one

    return map_leaves(node, convert)


def value_nodes(node: Node, name: str = "") -> Iterator[tuple[str, Node]]:
    """By name, the nodes that are neither arrays nor containers."""
    if type(node) is int:
        return
    ((kind, value),) = node.items()
    match kind:
        case "p":
            yield from value_nodes(value, name)
        case "d" | "m" | "l" | "t":
            for key, inner in value.items() if kind == "d" else value if kind == "m" else enumerate(value):
                yield from value_nodes(inner, child_name(name, key))
        case _:
            yield name, node


class _Flattening:
    """The flattening of one state."""

    def __init__(self, leaf_types: tuple[LeafType, ...]) -> None:
        self.leaves: list[Leaf] = []
        self._leaf_types = leaf_types

    def node(self, value: Any, path: str, depth: int, *, is_per_rank: bool) -> Node:
        """The node for a value."""
        if isinstance(value, np.ndarray):
            return self._array(value, path, is_per_rank)
        if isinstance(value, Mapping | list | tuple | PerRank):
            if depth == DEPTH_MAX:
                raise invalid(
                    f"the state is nested more than {DEPTH_MAX} deep at {_path_shown(path)}", "does it contain itself?"
                )
            return self._container(value, path, depth + 1, is_per_rank=is_per_rank)
        if isinstance(value, ShardedArray):
            return self._sharded(value, path, is_per_rank)
        if isinstance(value, ObjectState):
            return self.node(value.value, path, depth, is_per_rank=is_per_rank)
        if (leaf_type := leaf_type_for(value, self._leaf_types)) is not None:
            return self.node(array_of(leaf_type, value, path), path, depth, is_per_rank=is_per_rank)
        if depth < DEPTH_MAX and is_stateful(value):
            return self.node(value.state_dict(), path, depth + 1, is_per_rank=is_per_rank)
        return _plain(value, path)

    def _container(self, value: Any, path: str, depth: int, *, is_per_rank: bool) -> Node:
        if isinstance(value, PerRank):
            return {"p": self.node(value.value, path, depth, is_per_rank=True)}
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth, is_per_rank=is_per_rank)
        lead = f"{path}/#" if path else "#"
        inner = [self.node(one, f"{lead}{index}", depth, is_per_rank=is_per_rank) for index, one in enumerate(value)]
        return {"t" if isinstance(value, tuple) else "l": inner}

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int, *, is_per_rank: bool) -> Node:
        lead = f"{path}/" if path else ""
        if all(type(key) is str for key in value):
            return {
                "d": {
                    key: self.node(one, lead + escape_key(key), depth, is_per_rank=is_per_rank)
                    for key, one in value.items()
                }
            }
        items = []
        for key, one in value.items():
            if type(key) is int and abs(key) < INTEGER_MAX:
                items.append([key, self.node(one, f"{lead}#{key}", depth, is_per_rank=is_per_rank)])
            elif type(key) is str:
                items.append([key, self.node(one, lead + escape_key(key), depth, is_per_rank=is_per_rank)])
            else:
                raise invalid(
                    f"the state has the key {key!r:.100} at {_path_shown(path)}", "use strings, or integers below 2**53"
                )
        return {"m": items}

    def _array(self, array: np.ndarray[Any, Any], path: str, is_per_rank: bool) -> Node:
        return self._leaf(array, array.shape, path, is_per_rank, None)

    def _sharded(self, value: ShardedArray, path: str, is_per_rank: bool) -> Node:
        if (leaf_type := leaf_type_for(value.local, self._leaf_types)) is not None:
            converted = array_of(leaf_type, value.local, path)
            if isinstance(converted, np.ndarray):
                value = ShardedArray(converted, value.global_shape, value.offset)
        if not isinstance(value.local, np.ndarray):
            raise invalid(
                f"{_path_shown(path)} is a ShardedArray of {type(value.local).__name__}", "give a numpy array"
            )
        return self._leaf(value.local, value.global_shape, path, is_per_rank, value.box)

    def _leaf(self, array: np.ndarray[Any, Any], shape: Shape, path: str, is_per_rank: bool, part: Box | None) -> Node:
        try:
            name_of(array.dtype)
        except CheckpointException as error:
            raise invalid(f"{_path_shown(path)}: {error.message}", error.fix, code=error.code) from None
        if len(shape) > AXES_MAX:
            raise invalid(f"{_path_shown(path)} has {len(shape)} axes", f"use at most {AXES_MAX} axes")
        if len(path) > NAME_CHARS_MAX:
            raise invalid(f"the name {path[:100]}... has {len(path)} characters", f"use at most {NAME_CHARS_MAX}")
        if type(array) is not np.ndarray:
            array = _plain_array(array, path)
        self.leaves.append(Leaf(path, array, shape, is_per_rank, part))
        return len(self.leaves) - 1


def array_of(leaf_type: LeafType, value: Any, path: str) -> Any:
    """The array of a leaf, or the part of one."""
    try:
        return leaf_type.to_array(value)
    except LeafRefused as error:
        raise invalid(f"{_path_shown(path)} {error.what}", error.fix, code="checkpoint_value_unsupported") from error


def keys_of(name: str) -> Keys:
    """The keys and positions that lead to the value of a name."""
    return tuple(int(part[1:]) if part.startswith("#") else unescape_key(part) for part in name.split("/") if name)


def child_name(path: str, key: int | str) -> str:
    """The name of the value under a key, or at a position in a list."""
    part = f"#{key}" if isinstance(key, int) else escape_key(key)
    return f"{path}/{part}" if path else part


def escape_key(key: str) -> str:
    """A key as a part of a name: unique per key, without `/`."""
    if not key:
        return "~3"
    if not key.isascii():
        _require_text(key, "a key")
    if "~" in key or "/" in key:
        key = key.replace("~", "~0").replace("/", "~1")
    return f"~2{key[1:]}" if key.startswith("#") else key


def unescape_key(part: str) -> str:
    """The key for a part of a name."""
    if part == "~3":
        return ""
    if part.startswith("~2"):
        part = f"#{part[2:]}"
    return part.replace("~1", "/").replace("~0", "~")


def _plain_array(array: np.ndarray[Any, Any], path: str) -> np.ndarray[Any, Any]:
    """A subclass of ndarray as a plain one."""
    if isinstance(array, np.ma.MaskedArray):
        raise invalid(f"{_path_shown(path)} is a masked array", "save its data and its mask separately")
    return array.view(np.ndarray)


def _require_text(text: str, what: str) -> None:
    """Refuse text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{what} is {text!r:.100}, which UTF-8 cannot encode", "save it as bytes") from None


def _path_shown(path: str) -> str:
    return path[:NAME_CHARS_MAX] or "the top"


def _plain(value: Any, path: str) -> Node:
    """The node for a value that is not an array."""
    match value:
        case str() if type(value) is str:
            if not value.isascii():
                _require_text(value, _path_shown(path))
            return {"v": value}
        case None | bool():
            return {"v": value}
        case int() if type(value) is int:
            return {"v": value} if abs(value) < INTEGER_MAX else {"i": _digits(value, path)}
        case float() if type(value) is float:
            return {"f": value.hex() if math.isfinite(value) else repr(value)}
        case complex() if type(value) is complex:
            return {"c": [value.real.hex(), value.imag.hex()]}
        case bytes() if type(value) is bytes:
            return {"b": base64.b64encode(value).decode()}
        case np.generic():
            return {"n": [name_of(value.dtype), base64.b64encode(value.tobytes()[: value.itemsize]).decode()]}
        case _:
            raise invalid(
                f"{_path_shown(path)} is a {type(value).__name__}, which cannot be saved",
                "use dicts, lists, tuples, numpy arrays and scalars, numbers, strings, bytes and None, or a leaf type",
                code="checkpoint_value_unsupported",
            )


def _digits(value: int, path: str) -> str:
    if value.bit_length() > INTEGER_DIGITS_MAX * 3:
        raise invalid(f"{_path_shown(path)} is an integer of {value.bit_length()} bits", "save it as bytes")
    return hex(value)


FillPlace = Callable[[int, int], Any]
"""Gives the value for a placeholder, by its number and depth."""


def _build(node: Node, tensor: Callable[[int], Any], depth: int, fill_place: FillPlace | None) -> Any:
    """Build a tree; with `fill_place` a frame, which has placeholders and no per-rank values."""
    if type(node) is int:
        return tensor(node)
    if type(node) is not dict or len(node) != 1 or depth > DEPTH_MAX + 1:
        raise _malformed(node)
    ((kind, value),) = node.items()
    match kind, value:
        case "d", dict():
            return {key: _build(inner, tensor, depth + 1, fill_place) for key, inner in value.items()}
        case "m", list():
            return {key: _build(inner, tensor, depth + 1, fill_place) for key, inner in map(_pair, value)}
        case "l", list():
            return [_build(inner, tensor, depth + 1, fill_place) for inner in value]
        case "t", list():
            return tuple(_build(inner, tensor, depth + 1, fill_place) for inner in value)
        case "p", _ if fill_place is None:
            return _build(value, tensor, depth + 1, fill_place)
        case "o", int() if fill_place is not None and type(value) is int:
            return fill_place(value, depth)
        case _:
            return _value(kind, value, node)


def _pair(item: Any) -> tuple[int | str, Node]:
    match item:
        case [int() | str() as key, inner]:
            return key, inner
        case _:
            raise _malformed(item)


def _value(kind: str, value: Any, node: Node) -> Any:
    """The value of a plain node."""
    try:
        match kind, value:
            case "v", None | bool() | str() | int():
                return value
            case "i", str():
                return int(value, 16)
            case "f", str():
                return float.fromhex(value)
            case "c", [str() as real, str() as imaginary]:
                return complex(float.fromhex(real), float.fromhex(imaginary))
            case "b", str():
                return base64.b64decode(value, validate=True)
            case "n", [str() as dtype, str() as data]:
                return _scalar(dtype_of(dtype), base64.b64decode(data, validate=True))
            case _:
                raise _malformed(node)
    except ValueError:
        raise _malformed(node) from None


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    """A numpy scalar. Indexing an array would strip the trailing zeros of strings."""
    if len(data) != dtype.itemsize:
        raise ValueError("wrong length for its type")
    match dtype.kind:
        case "S":
            return np.bytes_(data)
        case "U":
            return np.str_(data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
        case "V" if not dtype.itemsize:
            return np.void(b"")
        case _:
            return np.frombuffer(data, dtype)[0]


def _malformed(node: Any) -> Exception:
    return corrupted(f"the state tree has an invalid node: {node!r:.80}", "", code="checkpoint_manifest_malformed")
