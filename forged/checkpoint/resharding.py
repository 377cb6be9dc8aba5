"""What a rank is given of a checkpoint if it does not say what it wants.

Law: in a world of the same size a rank is given what it had. In any other world all ranks together are given everything
but what was some rank's own; that goes to that rank alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from forged.checkpoint.boxes import Box, whole
from forged.checkpoint.manifest import Manifest
from forged.checkpoint.model import ReshardingStrategy
from forged.checkpoint.tree import Node, tensors_in

ABSENT: Final = object()
"""Stands for what is not there, where None is a value."""
NOTHING: Final[Node] = {"v": None}
"""In a list, what is left out leaves this, so that what follows keeps its place."""


def tree_for(manifest: Manifest, rank: int, world_size: int) -> Node:
    """The tree of a rank, in a world of that size."""
    saved = manifest.world_size
    own = manifest.tree(rank % saved)
    if rank >= saved:
        own = without_private(own)
    if world_size == saved:
        return own
    first = manifest.tree_of_rank[rank % saved]
    others = [tree for number, tree in enumerate(manifest.trees) if number != first]
    return united(own, [without_private(tree) for tree in others]) if others else own


def lacking(manifest: Manifest, rank: int) -> set[str]:
    """The names of what every rank has for itself, where this rank was not there."""
    if rank < manifest.world_size:
        return set()
    return {manifest.tensors.names[number] for number in manifest.tensors.ranks}


def boxes_for(
    manifest: Manifest, rank: int, world_size: int, strategy: ReshardingStrategy, wanted: Sequence[int]
) -> dict[int, Box]:
    """Of which tensors a rank is given a part, by tensor."""
    tensors = manifest.tensors
    if not tensors.held:
        return {}
    if world_size == manifest.world_size:
        return {tensor: Box(*box) for tensor, box in tensors.held[rank].items()}
    if strategy is ReshardingStrategy.SIMPLE:
        return {}
    found: dict[int, Box] = {}
    for tensor in wanted:
        held = {Box(*own[tensor]) for own in tensors.held if tensor in own}
        if held and tensor not in tensors.ranks:
            found[tensor] = _slice(whole(tensors.shapes[tensor]), held, rank, world_size)
    return found


def turns(manifest: Manifest, rank: int, world_size: int, wanted: Iterable[int]) -> set[int]:
    """Whole tensors in turn: those that this rank leaves to others."""
    tensors = manifest.tensors
    common = sorted((tensors.names[number], number) for number in wanted if number not in tensors.ranks)
    return {number for place, (_, number) in enumerate(common) if place % world_size != rank}


def _slice(box: Box, held: Collection[Box], rank: int, world_size: int) -> Box:
    """An even share of a box along the first axis along which it was in parts; all of it if it was in none."""
    for axis, size in enumerate(box.shape):
        if len({(one.offset[axis], one.shape[axis]) for one in held}) > 1:
            start, end = size * rank // world_size, size * (rank + 1) // world_size
            return Box(
                (*box.offset[:axis], start, *box.offset[axis + 1 :]),
                (*box.shape[:axis], end - start, *box.shape[axis + 1 :]),
            )
    return box


def united(own: Node, others: Sequence[Node]) -> Node:
    """A tree with what others have under keys that it does not have."""
    entries = _entries(own)
    if entries is None:
        return own
    found = dict(entries)
    for other in others:
        for key, inner in (_entries(other) or {}).items():
            if key not in found:
                found[key] = inner
            elif found[key] != inner:
                found[key] = united(found[key], [inner])
    return _node_of(found)


def without_private(node: Node) -> Node:
    """A tree without what is a rank's own."""
    return pruned(node, lambda number: True)


def pruned(node: Node, keeps: Any, *, keeps_private: bool = False) -> Node:
    """A tree with no tensors but those that are kept."""
    found = _pruned(node, keeps, keeps_private)
    return NOTHING if found is ABSENT else found


def _pruned(node: Node, keeps: Any, keeps_private: bool) -> Any:
    if type(node) is int:
        return node if keeps(node) else ABSENT
    ((kind, value),) = node.items()
    match kind:
        case "d" | "m":
            items = value.items() if kind == "d" else value
            kept = [(key, _pruned(inner, keeps, keeps_private)) for key, inner in items]
            there = [[key, inner] for key, inner in kept if inner is not ABSENT]
            return {kind: dict(there) if kind == "d" else there}
        case "l" | "t":
            inner = [_pruned(one, keeps, keeps_private) for one in value]
            return {kind: [NOTHING if one is ABSENT else one for one in inner]}
        case "p" if not keeps_private:
            return ABSENT
        case "p":
            found = _pruned(value, keeps, keeps_private)
            return found if found is ABSENT else {"p": found}
        case _:
            return node


def _entries(node: Node) -> Mapping[Any, Node] | None:
    """What a dict has."""
    match node:
        case {"d": items} | {"m": items}:
            return dict(items)
        case _:
            return None


def _node_of(entries: Mapping[Any, Node]) -> Node:
    if all(type(key) is str for key in entries):
        return {"d": dict(entries)}
    return {"m": [[key, inner] for key, inner in entries.items()]}


def common_to_all(manifest: Manifest) -> set[int]:
    """The tensors that every rank had."""
    of_each = [set(tensors_in(tree)) for tree in manifest.trees]
    return set.intersection(*of_each)
