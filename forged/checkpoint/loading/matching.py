"""Matching: compares a saved tree with the state that it is loaded into.

Invariants:
- A tensor goes only into the array of the same name, shape and type.
- Everything without a counterpart is reported by name.
- Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import invalid
from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Tensors
from forged.checkpoint.format.tree import Node, array_of, child_name, keys_of, tensor_numbers, unflatten
from forged.checkpoint.loading.resharding import ABSENT
from forged.checkpoint.model import ObjectState, PerRank, ShardedArray
from forged.leaf_types import LeafType, leaf_type_for, package_in, provider_of

Array = np.ndarray[Any, Any]


class PendingLeaf:
    """A leaf of a custom type, converted from its array after the array is loaded."""

    __slots__ = ("_leaf_type", "_value", "array")

    def __init__(self, leaf_type: LeafType, array: Array | ShardedArray, value: Any) -> None:
        self.array = array
        self._leaf_type = leaf_type
        self._value = value

    def value(self) -> Any:
        """The converted leaf."""
        return self._leaf_type.from_array(self.array, self._value)


class _Owner(NamedTuple):
    """The object whose state is matched."""

    value: Any
    package: str
    """The package of its leaves."""
    path: str

    def keys_of(self, name: str) -> tuple[Any, ...]:
        """The keys that lead to a value in the object's state."""
        return keys_of(name)[len(keys_of(self.path)) :]


class Matching:
    """One comparison of a checkpoint with a state."""

    def __init__(
        self,
        tensors: Tensors,
        leaf_types: Sequence[LeafType],
        is_selected: Callable[[str], bool] | None,
        other_trees: Callable[[], Iterable[Node]],
    ) -> None:
        """`is_selected` says by name which tensors to load; `other_trees` gives what other ranks' trees have."""
        self.numbers: list[int] = []
        self.arrays: list[Array] = []
        """By position in `numbers`, the array to fill."""
        self.boxes: dict[int, Box] = {}
        """By position in `numbers`, the box, where the array is a part of its tensor."""
        self.missing: list[str] = []
        self.unexpected: list[int] = []
        self.mismatched: dict[str, str] = {}
        """By name, how shape or type differ."""
        self.has_pending = False
        self._tensors = tensors
        self._leaf_types = tuple(leaf_types)
        self._is_selected = is_selected
        self._other_trees = other_trees
        self._nodes_of_other_trees: dict[str, Node] | None = None
        self._owner: _Owner | None = None
        """The object of a package with leaf types whose state is matched, if it is one's."""

    def match(self, node: Node, current: Any, path: str = "") -> Any:
        """The state for a node, with the arrays of the current state where they match."""
        if isinstance(current, PerRank):
            return self.match(node, current.value, path)
        if isinstance(current, ObjectState):
            return self._object(node, current, path)
        if type(node) is int:
            return self._tensor(node, current)
        ((kind, value),) = node.items()
        match kind:
            case "p":
                return self.match(value, current, path)
            case "d" if isinstance(current, Mapping):
                return self._dict(value.items(), current, path)
            case "m" if isinstance(current, Mapping):
                return self._dict(value, current, path)
            case "l" | "t" if isinstance(current, list | tuple):
                found = self._list(value, current, path)
                return found if kind == "l" else tuple(found)
            case _:
                return self._of_another_kind(node, current, path)

    def _object(self, node: Node, current: ObjectState, path: str) -> Any:
        """The state for an object."""
        outer, package = self._owner, package_in(current.owner, current.value)
        self._owner = None if package is None else _Owner(current.owner, package, path)
        try:
            return self.match(node, current.value, path)
        finally:
            self._owner = outer

    def drop_mismatches(self) -> None:
        """Drop pairs that are not selected or differ; refuse arrays that cannot be written."""
        names, shapes, dtypes = self._tensors.names, self._tensors.shapes, self._tensors.dtypes
        types = {name: dtype_of(name) for name in set(map(dtypes.__getitem__, self.numbers))}
        dropped: set[int] = set()
        for place, (number, array) in enumerate(zip(self.numbers, self.arrays, strict=True)):
            if self._is_selected is not None and not self._is_selected(names[number]):
                dropped.add(place)
                continue
            shape = self.boxes[place].shape if place in self.boxes else shapes[number]
            if array.shape != shape or array.dtype != types[dtypes[number]]:
                self._add_mismatch(number, f"{dtypes[number]} {shape}", f"{array.dtype} {array.shape}")
                dropped.add(place)
            elif type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
                raise invalid(
                    f"{names[number]} of the state is a masked array",
                    "load into its data and its mask separately",
                )
            elif not array.flags.writeable:
                raise invalid(
                    f"the array {names[number]} of the state is read-only",
                    "give writable arrays",
                    code="checkpoint_array_readonly",
                )
        if dropped:
            self._keep([place for place in range(len(self.numbers)) if place not in dropped])

    def _add_mismatch(self, number: int, saved: str, current: str) -> None:
        name = self._tensors.names[number]
        self.mismatched[name] = f"{name} is {saved} in the checkpoint and {current} in the state"

    def _keep(self, places: list[int]) -> None:
        self.boxes = {new: self.boxes[old] for new, old in enumerate(places) if old in self.boxes}
        self.numbers = [self.numbers[place] for place in places]
        self.arrays = [self.arrays[place] for place in places]

    def _dict(self, items: Iterable[tuple[Any, Node]], current: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, node in items:
            if key not in current:
                blanks = self._blanks(node) if self._is_open(current) else None
                self._not_in_state(found, key, node, blanks)
                continue
            value = current[key]
            if type(node) is int and type(value) is np.ndarray:
                self.numbers.append(node)
                self.arrays.append(value)
                found[key] = value
            else:
                found[key] = self.match(node, value, child_name(path, key))
        if not current.keys() <= found.keys():
            for key, value in current.items():
                if key not in found and not self._is_superfluous(key, path):
                    found[key] = self._not_in_tree(value, child_name(path, key))
        return found

    def _is_open(self, current: Mapping[Any, Any]) -> bool:
        """Whether the object whose state it is may get entries that this dict lacks.

        An optimizer has a dict of entries by the number of the parameter, each from the first step that changes it.
        """
        return self._owner is not None and (any(map(self._is_entry, current)) or not any(self._arrays_in(current, "")))

    def _is_entry(self, key: Any) -> bool:
        return self._owner is not None and type(key) is int

    def _is_superfluous(self, key: Any, path: str) -> bool:
        """Whether an entry of the object was not there yet when it was saved, so that it is to go."""
        return self._is_entry(key) and self._node_of_other_tree(child_name(path, key)) is ABSENT

    def _blanks(self, node: Node) -> dict[int, Any] | None:
        """By tensor, a new value to load it into; None if the object takes none."""
        assert self._owner is not None
        owner, tensors, blanks = self._owner, self._tensors, dict[int, Any]()
        for number in tensor_numbers(node):
            name, dtype = tensors.names[number], dtype_of(tensors.dtypes[number])
            if self._is_selected is not None and not self._is_selected(name):
                return None
            keys = owner.keys_of(name)
            blank = provider_of(owner.package).blank_for(owner.value, keys, dtype, tensors.shapes[number])
            if blank is None:
                return None
            blanks[number] = blank
        return blanks

    def _list(self, nodes: Sequence[Node], current: Sequence[Any], path: str) -> list[Any]:
        found = [
            self.match(node, value, child_name(path, place))
            for place, (node, value) in enumerate(zip(nodes, current, strict=False))
        ]
        for node in nodes[len(current) :]:
            rest: dict[int, Any] = {}
            self._not_in_state(rest, 0, node, None)
            found += rest.values()
        for place, value in enumerate(current[len(nodes) :], len(nodes)):
            found.append(self._not_in_tree(value, child_name(path, place)))
        return found

    def _not_in_state(self, found: dict[Any, Any], key: Any, node: Node, blanks: Mapping[int, Any] | None) -> None:
        """The state lacks this key: take values from the checkpoint; report tensors without a blank as unexpected."""
        numbers = list(tensor_numbers(node))
        if numbers and blanks is None:
            self.unexpected += numbers
        else:
            found[key] = unflatten(node, lambda number: self._tensor(number, (blanks or {})[number]))

    def _of_another_kind(self, node: Node, current: Any, path: str) -> Any:
        """The checkpoint has another kind of value here than the state."""
        numbers = list(tensor_numbers(node))
        self.unexpected += numbers
        missing = list(self._arrays_in(current, path))
        self.missing += missing
        return current if missing or numbers else unflatten(node, _no_tensor)

    def _not_in_tree(self, current: Any, path: str) -> Any:
        """This rank's tree lacks this key: another rank's tree may have it."""
        node = self._node_of_other_tree(path)
        if node is not ABSENT:
            return self.match(node, current, path)
        if isinstance(current, PerRank):
            return self._not_in_tree(current.value, path)
        self.missing += self._arrays_in(current, path)
        return current

    def _node_of_other_tree(self, path: str) -> Node:
        if self._nodes_of_other_trees is None:
            self._nodes_of_other_trees = {}
            for tree in self._other_trees():
                _collect_nodes(tree, "", self._nodes_of_other_trees)
        return self._nodes_of_other_trees.get(path, ABSENT)

    def _arrays_in(self, current: Any, path: str) -> Iterator[str]:
        """The names of the arrays in a part of the state."""
        match current:
            case np.ndarray() | ShardedArray():
                yield path
            case Mapping():
                for key, value in current.items():
                    yield from self._arrays_in(value, child_name(path, key))
            case list() | tuple():
                for place, value in enumerate(current):
                    yield from self._arrays_in(value, child_name(path, place))
            case PerRank() | ObjectState():
                yield from self._arrays_in(current.value, path)
            case _ if leaf_type_for(current, self._leaf_types) is not None:
                yield path

    def _tensor(self, number: int, current: Any) -> Any:
        """Pair a tensor with the state's value in its place."""
        match current:
            case np.ndarray():
                self._pair(number, current)
                return current
            case ShardedArray():
                return self._sharded(number, current)
        if (leaf_type := leaf_type_for(current, self._leaf_types)) is not None:
            value = array_of(leaf_type, current, self._tensors.names[number])
            if isinstance(value, ShardedArray):
                self._sharded(number, value)
            else:
                self._pair(number, value)
            self.has_pending = True
            return PendingLeaf(leaf_type, value, current)
        self.unexpected.append(number)
        return current

    def _sharded(self, number: int, current: ShardedArray) -> Any:
        local, result = current.local, current
        if (leaf_type := leaf_type_for(current.local, self._leaf_types)) is not None:
            local = array_of(leaf_type, current.local, self._tensors.names[number])
            self.has_pending = True
            result = PendingLeaf(_for_shard(leaf_type, current), local, current.local)  # type: ignore[assignment]
        if current.global_shape != self._tensors.shapes[number]:
            self._add_mismatch(number, f"of shape {self._tensors.shapes[number]}", f"of shape {current.global_shape}")
            return current
        if current.box != whole(current.global_shape):
            self.boxes[len(self.numbers)] = current.box
        self._pair(number, local)
        return result

    def _pair(self, number: int, array: Array) -> None:
        self.numbers.append(number)
        self.arrays.append(array)


def resolve_pending(state: Any) -> Any:
    """The state with all pending leaves converted."""
    match state:
        case PendingLeaf():
            return state.value()
        case dict():
            return {key: resolve_pending(value) for key, value in state.items()}
        case list():
            return [resolve_pending(value) for value in state]
        case tuple():
            return tuple(resolve_pending(value) for value in state)
        case _:
            return state


def _for_shard(leaf_type: LeafType, current: ShardedArray) -> LeafType:
    """The leaf type for the local part of a `ShardedArray`."""

    def from_array(array: Array | ShardedArray, value: Any) -> ShardedArray:
        return ShardedArray(leaf_type.from_array(array, value), current.global_shape, current.offset)

    return LeafType(leaf_type.accepts, leaf_type.to_array, from_array)


def _collect_nodes(node: Node, path: str, known: dict[str, Node]) -> None:
    """Collect every node of a tree by name."""
    if type(node) is int:
        known.setdefault(path, node)
        return
    ((kind, value),) = node.items()
    known.setdefault(path, node)
    if kind in {"d", "m"}:
        for key, inner in value.items() if kind == "d" else value:
            _collect_nodes(inner, child_name(path, key), known)
    elif kind in {"l", "t"}:
        for place, inner in enumerate(value):
            _collect_nodes(inner, child_name(path, place), known)


def _no_tensor(number: int) -> Any:
    raise AssertionError(f"tensor {number} in a tree without any")
