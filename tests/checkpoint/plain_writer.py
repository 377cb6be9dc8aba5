"""A reference writer: one part per rank, chunk by chunk. It shares only the format modules with the engine."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import xxhash

from forged.checkpoint.format.boxes import Box, chunks, grid_of, whole
from forged.checkpoint.format.compression import compress
from forged.checkpoint.format.dtypes import name_of
from forged.checkpoint.format.manifest import Manifest, Part, Tensors, deduplicate_boxes, encode
from forged.checkpoint.format.safetensors import TensorEntry, encode_header
from forged.checkpoint.format.states import States
from forged.checkpoint.format.tree import Leaf, LeafType, flatten, renumber_tensors
from forged.checkpoint.model import CompressionLevel
from forged.checkpoint.ports import Storage


def write_checkpoint(
    storage: Storage,
    prefix: str,
    states: Sequence[Any],
    *,
    copies: int = 1,
    level: CompressionLevel = CompressionLevel.NONE,
    created_at: float = 0.0,
    leaf_types: Sequence[LeafType] = (),
) -> Manifest:
    """Save the states of all ranks."""
    tensors = Tensors([], [], [], {}, [], {})
    numbers: dict[tuple[str, int | None], int] = {}
    holders: list[dict[Box, list[tuple[int, Leaf]]]] = []
    trees: list[Any] = []
    for rank, state in enumerate(states):
        tree, leaves = flatten(state, leaf_types)
        own = [_enter(tensors, numbers, holders, rank, leaf) for leaf in leaves]
        trees.append(renumber_tensors(tree, own))
    shares: list[list[tuple[int, Leaf]]] = [[] for _ in states]
    for number, held in enumerate(holders):
        for having in held.values():
            for copy in range(min(copies, len(having))):
                rank, leaf = having[(number + copy) % len(having)]
                shares[rank].append((number, leaf))
    parts = [_write_part(storage, prefix, rank, len(states), share, level) for rank, share in enumerate(shares)]
    manifest = Manifest(prefix, created_at, len(states), tensors, States.of(trees), parts, compression=level)
    storage.publish(manifest.path, encode(manifest))
    return manifest


def _enter(
    tensors: Tensors,
    numbers: dict[tuple[str, int | None], int],
    holders: list[dict[Box, list[tuple[int, Leaf]]]],
    rank: int,
    leaf: Leaf,
) -> int:
    owner = rank if leaf.is_per_rank else None
    number = numbers.setdefault((leaf.name, owner), len(numbers))
    if number == len(holders):
        tensors.names.append(leaf.name)
        tensors.dtypes.append(name_of(leaf.array.dtype))
        tensors.shapes.append(leaf.global_shape)
        holders.append({})
        if owner is not None:
            tensors.ranks[number] = owner
    if leaf.sharded_box is not None:
        if tensors.split_of.setdefault(number, len(tensors.splits)) == len(tensors.splits):
            tensors.splits.append({})
        tensors.splits[tensors.split_of[number]][rank] = leaf.box
    holders[number].setdefault(leaf.box, []).append((rank, leaf))
    return number


def _write_part(
    storage: Storage,
    prefix: str,
    rank: int,
    ranks: int,
    share: Sequence[tuple[int, Leaf]],
    level: CompressionLevel,
) -> Part:
    """One file: a header, and the chunks of one piece after the other."""
    entries = [
        TensorEntry(f"{leaf.name}@{place}", name_of(leaf.array.dtype), leaf.box.shape, leaf.array.nbytes)
        for place, (_, leaf) in enumerate(share)
    ]
    is_packed = level is not CompressionLevel.NONE
    header = b"" if is_packed else encode_header(entries, {})
    data, digests, stored = [header], [], []
    for _, leaf in share:
        for chunk in chunks(leaf.box, grid_of(leaf.global_shape, leaf.array.itemsize)):
            where: Any = (*chunk.within(leaf.box), ...)
            plain = leaf.array[where].tobytes()
            packed = compress(memoryview(plain), leaf.array.itemsize, level) if is_packed else None
            digests.append(xxhash.xxh3_128_digest(plain))
            stored.append(-len(plain) if packed is None else len(packed))
            data.append(plain if packed is None else packed)
    cut = {place: leaf.box for place, (_, leaf) in enumerate(share) if leaf.box != whole(leaf.global_shape)}
    boxes, box_of = deduplicate_boxes(cut, len(share))
    file = f"{prefix}/00000000.{rank:05d}-of-{ranks:05d}.{'packed' if is_packed else 'safetensors'}"
    storage.publish(file, b"".join(data))
    return Part(
        file=file,
        rank=rank,
        size=sum(map(len, data)),
        data_offset=len(header),
        tensors=[number for number, _ in share],
        boxes=boxes,
        box_of=box_of,
        digests=base64.b64encode(b"".join(digests)).decode(),
        header=base64.b64encode(xxhash.xxh3_128_digest(header)).decode(),
        stored=stored if is_packed else None,
    )
