"""What a checkpoint says of itself: the document that is written last.

Law: a document is taken whole or not at all: its last line is the checksum of all before it, every number in it is
checked against what it counts, and what it makes a reader allocate is bounded by its own size. Files are named
relative to the storage and lie under the checkpoint's own prefix.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import xxhash

from forged.checkpoint.boxes import Box, Shape, chunk_count, chunk_lengths, grid_of, whole
from forged.checkpoint.dtypes import dtype_of
from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted
from forged.checkpoint.model import AXES_MAX, CheckpointFormat, CompressionLevel, check_prefix
from forged.checkpoint.tree import NAME_CHARS_MAX, Node, tensors_in

SUFFIX = ".metadata.json"
TOMBSTONE = ".deleted.json"
MANIFEST_BYTES_MAX = 1 << 30
VERSION = "1.0"
FORMAT = "forged-checkpoint"
DIGEST_BYTES = 16
RANKS_MAX = 1 << 20
SIZE_MAX = 1 << 60
CREATED_AT_MAX = 253_402_300_799.0
"""The last second of the year 9999."""
HEADER_BYTES_MAX = 100_000_000
"""The safetensors library's own limit."""
_TAIL = b',"checksum":"%s"}\n'


class Fence(msgspec.Struct, frozen=True):
    """Under which leader and generation of a job it was saved."""

    term: int = 0
    generation: int = 0


class Tensors(msgspec.Struct, frozen=True):
    """All arrays of the checkpoint, by column."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    ranks: dict[int, int] = {}
    """Of the private ones, whose they are."""
    held: list[dict[int, tuple[tuple[int, ...], tuple[int, ...]]]] = []
    """By rank, offset and shape of what it had of each array of which a rank may have but a part; of none if empty."""


class Part(msgspec.Struct, frozen=True):
    """A file: pieces of tensors one behind the other, without anything between them."""

    file: str
    rank: int
    """Who has written it."""
    size: int
    data_offset: int
    """Where the first piece begins."""
    tensors: list[int]
    """Of which tensor each piece is."""
    boxes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    """Offset and shape of those pieces that are not the whole tensor."""
    digests: str
    """The xxh3-128 of every chunk as it is in memory, in order, all in base64."""
    header: str
    """The digest of what stands before the first piece."""
    stored: list[int] | None = None
    """How many bytes each chunk has in the file, where it is compressed; negative where it is not after all."""


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The document."""

    prefix: str
    created_at: float
    world_size: int
    tensors: Tensors
    trees: list[Any]
    """The states of the ranks, those that are alike once."""
    tree_of_rank: list[int]
    parts: list[Part]
    version: str = VERSION
    format: str = FORMAT
    layout: CheckpointFormat = CheckpointFormat.MULTI_SHARD
    compression: CompressionLevel = CompressionLevel.NONE
    save_id: str = ""
    """What tells it from any other save of that name."""
    extra_files: dict[str, int] = {}
    """Files that are there for other tools, and their sizes."""
    job: str = ""
    step: int | None = None
    fence: Fence | None = None
    custom: dict[str, Any] = {}

    @cached_property
    def size_bytes(self) -> int:
        """How much lies in its files."""
        return sum(part.size for part in self.parts) + sum(self.extra_files.values())

    @property
    def path(self) -> str:
        """The name of the document."""
        return self.prefix + SUFFIX

    def tree(self, rank: int) -> Node:
        """The state of a rank."""
        return self.trees[self.tree_of_rank[rank]]


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor in a file."""

    part: int
    tensor: int
    box: Box
    first_chunk: int
    """The number of its first chunk in the part."""
    lengths: list[int]
    """The bytes of its chunks, in memory."""
    offset: int
    """Where it begins, counted from the part's first piece, if nothing is compressed."""


def pieces(manifest: Manifest, number: int) -> Iterator[Piece]:
    """The pieces of a part, in order."""
    part, tensors = manifest.parts[number], manifest.tensors
    wholes: dict[tuple[Shape, str], tuple[Box, list[int], int]] = {}
    chunk, offset = 0, 0
    for place, tensor in enumerate(part.tensors):
        shape, dtype = kind = tensors.shapes[tensor], tensors.dtypes[tensor]
        if place in part.boxes:
            box, lengths, size = _measured(Box(*part.boxes[place]), shape, dtype)
        else:
            box, lengths, size = wholes.get(kind) or wholes.setdefault(kind, _measured(whole(shape), shape, dtype))
        yield Piece(number, tensor, box, chunk, lengths, offset)
        chunk, offset = chunk + len(lengths), offset + size


def _measured(box: Box, shape: Shape, dtype: str) -> tuple[Box, list[int], int]:
    """A box of a tensor, the lengths of its chunks, and their sum."""
    itemsize = dtype_of(dtype).itemsize
    return box, chunk_lengths(box, grid_of(shape, itemsize), itemsize), box.volume * itemsize


def digests_of(part: Part) -> bytes:
    """All digests of a part, `DIGEST_BYTES` each."""
    return base64.b64decode(part.digests, validate=True)


def encode(manifest: Manifest) -> bytes:
    """The document with its checksum."""
    body = msgspec.json.encode(manifest)[:-1]
    return body + _TAIL % xxhash.xxh3_128_hexdigest(body).encode()


def decode(data: bytes, path: str) -> Manifest:
    """The document that these bytes are; refuses any that is not whole, sound, and of a version that is known."""
    tail = len(_TAIL % (b"0" * 32))
    body = data[:-tail]
    if len(data) <= tail or data[-tail:] != _TAIL % xxhash.xxh3_128_hexdigest(body).encode():
        raise corrupted(
            f"{path} is not what was written: its checksum differs",
            path,
            "use another checkpoint",
            code="checkpoint_manifest_corrupt",
        )
    _check_version(data, path)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    except CheckpointException as error:
        raise _malformed(path, error.message) from None
    if path and path not in {manifest.path, manifest.prefix + TOMBSTONE}:
        raise _malformed(path, f"it is that of {manifest.prefix}")
    return manifest


class _Version(msgspec.Struct):
    format: str = ""
    version: str = ""


def _check_version(data: bytes, path: str) -> None:
    try:
        said = msgspec.json.decode(data, type=_Version)
    except (msgspec.MsgspecError, RecursionError):
        raise _malformed(path, "it is no JSON") from None
    if said.format != FORMAT:
        raise _malformed(path, "it is none of forged")
    if said.version.split(".")[0] != VERSION.split(".")[0]:
        raise CheckpointException(
            f"{path} has version {said.version[:20]}, and this is {VERSION}",
            path,
            ExceptionType.INCOMPATIBLE_VERSION,
            fix="load it with the version of forged that has saved it",
        )


def _check(manifest: Manifest) -> None:
    check_prefix(manifest.prefix)
    _require(1 <= manifest.world_size <= RANKS_MAX, "world_size")
    _require(len(manifest.tree_of_rank) == manifest.world_size, "tree_of_rank")
    _require(_all_within(manifest.tree_of_rank, len(manifest.trees)), "tree_of_rank")
    _require(0.0 <= manifest.created_at <= CREATED_AT_MAX, "created_at")
    sizes = _check_tensors(manifest)
    for file, size in manifest.extra_files.items():
        _check_file(manifest, file)
        _require(0 <= size <= SIZE_MAX, "extra_files")
    for number, part in enumerate(manifest.parts):
        _check_part(manifest, part, sizes)
        if part.stored is not None:
            lengths = chain.from_iterable(piece.lengths for piece in pieces(manifest, number))
            _require(all(map(_is_stored, part.stored, lengths)), "parts.stored")
    files = [part.file for part in manifest.parts] + [*manifest.extra_files]
    _require(len(set(files)) == len(files), "parts: a file is named twice")
    for tree in manifest.trees:
        _require(_all_within(list(tensors_in(tree)), len(manifest.tensors.names)), "trees")


class _Sizes(NamedTuple):
    """Of every tensor, by column."""

    bytes: list[int]
    chunks: list[int]


def _check_tensors(manifest: Manifest) -> _Sizes:
    tensors = manifest.tensors
    count = len(tensors.names)
    _require(len(tensors.dtypes) == len(tensors.shapes) == count, "tensors: the columns differ")
    _require(max(map(len, tensors.names), default=0) <= NAME_CHARS_MAX, "tensors.names")
    _require(_all_within([*tensors.ranks], count), "tensors.ranks")
    _require(_all_within([*tensors.ranks.values()], manifest.world_size), "tensors.ranks")
    _check_held(tensors, manifest.world_size)
    owners = map(tensors.ranks.get, range(count))
    _require(len(set(zip(tensors.names, owners, strict=True))) == count, "tensors: a name stands twice")
    kinds = list(zip(tensors.shapes, tensors.dtypes, strict=True))
    sizes = {kind: _sizes_of(*kind) for kind in set(kinds)}
    return _Sizes([sizes[kind][0] for kind in kinds], [sizes[kind][1] for kind in kinds])


def _check_held(tensors: Tensors, world_size: int) -> None:
    _require(len(tensors.held) in {0, world_size}, "tensors.held")
    for held in tensors.held:
        _require(_all_within([*held], len(tensors.names)), "tensors.held")
        for tensor, box in held.items():
            _check_box(Box(*box), tensors.shapes[tensor], "tensors.held")


def _check_box(box: Box, shape: Shape, what: str) -> None:
    _require(len(box.offset) == len(box.shape) == len(shape), what)
    _require(min((*box.offset, *box.shape), default=0) >= 0, what)
    _require(whole(shape).covers(box), f"{what}: one lies outside its tensor")


def _sizes_of(shape: Shape, dtype: str) -> tuple[int, int]:
    """How many bytes and how many chunks a tensor has."""
    itemsize = dtype_of(dtype).itemsize
    _require(len(shape) <= AXES_MAX and min(shape, default=0) >= 0, "tensors.shapes")
    _require(math.prod(max(1, size) for size in shape) * max(1, itemsize) <= SIZE_MAX, "tensors.shapes")
    return math.prod(shape) * itemsize, chunk_count(whole(shape), grid_of(shape, itemsize))


def _check_part(manifest: Manifest, part: Part, sizes: _Sizes) -> None:
    _check_file(manifest, part.file)
    _require(0 <= part.rank < manifest.world_size, "parts.rank")
    _require(0 <= part.data_offset <= min(part.size, HEADER_BYTES_MAX + 8) and part.size <= SIZE_MAX, "parts.size")
    _require(_all_within(part.tensors, len(manifest.tensors.names)), "parts.tensors")
    _require(_all_within([*part.boxes], len(part.tensors)), "parts.boxes")
    size, chunks = sum(map(sizes.bytes.__getitem__, part.tensors)), sum(map(sizes.chunks.__getitem__, part.tensors))
    for place, box in part.boxes.items():
        tensor = part.tensors[place]
        its_size, its_chunks = _sizes_in(Box(*box), manifest.tensors.shapes[tensor], manifest.tensors.dtypes[tensor])
        size, chunks = size + its_size - sizes.bytes[tensor], chunks + its_chunks - sizes.chunks[tensor]
    _check_chunks(part, size, chunks)


def _sizes_in(box: Box, shape: Shape, dtype: str) -> tuple[int, int]:
    """How many bytes and how many chunks a box of a tensor has."""
    _check_box(box, shape, "parts.boxes")
    itemsize = dtype_of(dtype).itemsize
    return box.volume * itemsize, chunk_count(box, grid_of(shape, itemsize))


def _check_chunks(part: Part, size: int, chunks: int) -> None:
    """`size` and `chunks` are what the pieces have."""
    _require(len(digests_of(part)) == chunks * DIGEST_BYTES, "parts.digests: not one for each chunk")
    _require(len(base64.b64decode(part.header, validate=True)) == DIGEST_BYTES, "parts.header")
    if part.stored is not None:
        _require(len(part.stored) == chunks, "parts.stored")
        size = sum(map(abs, part.stored))
    _require(part.data_offset + size == part.size, "parts.size: it is not that of the pieces")


def _is_stored(stored: int, length: int) -> bool:
    """Whether a chunk of that length can have become so many bytes."""
    return 0 < stored < length or stored == -length


def _all_within(numbers: Sequence[int], count: int) -> bool:
    """Whether all numbers are those of things of which there are so many."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < count)


def _check_file(manifest: Manifest, file: str) -> None:
    lead = f"{manifest.prefix}/"
    _require(file.startswith(lead), f"file {file[:80]!r} is not under the prefix")
    check_prefix(file.removeprefix(lead))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _malformed(path: str, why: str) -> CheckpointException:
    return corrupted(
        f"{path} is no manifest that can be read: {why[:200]}",
        path,
        "use another checkpoint",
        code="checkpoint_manifest_malformed",
    )


def shape_of(manifest: Manifest, tensor: int) -> Shape:
    """The global shape of a tensor."""
    return tuple(manifest.tensors.shapes[tensor])
