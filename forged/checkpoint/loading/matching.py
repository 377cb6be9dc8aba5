"""A saved tree laid beside the state that it is loaded into.

Law: a tensor goes into the array that has its name, and no other; both have to be of the same shape and type. What has
no counterpart is named. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forged.checkpoint.errors import invalid
from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Tensors
from forged.checkpoint.format.tree import LeafType, Node, child_name, tensor_numbers, unflatten
from forged.checkpoint.loading.resharding import ABSENT
from forged.checkpoint.model import PerRank, ShardedArray

Array = np.ndarray[Any, Any]


class Foreign:
    """In a state, an array that is no numpy array and is made when what it is made of was loaded."""

    __slots__ = ("_leaf_type", "_value", "array")

    def __init__(self, leaf_type: LeafType, array: Array | ShardedArray, value: Any) -> None:
        self.array = array
        self._leaf_type = leaf_type
        self._value = value

    def made(self) -> Any:
        """What it is."""
        return self._leaf_type.from_array(self.array, self._value)


class Matching:
    """One comparison of a checkpoint with a state."""

    def __init__(
        self,
        tensors: Tensors,
        leaf_types: Sequence[LeafType],
        is_chosen: Callable[[str], bool] | None,
        elsewhere: Callable[[], Iterable[Node]],
    ) -> None:
        """`is_chosen` says of a name whether it is to be loaded; `elsewhere` gives what others have in common."""
        self.numbers: list[int] = []
        self.arrays: list[Array] = []
        """Into which arrays they go."""
        self.boxes: dict[int, Box] = {}
        """Which of them are parts of tensors, by their place in `numbers`."""
        self.missing: list[str] = []
        self.unexpected: list[int] = []
        self.mismatched: dict[str, str] = {}
        """How those differ, by name."""
        self.has_foreign = False
        self._tensors = tensors
        self._leaf_types = tuple(leaf_types)
        self._is_chosen = is_chosen
        self._elsewhere = elsewhere
        self._known_elsewhere: dict[str, Node] | None = None

    def match(self, node: Node, have: Any, path: str = "") -> Any:
        """The state that the node stands for, with the arrays of the one that there is."""
        if isinstance(have, PerRank):
            return self.match(node, have.value, path)
        if type(node) is int:
            return self._tensor(node, have)
        ((kind, value),) = node.items()
        match kind:
            case "p":
                return self.match(value, have, path)
            case "d" if isinstance(have, Mapping):
                return self._dict(value.items(), have, path)
            case "m" if isinstance(have, Mapping):
                return self._dict(value, have, path)
            case "l" | "t" if isinstance(have, list | tuple):
                found = self._list(value, have, path)
                return found if kind == "l" else tuple(found)
            case _:
                return self._unlike(node, have, path)

    def fit(self) -> None:
        """Drop the pairs that are not wanted or do not fit; refuse arrays that cannot be written."""
        names, shapes, dtypes = self._tensors.names, self._tensors.shapes, self._tensors.dtypes
        types = {name: dtype_of(name) for name in set(map(dtypes.__getitem__, self.numbers))}
        dropped: set[int] = set()
        for place, (number, array) in enumerate(zip(self.numbers, self.arrays, strict=True)):
            if self._is_chosen is not None and not self._is_chosen(names[number]):
                dropped.add(place)
                continue
            shape = self.boxes[place].shape if place in self.boxes else shapes[number]
            if array.shape != shape or array.dtype != types[dtypes[number]]:
                self._differs(number, f"{dtypes[number]} {shape}", f"{array.dtype} {array.shape}")
                dropped.add(place)
            elif isinstance(array, np.ma.MaskedArray):
                raise invalid(
                    f"the array {names[number]} of the state is a masked array",
                    "load into its data and its mask, one by one",
                )
            elif not array.flags.writeable:
                raise invalid(
                    f"the array {names[number]} of the state cannot be written",
                    "give arrays that may be written",
                    code="checkpoint_array_readonly",
                )
        if dropped:
            self._keep([place for place in range(len(self.numbers)) if place not in dropped])

    def _differs(self, number: int, saved: str, have: str) -> None:
        name = self._tensors.names[number]
        self.mismatched[name] = f"{name} is {saved} in the checkpoint and {have} in the state"

    def _keep(self, places: list[int]) -> None:
        self.boxes = {new: self.boxes[old] for new, old in enumerate(places) if old in self.boxes}
        self.numbers = [self.numbers[place] for place in places]
        self.arrays = [self.arrays[place] for place in places]

    def _dict(self, items: Iterable[tuple[Any, Node]], have: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, node in items:
            if key not in have:
                self._extra(found, key, node)
                continue
            value = have[key]
            if type(node) is int and type(value) is np.ndarray:
                self.numbers.append(node)
                self.arrays.append(value)
                found[key] = value
            else:
                found[key] = self.match(node, value, child_name(path, key))
        if not have.keys() <= found.keys():
            for key, value in have.items():
                if key not in found:
                    found[key] = self._without_node(value, child_name(path, key))
        return found

    def _list(self, nodes: Sequence[Node], have: Sequence[Any], path: str) -> list[Any]:
        found = [
            self.match(node, value, child_name(path, place))
            for place, (node, value) in enumerate(zip(nodes, have, strict=False))
        ]
        for node in nodes[len(have) :]:
            rest: dict[int, Any] = {}
            self._extra(rest, 0, node)
            found += rest.values()
        for place, value in enumerate(have[len(nodes) :], len(nodes)):
            found.append(self._without_node(value, child_name(path, place)))
        return found

    def _extra(self, found: dict[Any, Any], key: Any, node: Node) -> None:
        """What the state lacks: values are taken from the checkpoint, tensors have nowhere to go."""
        numbers = list(tensor_numbers(node))
        if numbers:
            self.unexpected += numbers
        else:
            found[key] = unflatten(node, _no_tensor)

    def _unlike(self, node: Node, have: Any, path: str) -> Any:
        """There is something else in the checkpoint than in the state."""
        numbers = list(tensor_numbers(node))
        self.unexpected += numbers
        missing = list(self._arrays_in(have, path))
        self.missing += missing
        return have if missing or numbers else unflatten(node, _no_tensor)

    def _without_node(self, have: Any, path: str) -> Any:
        """What the tree of this rank lacks: some other rank's may have it."""
        if self._known_elsewhere is None:
            self._known_elsewhere = {}
            for tree in self._elsewhere():
                _note(tree, "", self._known_elsewhere)
        node = self._known_elsewhere.get(path, ABSENT)
        if node is not ABSENT:
            return self.match(node, have, path)
        if isinstance(have, PerRank):
            return self._without_node(have.value, path)
        self.missing += self._arrays_in(have, path)
        return have

    def _arrays_in(self, have: Any, path: str) -> Iterator[str]:
        """The names of the arrays in some part of the state."""
        match have:
            case np.ndarray() | ShardedArray():
                yield path
            case Mapping():
                for key, value in have.items():
                    yield from self._arrays_in(value, child_name(path, key))
            case list() | tuple():
                for place, value in enumerate(have):
                    yield from self._arrays_in(value, child_name(path, place))
            case PerRank():
                yield from self._arrays_in(have.value, path)
            case _ if any(leaf_type.accepts(have) for leaf_type in self._leaf_types):
                yield path

    def _tensor(self, number: int, have: Any) -> Any:
        """A tensor, and what the state has in its place."""
        match have:
            case np.ndarray():
                self._pair(number, have)
                return have
            case ShardedArray():
                return self._sharded(number, have)
        for leaf_type in self._leaf_types:
            if leaf_type.accepts(have):
                made = leaf_type.to_array(have)
                if isinstance(made, ShardedArray):
                    self._sharded(number, made)
                else:
                    self._pair(number, made)
                self.has_foreign = True
                return Foreign(leaf_type, made, have)
        self.unexpected.append(number)
        return have

    def _sharded(self, number: int, have: ShardedArray) -> Any:
        local, result = have.local, have
        for leaf_type in self._leaf_types:
            if leaf_type.accepts(have.local):
                local = leaf_type.to_array(have.local)
                self.has_foreign = True
                result = Foreign(_in_part(leaf_type, have), local, have.local)  # type: ignore[assignment]
                break
        if have.global_shape != self._tensors.shapes[number]:
            self._differs(number, f"of shape {self._tensors.shapes[number]}", f"of shape {have.global_shape}")
            return have
        if have.box != whole(have.global_shape):
            self.boxes[len(self.numbers)] = have.box
        self._pair(number, local)
        return result

    def _pair(self, number: int, array: Array) -> None:
        self.numbers.append(number)
        self.arrays.append(array)


def settled(state: Any) -> Any:
    """A state in which what is foreign is made."""
    match state:
        case Foreign():
            return state.made()
        case dict():
            return {key: settled(value) for key, value in state.items()}
        case list():
            return [settled(value) for value in state]
        case tuple():
            return tuple(settled(value) for value in state)
        case _:
            return state


def _in_part(leaf_type: LeafType, have: ShardedArray) -> LeafType:
    """The same, for what is the part of a `ShardedArray`."""

    def from_array(array: Array | ShardedArray, value: Any) -> ShardedArray:
        return ShardedArray(leaf_type.from_array(array, value), have.global_shape, have.offset)

    return LeafType(leaf_type.accepts, leaf_type.to_array, from_array)


def _note(node: Node, path: str, known: dict[str, Node]) -> None:
    """Every part of a tree under its name."""
    if type(node) is int:
        known.setdefault(path, node)
        return
    ((kind, value),) = node.items()
    known.setdefault(path, node)
    if kind in {"d", "m"}:
        for key, inner in value.items() if kind == "d" else value:
            _note(inner, child_name(path, key), known)
    elif kind in {"l", "t"}:
        for place, inner in enumerate(value):
            _note(inner, child_name(path, place), known)


def _no_tensor(number: int) -> Any:
    raise AssertionError(f"tensor {number} in a tree without any")
