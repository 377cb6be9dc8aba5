"""A state taken apart into named arrays and the tree that they hang in, and put together again.

Law: what comes back is what went in: the same keys, of the same types, in the same order, the same dicts, lists and
tuples, and the same values, to the last bit. A name belongs to one place in the tree. Nothing is ever executed to build
a value.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted, invalid
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.checkpoint.format.dtypes import dtype_of, name_of
from forged.checkpoint.model import AXES_MAX, PerRank, ShardedArray

DEPTH_MAX = 100
NAME_CHARS_MAX = 1_000
INTEGER_MAX = 1 << 53
"""Beyond it, readers of JSON may take an integer for another one."""
INTEGER_DIGITS_MAX = 4_000

Node = Any
"""A tree as it is written: an int for a tensor, else a dict with one key that says what it is."""
OWN = "o"
"""Stands, in a frame alone, before the number of something that every rank has for itself."""


class Leaf(NamedTuple):
    """An array of the state, under its name."""

    name: str
    array: np.ndarray[Any, Any]
    global_shape: Shape
    is_per_rank: bool
    """Whether it is the rank's own, and no copy of others'."""
    sharded_box: Box | None
    """Which part of the whole it is, where it was given as a part."""

    @property
    def box(self) -> Box:
        """Where it lies in the whole."""
        return whole(self.global_shape) if self.sharded_box is None else self.sharded_box


@dataclass(frozen=True, slots=True)
class LeafType:
    """How to save and give back arrays that are not numpy's."""

    accepts: Callable[[Any], bool]
    to_array: Callable[[Any], np.ndarray[Any, Any] | ShardedArray]
    """The array itself where that is possible, so that it can be loaded into."""
    from_array: Callable[[np.ndarray[Any, Any] | ShardedArray, Any], Any]
    """The value again; the second argument is the one that the state has in its place, or None."""


def flatten(state: Any, leaf_types: Sequence[LeafType] = ()) -> tuple[Node, list[Leaf]]:
    """The tree of a state, and its arrays in the order in which the tree numbers them."""
    flattening = _Flattening(tuple(leaf_types))
    return flattening.node(state, "", 0, is_per_rank=False), flattening.leaves


def unflatten(node: Node, tensor: Callable[[int], Any]) -> Any:
    """The state that a tree stands for; `tensor` gives the arrays."""
    return _build(node, tensor, 0, None)


def tensor_numbers(node: Node, depth: int = 0) -> Iterator[int]:
    """The numbers of the arrays in a tree, in its order; `depth` is how deep it hangs in another one."""
    found: list[int] = []
    _build(node, found.append, depth, None)
    return iter(found)


class Place(NamedTuple):
    """Where in a frame something is left open."""

    number: int
    depth: int


def frame_content(frame: Node) -> tuple[list[int], list[Place]]:
    """The numbers of the arrays in a frame, and its open places, both in its order."""
    numbers: list[int] = []
    places: list[Place] = []
    _build(frame, numbers.append, 0, lambda number, depth: places.append(Place(number, depth)))
    return numbers, places


def map_leaves(node: Node, put: Callable[[Node], Node]) -> Node:
    """The same dicts, lists and tuples, with what `put` makes of all that is in them."""
    if type(node) is int:
        return put(node)
    ((kind, value),) = node.items()
    match kind:
        case "d":
            return {"d": {key: put(one) if type(one) is int else map_leaves(one, put) for key, one in value.items()}}
        case "m":
            return {"m": [[key, map_leaves(one, put)] for key, one in value]}
        case "l" | "t":
            return {kind: [map_leaves(one, put) for one in value]}
        case _:
            return put(node)


def renumber_tensors(node: Node, numbers: Sequence[int]) -> Node:
    """The same tree with other numbers for its arrays."""

    def put(one: Node) -> Node:
        if type(one) is int:
            return numbers[one]
        return {"p": map_leaves(one["p"], put)} if "p" in one else one

    return map_leaves(node, put)


def value_nodes(node: Node, name: str = "") -> Iterator[tuple[str, Node]]:
    """What in a tree is neither an array nor a container, under its name."""
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
    """The walk through one state."""

    def __init__(self, leaf_types: tuple[LeafType, ...]) -> None:
        self.leaves: list[Leaf] = []
        self._leaf_types = leaf_types

    def node(self, value: Any, path: str, depth: int, *, is_per_rank: bool) -> Node:
        """What stands for a value."""
        if isinstance(value, np.ndarray):
            return self._array(value, path, is_per_rank)
        if isinstance(value, Mapping | list | tuple | PerRank):
            if depth == DEPTH_MAX:
                raise invalid(
                    f"the state is nested more than {DEPTH_MAX} deep at {_shown(path)}", "does it contain itself?"
                )
            return self._container(value, path, depth + 1, is_per_rank=is_per_rank)
        if isinstance(value, ShardedArray):
            return self._sharded(value, path, is_per_rank)
        for leaf_type in self._leaf_types:
            if leaf_type.accepts(value):
                return self.node(leaf_type.to_array(value), path, depth, is_per_rank=is_per_rank)
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
                    f"the state has the key {key!r:.100} at {_shown(path)}", "use strings, or integers below 2**53"
                )
        return {"m": items}

    def _array(self, array: np.ndarray[Any, Any], path: str, is_per_rank: bool) -> Node:
        return self._leaf(array, array.shape, path, is_per_rank, None)

    def _sharded(self, value: ShardedArray, path: str, is_per_rank: bool) -> Node:
        for leaf_type in self._leaf_types:
            if leaf_type.accepts(value.local):
                made = leaf_type.to_array(value.local)
                if isinstance(made, np.ndarray):
                    value = ShardedArray(made, value.global_shape, value.offset)
        if not isinstance(value.local, np.ndarray):
            raise invalid(f"{_shown(path)} is a ShardedArray of {type(value.local).__name__}", "give it a numpy array")
        return self._leaf(value.local, value.global_shape, path, is_per_rank, value.box)

    def _leaf(self, array: np.ndarray[Any, Any], shape: Shape, path: str, is_per_rank: bool, part: Box | None) -> Node:
        try:
            name_of(array.dtype)
        except CheckpointException as error:
            raise invalid(f"{_shown(path)}: {error.message}", error.fix, code=error.code) from None
        if len(shape) > AXES_MAX:
            raise invalid(f"{_shown(path)} has {len(shape)} axes", f"give it at most {AXES_MAX}")
        if len(path) > NAME_CHARS_MAX:
            raise invalid(f"the name {path[:100]}... has {len(path)} characters", f"use at most {NAME_CHARS_MAX}")
        if type(array) is not np.ndarray:
            array = _bare(array, path)
        self.leaves.append(Leaf(path, array, shape, is_per_rank, part))
        return len(self.leaves) - 1


def child_name(path: str, key: int | str) -> str:
    """The name of what is under a key, or at a place in a list."""
    part = f"#{key}" if isinstance(key, int) else escape_key(key)
    return f"{path}/{part}" if path else part


def escape_key(key: str) -> str:
    """A key as a part of a name: no two keys are the same part, and none reaches over a `/`."""
    if not key:
        return "~3"
    if not key.isascii():
        _require_text(key, "a key")
    if "~" in key or "/" in key:
        key = key.replace("~", "~0").replace("/", "~1")
    return f"~2{key[1:]}" if key.startswith("#") else key


def unescape_key(part: str) -> str:
    """The key that a part of a name stands for."""
    if part == "~3":
        return ""
    if part.startswith("~2"):
        part = f"#{part[2:]}"
    return part.replace("~1", "/").replace("~0", "~")


def _bare(array: np.ndarray[Any, Any], path: str) -> np.ndarray[Any, Any]:
    """An array of some class of numpy's or others' as what it holds."""
    if isinstance(array, np.ma.MaskedArray):
        raise invalid(f"{_shown(path)} is a masked array", "save its data and its mask, one by one")
    return array.view(np.ndarray)


def _require_text(text: str, what: str) -> None:
    """Refuse what no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{what} is {text!r:.100}, which is no text", "save it as bytes") from None


def _shown(path: str) -> str:
    return path[:NAME_CHARS_MAX] or "the top"


def _plain(value: Any, path: str) -> Node:
    """What stands for a value that is no array."""
    match value:
        case str() if type(value) is str:
            if not value.isascii():
                _require_text(value, _shown(path))
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
                f"{_shown(path)} is a {type(value).__name__}, which cannot be saved",
                "use dicts, lists, tuples, numpy arrays and scalars, numbers, strings, bytes and None, or a leaf type",
                code="checkpoint_value_unsupported",
            )


def _digits(value: int, path: str) -> str:
    if value.bit_length() > INTEGER_DIGITS_MAX * 3:
        raise invalid(f"{_shown(path)} is an integer of {value.bit_length()} bits", "save it as bytes")
    return hex(value)


Own = Callable[[int, int], Any]
"""Gives what stands in an open place, by its number and how deep it is."""


def _build(node: Node, tensor: Callable[[int], Any], depth: int, own: Own | None) -> Any:
    """`own` makes it a frame, in which there are open places and nothing of ranks' own."""
    if type(node) is int:
        return tensor(node)
    if type(node) is not dict or len(node) != 1 or depth > DEPTH_MAX + 1:
        raise _malformed(node)
    ((kind, value),) = node.items()
    match kind, value:
        case "d", dict():
            return {key: _build(inner, tensor, depth + 1, own) for key, inner in value.items()}
        case "m", list():
            return {key: _build(inner, tensor, depth + 1, own) for key, inner in map(_pair, value)}
        case "l", list():
            return [_build(inner, tensor, depth + 1, own) for inner in value]
        case "t", list():
            return tuple(_build(inner, tensor, depth + 1, own) for inner in value)
        case "p", _ if own is None:
            return _build(value, tensor, depth + 1, own)
        case "o", int() if own is not None and type(value) is int:
            return own(value, depth)
        case _:
            return _value(kind, value, node)


def _pair(item: Any) -> tuple[int | str, Node]:
    match item:
        case [int() | str() as key, inner]:
            return key, inner
        case _:
            raise _malformed(item)


def _value(kind: str, value: Any, node: Node) -> Any:
    """The plain value that stands there."""
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
    """A scalar of numpy's. Out of an array a text would come without the zeros at its end."""
    if len(data) != dtype.itemsize:
        raise ValueError("it is not as long as its type")
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
    return corrupted(f"the tree of the state has {node!r:.80} in it", "", code="checkpoint_manifest_malformed")
