"""What a checkpoint says of itself: the document that is written last.

Law: a document is taken whole or not at all: its last line is the checksum of all before it, every number in it is
checked against what it counts, and what it makes a reader allocate is bounded by its own size. Files are named
relative to the storage and lie under the checkpoint's own prefix.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from forged.checkpoint.boxes import Box, Shape, chunk_lengths, grid_of, whole
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
    chunk, offset = 0, 0
    for place, tensor in enumerate(part.tensors):
        shape, itemsize = tensors.shapes[tensor], dtype_of(tensors.dtypes[tensor]).itemsize
        box = Box(*part.boxes[place]) if place in part.boxes else whole(shape)
        lengths = chunk_lengths(box, grid_of(shape, itemsize), itemsize)
        yield Piece(number, tensor, box, chunk, lengths, offset)
        chunk, offset = chunk + len(lengths), offset + sum(lengths)


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
    _require(all(0 <= tree < len(manifest.trees) for tree in manifest.tree_of_rank), "tree_of_rank")
    _require(math.isfinite(manifest.created_at), "created_at")
    _check_tensors(manifest)
    for file, size in manifest.extra_files.items():
        _check_file(manifest, file)
        _require(0 <= size <= SIZE_MAX, "extra_files")
    for number, part in enumerate(manifest.parts):
        _check_part(manifest, number, part)
    files = [part.file for part in manifest.parts] + [*manifest.extra_files]
    _require(len(set(files)) == len(files), "parts: a file is named twice")
    for tree in manifest.trees:
        _require(all(0 <= tensor < len(manifest.tensors.names) for tensor in tensors_in(tree)), "trees")


def _check_tensors(manifest: Manifest) -> None:
    tensors = manifest.tensors
    count = len(tensors.names)
    _require(len(tensors.dtypes) == len(tensors.shapes) == count, "tensors: the columns differ")
    _require(all(len(name) <= NAME_CHARS_MAX for name in tensors.names), "tensors.names")
    for shape, dtype in zip(tensors.shapes, tensors.dtypes, strict=True):
        _require(len(shape) <= AXES_MAX and all(0 <= size <= SIZE_MAX for size in shape), "tensors.shapes")
        _require(math.prod(shape) * dtype_of(dtype).itemsize <= SIZE_MAX, "tensors.shapes")
    private = [(name, tensors.ranks.get(number, -1)) for number, name in enumerate(tensors.names)]
    _require(len(set(private)) == count, "tensors: a name stands twice")
    _require(
        all(0 <= number < count and 0 <= rank < manifest.world_size for number, rank in tensors.ranks.items()),
        "tensors.ranks",
    )


def _check_part(manifest: Manifest, number: int, part: Part) -> None:
    _check_file(manifest, part.file)
    _require(0 <= part.rank < manifest.world_size, "parts.rank")
    _require(0 <= part.data_offset <= min(part.size, HEADER_BYTES_MAX + 8) and part.size <= SIZE_MAX, "parts.size")
    _require(all(0 <= tensor < len(manifest.tensors.names) for tensor in part.tensors), "parts.tensors")
    for place, (offset, shape) in part.boxes.items():
        _require(0 <= place < len(part.tensors), "parts.boxes")
        of = manifest.tensors.shapes[part.tensors[place]]
        _require(len(offset) == len(shape) == len(of) and min((*offset, *shape), default=0) >= 0, "parts.boxes")
        _require(whole(of).covers(Box(offset, shape)), "parts.boxes: one lies outside its tensor")
    _check_chunks(manifest, number, part)


def _check_chunks(manifest: Manifest, number: int, part: Part) -> None:
    said = len(digests_of(part))
    _require(said % DIGEST_BYTES == 0, "parts.digests")
    chunks = said // DIGEST_BYTES
    _require(len(base64.b64decode(part.header, validate=True)) == DIGEST_BYTES, "parts.header")
    _require(_count(manifest, part, chunks) == chunks, "parts.digests: not one for each chunk")
    if part.stored is None:
        size = sum(sum(piece.lengths) for piece in pieces(manifest, number))
    else:
        _require(len(part.stored) == chunks, "parts.stored")
        size = sum(map(abs, part.stored))
    _require(part.data_offset + size == part.size, "parts.size: it is not that of the pieces")


def _count(manifest: Manifest, part: Part, limit: int) -> int:
    """How many chunks the pieces have; stops counting beyond the limit, before anything large is built."""
    count = 0
    for place, tensor in enumerate(part.tensors):
        shape, itemsize = manifest.tensors.shapes[tensor], dtype_of(manifest.tensors.dtypes[tensor]).itemsize
        box = Box(*part.boxes[place]) if place in part.boxes else whole(shape)
        if box.volume:
            grid = grid_of(shape, itemsize)
            along = box.shape[grid.axis] // grid.step if box.shape else 1
            count += max(1, math.prod(box.shape[: grid.axis]) * along)
        if count > 2 * limit + len(part.tensors):
            return count
    return sum(len(piece.lengths) for piece in pieces(manifest, manifest.parts.index(part)))


def _check_file(manifest: Manifest, file: str) -> None:
    _require(file.startswith(f"{manifest.prefix}/"), f"file {file[:80]!r} is not under the prefix")
    check_prefix(file)


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
