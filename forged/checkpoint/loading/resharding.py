"""Resharding: which tensors, and which parts of them, a rank loads if it does not give a state to fill.

Invariants:
- In a world of the saved size a rank gets its own tree and parts.
- In a world of another size all ranks together get everything; a per-rank value (`PerRank`) goes only to its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.manifest import BoxText, Manifest
from forged.checkpoint.format.tree import Node, frame_content
from forged.checkpoint.model import ReshardingStrategy

ABSENT: Final = object()
"""Marks an absent node, because None is a value."""
PLACEHOLDER: Final[Node] = {"v": None}
"""Replaces a removed list item, so that the following items keep their positions."""


def tree_for(manifest: Manifest, rank: int, world_size: int) -> Node:
    """The tree that a rank loads in a world of that size."""
    states, saved = manifest.states, manifest.world_size
    own = states.tree(rank) if rank < saved else without_per_rank(states.frame(rank % saved))
    if world_size == saved:
        return own
    trees = other_trees(manifest, rank)
    return merge_trees(own, trees) if trees else own


def other_trees(manifest: Manifest, rank: int) -> list[Node]:
    """The trees of ranks whose state has another structure, without per-rank values."""
    return [without_per_rank(frame) for frame in manifest.states.other_frames(rank % manifest.world_size)]


def missing_per_rank(manifest: Manifest, rank: int) -> set[str]:
    """The names of per-rank tensors that a rank beyond the saved world size cannot get."""
    if rank < manifest.world_size:
        return set()
    return {manifest.tensors.names[number] for number in manifest.tensors.ranks}


def boxes_for(
    manifest: Manifest, rank: int, world_size: int, strategy: ReshardingStrategy, wanted: Sequence[int]
) -> dict[int, Box]:
    """By tensor, the box that a rank loads, where that is not the whole tensor."""
    tensors = manifest.tensors
    if world_size == manifest.world_size:
        boxes_of_rank = {number: Box(*split[rank]) for number, split in enumerate(tensors.splits) if rank in split}
        return {tensor: boxes_of_rank[number] for tensor, number in tensors.split_of.items() if number in boxes_of_rank}
    if strategy is ReshardingStrategy.SIMPLE:
        return {}
    axes = [_split_axis(split) for split in tensors.splits]
    return {
        tensor: _even_slice(whole(tensors.shapes[tensor]), axes[tensors.split_of[tensor]], rank, world_size)
        for tensor in wanted
        if tensor in tensors.split_of and tensor not in tensors.ranks
    }


def left_to_other_ranks(manifest: Manifest, rank: int, world_size: int, wanted: Iterable[int]) -> set[int]:
    """With strategy `simple`: the tensors that other ranks load; whole tensors are dealt out by name."""
    tensors = manifest.tensors
    common = sorted((tensors.names[number], number) for number in wanted if number not in tensors.ranks)
    return {number for place, (_, number) in enumerate(common) if place % world_size != rank}


def _split_axis(split: Mapping[int, BoxText]) -> int | None:
    """The first axis along which the ranks' parts differ; None if none does."""
    offsets, shapes = (list(zip(*sides, strict=True)) for sides in zip(*split.values(), strict=True))
    along = enumerate(zip(offsets, shapes, strict=True))
    return next((axis for axis, (starts, sizes) in along if len(set(zip(starts, sizes, strict=True))) > 1), None)


def _even_slice(box: Box, axis: int | None, rank: int, world_size: int) -> Box:
    """A rank's even slice of a box along an axis; the whole box without an axis."""
    if axis is None:
        return box
    size = box.shape[axis]
    start, end = size * rank // world_size, size * (rank + 1) // world_size
    return Box(
        (*box.offset[:axis], start, *box.offset[axis + 1 :]),
        (*box.shape[:axis], end - start, *box.shape[axis + 1 :]),
    )


def merge_trees(own: Node, trees: Sequence[Node]) -> Node:
    """A tree, plus the keys of other trees that it lacks."""
    entries = _entries(own)
    if entries is None:
        return own
    found = dict(entries)
    for tree in trees:
        for key, inner in (_entries(tree) or {}).items():
            if key not in found:
                found[key] = inner
            elif found[key] != inner:
                found[key] = merge_trees(found[key], [inner])
    return _node_of(found)


def without_per_rank(node: Node) -> Node:
    """A tree without per-rank values."""
    return prune(node, lambda number: True)


def prune(node: Node, is_kept: Any, *, keep_per_rank: bool = False) -> Node:
    """A tree with only those tensors for which `is_kept` holds."""
    found = _prune(node, is_kept, keep_per_rank)
    return PLACEHOLDER if found is ABSENT else found


def _prune(node: Node, is_kept: Any, keep_per_rank: bool) -> Any:
    if type(node) is int:
        return node if is_kept(node) else ABSENT
    ((kind, value),) = node.items()
    match kind:
        case "d" | "m":
            items = value.items() if kind == "d" else value
            kept = [(key, _prune(inner, is_kept, keep_per_rank)) for key, inner in items]
            there = [[key, inner] for key, inner in kept if inner is not ABSENT]
            return {kind: dict(there) if kind == "d" else there}
        case "l" | "t":
            inner = [_prune(one, is_kept, keep_per_rank) for one in value]
            return {kind: [PLACEHOLDER if one is ABSENT else one for one in inner]}
        case "p" if keep_per_rank:
            found = _prune(value, is_kept, keep_per_rank)
            return found if found is ABSENT else {"p": found}
        case "p" | "o":
            return ABSENT
        case _:
            return node


def _entries(node: Node) -> Mapping[Any, Node] | None:
    """The entries of a dict node; None for other nodes."""
    match node:
        case {"d": items} | {"m": items}:
            return dict(items)
        case _:
            return None


def _node_of(entries: Mapping[Any, Node]) -> Node:
    if all(type(key) is str for key in entries):
        return {"d": dict(entries)}
    return {"m": [[key, inner] for key, inner in entries.items()]}


def tensors_of_all_ranks(manifest: Manifest) -> set[int]:
    """The tensors that every rank had."""
    of_each = [set(frame_content(frame)[0]) for frame in manifest.states.frames]
    return set.intersection(*of_each)
