"""What a rank is given of a checkpoint if it does not say what it wants.

Law: in a world of the same size a rank is given what it had. In any other world all ranks together are given everything
but what was some rank's own; that goes to that rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.manifest import BoxText, Manifest
from forged.checkpoint.format.tree import Node, frame_content
from forged.checkpoint.model import ReshardingStrategy

ABSENT: Final = object()
"""Stands for what is not there, where None is a value."""
NOTHING: Final[Node] = {"v": None}
"""In a list, what is left out leaves this, so that what follows keeps its place."""


def tree_for(manifest: Manifest, rank: int, world_size: int) -> Node:
    """The tree of a rank, in a world of that size."""
    states, saved = manifest.states, manifest.world_size
    own = states.tree(rank) if rank < saved else without_private(states.frame(rank % saved))
    if world_size == saved:
        return own
    others = common_of_others(manifest, rank)
    return united(own, others) if others else own


def common_of_others(manifest: Manifest, rank: int) -> list[Node]:
    """The trees that ranks of another build had, without what was any one's own."""
    return [without_private(frame) for frame in manifest.states.other_frames(rank % manifest.world_size)]


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
    if world_size == manifest.world_size:
        mine = {number: Box(*split[rank]) for number, split in enumerate(tensors.splits) if rank in split}
        return {tensor: mine[number] for tensor, number in tensors.split_of.items() if number in mine}
    if strategy is ReshardingStrategy.SIMPLE:
        return {}
    axes = [_axis_of(split) for split in tensors.splits]
    return {
        tensor: _slice(whole(tensors.shapes[tensor]), axes[tensors.split_of[tensor]], rank, world_size)
        for tensor in wanted
        if tensor in tensors.split_of and tensor not in tensors.ranks
    }


def turns(manifest: Manifest, rank: int, world_size: int, wanted: Iterable[int]) -> set[int]:
    """Whole tensors in turn: those that this rank leaves to others."""
    tensors = manifest.tensors
    common = sorted((tensors.names[number], number) for number in wanted if number not in tensors.ranks)
    return {number for place, (_, number) in enumerate(common) if place % world_size != rank}


def _axis_of(split: Mapping[int, BoxText]) -> int | None:
    """The first axis along which ranks had different parts."""
    offsets, shapes = (list(zip(*sides, strict=True)) for sides in zip(*split.values(), strict=True))
    along = enumerate(zip(offsets, shapes, strict=True))
    return next((axis for axis, (starts, sizes) in along if len(set(zip(starts, sizes, strict=True))) > 1), None)


def _slice(box: Box, axis: int | None, rank: int, world_size: int) -> Box:
    """An even share of a box along an axis; all of it if there is none."""
    if axis is None:
        return box
    size = box.shape[axis]
    start, end = size * rank // world_size, size * (rank + 1) // world_size
    return Box(
        (*box.offset[:axis], start, *box.offset[axis + 1 :]),
        (*box.shape[:axis], end - start, *box.shape[axis + 1 :]),
    )


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
        case "p" if keeps_private:
            found = _pruned(value, keeps, keeps_private)
            return found if found is ABSENT else {"p": found}
        case "p" | "o":
            return ABSENT
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
    of_each = [set(frame_content(frame)[0]) for frame in manifest.states.frames]
    return set.intersection(*of_each)
