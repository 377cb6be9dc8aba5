"""What a checkpoint says of itself: the document that is written last.

Law: a document is taken whole or not at all: its last line is the checksum of all before it, every number in it is
checked against what it counts, and what it makes a reader allocate is bounded by its own size. Files are named
relative to the storage and lie under the checkpoint's own prefix.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec
import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, invalid
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX, Box, Shape, chunk_count, chunk_lengths, grid_of, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.states import States
from forged.checkpoint.format.tree import NAME_CHARS_MAX, Node, Place, frame_content, tensor_numbers
from forged.checkpoint.model import AXES_MAX, CheckpointFormat, CompressionLevel, check_prefix

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
_WHOLE = -1

BoxText = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


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
    splits: list[dict[int, BoxText]] = []
    """The ways in which arrays were given in parts: what each rank had, by rank."""
    split_of: dict[int, int] = {}
    """In which of these ways, of the arrays that were given in parts."""


class Part(msgspec.Struct, frozen=True, dict=True):
    """A file: pieces of tensors one behind the other, without anything between them."""

    file: str
    rank: int
    """Who has written it."""
    size: int
    data_offset: int
    """Where the first piece begins."""
    tensors: list[int]
    """Of which tensor each piece is."""
    boxes: list[BoxText]
    """What some pieces are of their tensors, those that are alike once."""
    box_of: list[int]
    """Which of them each piece is, -1 for the whole tensor; empty if all are whole."""
    digests: str
    """The xxh3-128 of every chunk as it is in memory, in order, all in base64."""
    header: str
    """The digest of what stands before the first piece."""
    stored: list[int] | None = None
    """How many bytes each chunk has in the file, where it is compressed; negative where it is not after all."""

    @cached_property
    def partial_boxes(self) -> dict[int, Box]:
        """What of their tensors the pieces are that are not whole, by piece."""
        boxes = [Box(*box) for box in self.boxes]
        return {place: boxes[number] for place, number in enumerate(self.box_of) if number != _WHOLE}


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The document."""

    prefix: str
    created_at: float
    world_size: int
    tensors: Tensors
    states: States
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
        return self.states.tree(rank)


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
        if place in part.partial_boxes:
            box, lengths, size = _measured(part.partial_boxes[place], shape, dtype)
        else:
            box, lengths, size = wholes.get(kind) or wholes.setdefault(kind, _measured(whole(shape), shape, dtype))
        yield Piece(number, tensor, box, chunk, lengths, offset)
        chunk, offset = chunk + len(lengths), offset + size


def _measured(box: Box, shape: Shape, dtype: str) -> tuple[Box, list[int], int]:
    """A box of a tensor, the lengths of its chunks, and their sum."""
    itemsize = dtype_of(dtype).itemsize
    return box, chunk_lengths(box, grid_of(shape, itemsize), itemsize), box.volume * itemsize


def deduplicate_boxes(cut: Mapping[int, BoxText], pieces: int) -> tuple[list[BoxText], list[int]]:
    """What a part says of which boxes so many pieces are; `cut` are those that are not whole, by piece."""
    if not cut:
        return [], []
    numbers: dict[BoxText, int] = {}
    box_of = [_WHOLE] * pieces
    for place, box in cut.items():
        box_of[place] = numbers.setdefault(box, len(numbers))
    return list(numbers), box_of


def digests_of(part: Part) -> bytes:
    """All digests of a part, `DIGEST_BYTES` each."""
    return base64.b64decode(part.digests, validate=True)


def encode(manifest: Manifest) -> bytes:
    """The document with its checksum; refuses one that is larger than any that is read."""
    body = msgspec.json.encode(manifest)[:-1]
    if len(body) >= MANIFEST_BYTES_MAX - len(_TAIL % (b"0" * 32)):
        raise invalid(
            f"the manifest of {manifest.prefix} would have {len(body)} bytes, more than {MANIFEST_BYTES_MAX}",
            "use fewer arrays, or shorter keys",
        )
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
    if not path or path in {manifest.path, manifest.prefix + TOMBSTONE}:
        return manifest
    return _seen_from_elsewhere(manifest, path)


def _seen_from_elsewhere(manifest: Manifest, path: str) -> Manifest:
    """The document, read where the names of the storage begin further within, or out, than where it was written."""
    prefix = check_prefix(path.removesuffix(SUFFIX).removesuffix(TOMBSTONE))
    if not f"/{manifest.prefix}".endswith(f"/{prefix}") and not f"/{prefix}".endswith(f"/{manifest.prefix}"):
        raise _malformed(path, f"it is that of {manifest.prefix}")
    own = len(manifest.prefix)
    return msgspec.structs.replace(
        manifest,
        prefix=prefix,
        parts=[msgspec.structs.replace(part, file=prefix + part.file[own:]) for part in manifest.parts],
        extra_files={prefix + file[own:]: size for file, size in manifest.extra_files.items()},
    )


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
    _check_states(manifest)


def _check_states(manifest: Manifest) -> None:
    states = manifest.states
    _require(len(states.frame_of_rank) == len(states.own) == manifest.world_size, "states: not one of each rank")
    _require(_are_all(states.frame_of_rank, len(states.frames)), "states.frame_of_rank")
    places = [_check_frame(frame, manifest.tensors) for frame in states.frames]
    owner = manifest.tensors.ranks.get
    for rank, own in enumerate(states.own):
        open_places = places[states.frame_of_rank[rank]]
        _require(len(own) == len(open_places), "states.own: not as many as there are places for")
        for node, place in zip(own, open_places, strict=True):
            is_its = (owner(number) == rank for number in tensor_numbers(node, place.depth + 1))
            _require(all(is_its), "states.own: a tensor that is not the rank's")


def _check_frame(frame: Node, tensors: Tensors) -> list[Place]:
    numbers, places = frame_content(frame)
    _require(_all_within(numbers, len(tensors.names)), "states.frames: a tensor that is not there")
    _require(tensors.ranks.keys().isdisjoint(numbers), "states.frames: a tensor that is a rank's own")
    _require([place.number for place in places] == list(range(len(places))), "states.frames: the places' numbers")
    return places


class _Sizes(NamedTuple):
    """Of the tensors."""

    kinds: list[tuple[Shape, str]]
    """Those that there are."""
    kind_of: list[int]
    """By tensor."""
    of_wholes: list[tuple[int, int]]
    """By kind, how many bytes and how many chunks one has."""


def _check_tensors(manifest: Manifest) -> _Sizes:
    tensors = manifest.tensors
    count = len(tensors.names)
    _require(len(tensors.dtypes) == len(tensors.shapes) == count, "tensors: the columns differ")
    _require(max(map(len, tensors.names), default=0) <= NAME_CHARS_MAX, "tensors.names")
    _require(_all_within([*tensors.ranks], count), "tensors.ranks")
    _require(_all_within([*tensors.ranks.values()], manifest.world_size), "tensors.ranks")
    _check_splits(tensors, manifest.world_size)
    owners = map(tensors.ranks.get, range(count))
    _require(len(set(zip(tensors.names, owners, strict=True))) == count, "tensors: a name stands twice")
    numbers: dict[tuple[Shape, str], int] = {}
    kind_of = [numbers.setdefault(kind, len(numbers)) for kind in zip(tensors.shapes, tensors.dtypes, strict=True)]
    return _Sizes(list(numbers), kind_of, [_sizes_of(*kind) for kind in numbers])


def _check_splits(tensors: Tensors, world_size: int) -> None:
    _require(_all_within([*tensors.split_of], len(tensors.names)), "tensors.split_of")
    _require(_are_all(tensors.split_of.values(), len(tensors.splits)), "tensors.split_of")
    for split in tensors.splits:
        _require(bool(split) and _all_within([*split], world_size), "tensors.splits")
    bounds = [_bounds_of(split) for split in tensors.splits]
    for tensor, number in tensors.split_of.items():
        _check_box(bounds[number], tensors.shapes[tensor], "tensors.splits")


def _bounds_of(split: Mapping[int, BoxText]) -> Box:
    """The smallest box that begins where arrays do and has all of them in it."""
    axes = {len(side) for box in split.values() for side in box}
    _require(len(axes) == 1 and min(chain((0,), *chain(*split.values()))) >= 0, "tensors.splits")
    ends = [map(int.__add__, *box) for box in split.values()]
    return whole(tuple(map(max, zip(*ends, strict=True))))


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
    _require(len(part.box_of) in {0, len(part.tensors)}, "parts.box_of: not one of each piece")
    _require(_are_all({*part.box_of} - {_WHOLE}, len(part.boxes)), "parts.box_of")
    size = chunks = 0
    kinds = map(sizes.kind_of.__getitem__, part.tensors)
    for (box, kind), count in Counter(zip(part.box_of or repeat(_WHOLE), kinds, strict=False)).items():
        each = sizes.of_wholes[kind] if box == _WHOLE else _sizes_in(Box(*part.boxes[box]), *sizes.kinds[kind])
        size, chunks = size + each[0] * count, chunks + each[1] * count
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
    return 0 < stored < length <= CHUNK_BYTES_MAX or stored == -length


def _all_within(numbers: Sequence[int], count: int) -> bool:
    """Whether all numbers are those of things of which there are so many."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < count)


def _are_all(numbers: Iterable[int], count: int) -> bool:
    """Whether the numbers are those of so many things, and none of these is left out."""
    return {*numbers} == set(range(count))


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
