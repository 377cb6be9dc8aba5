"""The manifest: the document that describes a checkpoint, written last.

Invariants:
- A manifest is accepted as a whole or not at all: its last member is the checksum of everything before it.
- Every number is checked against what it counts, and memory allocated for a manifest is bounded by its size.
- File names are relative to the storage and lie under the checkpoint's prefix, or, in an incremental checkpoint, under
  that of a checkpoint of its chain.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, invalid
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX, Box, Grid, Shape, chunk_count, chunk_lengths, grid_of, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.states import States
from forged.checkpoint.format.tree import NAME_CHARS_MAX, Node, OpenPlace, frame_content, tensor_numbers
from forged.checkpoint.model import AXES_MAX, COUNT_MAX, CheckpointFormat, CompressionLevel, check_prefix

SUFFIX = ".metadata.json"
TOMBSTONE = ".deleted.json"
MANIFEST_BYTES_MAX = 1 << 30
VERSION = "1.0"
INCREMENTAL_VERSION = "2.0"
"""Readers of version 1 refuse it, because they look for all chunks in the checkpoint's own files."""
FORMAT = "forged-checkpoint"
DIGEST_BYTES = 16
RANKS_MAX = 1 << 20
SIZE_MAX = 1 << 60
CREATED_AT_MAX = 253_402_300_799.0
"""The last second of the year 9999."""
HEADER_BYTES_MAX = 100_000_000
"""The limit of the `safetensors` library."""
_TAIL = b',"checksum":"%s"}\n'
_WHOLE = -1
_MAJOR_VERSIONS = VERSION.split(".")[0], INCREMENTAL_VERSION.split(".")[0]

BoxText = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box."""


class ManifestFence(msgspec.Struct, frozen=True):
    """The leader's term and the job's generation under which the checkpoint was saved."""

    term: int = 0
    generation: int = 0


class Tensors(msgspec.Struct, frozen=True):
    """All tensors of the checkpoint, by column."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    ranks: dict[int, int] = {}
    """The rank of each per-rank tensor."""
    splits: list[dict[int, BoxText]] = []
    """The distinct divisions of sharded tensors: by rank, the box that it had."""
    split_of: dict[int, int] = {}
    """By sharded tensor, the number of its division."""


class ChainLink(msgspec.Struct, frozen=True):
    """An earlier checkpoint whose files an incremental one uses."""

    prefix: str
    save_id: str

    def has_file(self, file: str) -> bool:
        """Whether a file belongs to this save: the names of all its files begin like this."""
        return file.startswith(f"{self.prefix}/{self.save_id}.")


class Part(msgspec.Struct, frozen=True, dict=True):
    """A file of pieces, stored without gaps; or the pieces of an earlier checkpoint's file that are used."""

    file: str
    rank: int
    """The rank that wrote the file."""
    size: int
    data_offset: int
    """Where the first piece begins."""
    tensors: list[int]
    """By piece, the number of its tensor."""
    boxes: list[BoxText]
    """The distinct boxes of partial pieces."""
    box_of: list[int]
    """By piece, the number of its box, -1 for a whole tensor; empty if all are whole."""
    digests: str
    """The xxh3-128 of each uncompressed chunk, in order, in base64."""
    header: str
    """The digest of the bytes before the first piece."""
    stored: list[int] | None = None
    """By chunk, its bytes in the file of a compressed part; negative if this chunk is stored uncompressed."""
    offsets: list[int] | msgspec.UnsetType = msgspec.UNSET
    """In a file of an earlier checkpoint: by piece, where it begins, in ascending order."""

    @property
    def is_referenced(self) -> bool:
        """Whether the file belongs to an earlier checkpoint."""
        return self.offsets is not msgspec.UNSET

    @cached_property
    def partial_boxes(self) -> dict[int, Box]:
        """By piece, its box, where that is not the whole tensor."""
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
    """Identifies this save among saves of the same prefix."""
    extra_files: dict[str, int] = {}
    """Files for other tools, with their sizes."""
    job: str = ""
    step: int | None = None
    epoch: int | None = None
    fence: ManifestFence | None = None
    custom: dict[str, Any] = {}
    chain: list[ChainLink] | msgspec.UnsetType = msgspec.UNSET
    """The earlier checkpoints whose files are used, oldest first; a full checkpoint has none."""

    @property
    def links(self) -> list[ChainLink]:
        """The earlier checkpoints whose files are used, oldest first."""
        return [] if self.chain is msgspec.UNSET else self.chain

    @cached_property
    def tensor_kinds(self) -> tuple[list[tuple[Shape, str]], list[int]]:
        """The distinct shapes and types of tensors, and by tensor the number of its own."""
        numbers: dict[tuple[Shape, str], int] = {}
        kinds = zip(self.tensors.shapes, self.tensors.dtypes, strict=True)
        kind_of = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        return list(numbers), kind_of

    @cached_property
    def own_parts(self) -> list[Part]:
        """The parts whose files belong to this checkpoint."""
        return [part for part in self.parts if not part.is_referenced]

    @cached_property
    def size_bytes(self) -> int:
        """The total size of its own files."""
        return sum(part.size for part in self.own_parts) + sum(self.extra_files.values())

    @property
    def path(self) -> str:
        """The manifest's file name."""
        return self.prefix + SUFFIX

    def tree(self, rank: int) -> Node:
        """The state of a rank."""
        return self.states.tree(rank)


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor in a part."""

    part: int
    tensor: int
    box: Box
    first_chunk: int
    """The number of its first chunk in the part."""
    lengths: list[int]
    """The uncompressed bytes of its chunks."""
    offset: int
    """Its offset after the part's first piece if nothing were compressed."""


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
    """The box of a piece, the lengths of its chunks and their sum."""
    itemsize = dtype_of(dtype).itemsize
    return box, chunk_lengths(box, grid_of(shape, itemsize), itemsize), box.volume * itemsize


def deduplicate_boxes(partial: Mapping[int, BoxText], pieces: int) -> tuple[list[BoxText], list[int]]:
    """The members `boxes` and `box_of` of a part; `partial` are its partial boxes by piece."""
    if not partial:
        return [], []
    numbers: dict[BoxText, int] = {}
    box_of = [_WHOLE] * pieces
    for place, box in partial.items():
        box_of[place] = numbers.setdefault(box, len(numbers))
    return list(numbers), box_of


def digests_of(part: Part) -> bytes:
    """All digests of a part, `DIGEST_BYTES` each."""
    return base64.b64decode(part.digests, validate=True)


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes with its checksum; refuses one above `MANIFEST_BYTES_MAX`."""
    body = msgspec.json.encode(manifest)[:-1]
    if len(body) >= MANIFEST_BYTES_MAX - len(_TAIL % (b"0" * 32)):
        raise invalid(
            f"the manifest of {manifest.prefix} has {len(body)} bytes; limit {MANIFEST_BYTES_MAX}",
            "use fewer arrays, or shorter keys",
        )
    return body + _TAIL % xxhash.xxh3_128_hexdigest(body).encode()


def decode(data: bytes, path: str) -> Manifest:
    """Decode and check a manifest; refuses an incomplete, corrupt or unknown one."""
    _check_digest(data, path)
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


class Ancestry(msgspec.Struct, frozen=True):
    """Which save a manifest describes, and which earlier ones it uses."""

    prefix: str
    save_id: str = ""
    chain: list[ChainLink] = []
    """Without those outside of the storage's folder."""


def decode_ancestry(data: bytes, path: str) -> Ancestry:
    """Decode only that of a manifest, which is fast; refuses a corrupt one."""
    _check_digest(data, path)
    _check_version(data, path)
    try:
        said = msgspec.json.decode(data, type=Ancestry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    seen = SeenNames.of(said.prefix, path)
    return Ancestry(
        seen.name(said.prefix),
        said.save_id,
        [ChainLink(seen.name(link.prefix), link.save_id) for link in said.chain if seen.has(link.prefix)],
    )


def _check_digest(data: bytes, path: str) -> None:
    """Refuse bytes that are not what was written."""
    tail = len(_TAIL % (b"0" * 32))
    body = data[:-tail]
    if len(data) <= tail or data[-tail:] != _TAIL % xxhash.xxh3_128_hexdigest(body).encode():
        raise corrupted(
            f"{path} is corrupt: its checksum differs",
            path,
            "use another checkpoint",
            code="checkpoint_manifest_corrupt",
        )


def _seen_from_elsewhere(manifest: Manifest, path: str) -> Manifest:
    """The manifest with names relative to a storage root above or below the one that it was written under."""
    seen = SeenNames.of(manifest.prefix, path)
    chain: list[ChainLink] | msgspec.UnsetType = msgspec.UNSET
    if manifest.links:
        chain = [ChainLink(seen.name(link.prefix), link.save_id) for link in manifest.links]
    return msgspec.structs.replace(
        manifest,
        prefix=seen.name(manifest.prefix),
        parts=[msgspec.structs.replace(part, file=seen.name(part.file)) for part in manifest.parts],
        extra_files={seen.name(file): size for file, size in manifest.extra_files.items()},
        chain=chain,
    )


class SeenNames(NamedTuple):
    """The names of a manifest, relative to another storage root than the one that it was written under."""

    path: str
    removed: str
    """The path from the manifest's root to this one, if this one lies below it."""
    added: str
    """The path from this root to the manifest's, if this one lies above it."""

    @classmethod
    def of(cls, prefix: str, path: str) -> SeenNames:
        """For a manifest that calls its checkpoint `prefix` and was read from `path`."""
        seen = check_prefix(path.removesuffix(SUFFIX).removesuffix(TOMBSTONE))
        if f"/{prefix}".endswith(f"/{seen}"):
            return cls(path, prefix.removesuffix(seen), "")
        if f"/{seen}".endswith(f"/{prefix}"):
            return cls(path, "", seen.removesuffix(prefix))
        raise _malformed(path, f"it is that of {prefix}")

    def has(self, name: str) -> bool:
        """Whether a name of the manifest lies below this root."""
        return name.startswith(self.removed)

    def name(self, name: str) -> str:
        """A name of the manifest, relative to this root."""
        if not self.has(name):
            raise CheckpointException(
                f"{self.path} uses {name}, which lies outside of the storage's folder",
                self.path,
                ExceptionType.LOAD_FAILED,
                code="checkpoint_parent_outside",
                fix="open the storage at a folder that contains both checkpoints",
            )
        return self.added + name.removeprefix(self.removed)


class _Version(msgspec.Struct):
    format: str = ""
    version: str = ""


def _check_version(data: bytes, path: str) -> None:
    try:
        version = msgspec.json.decode(data, type=_Version)
    except (msgspec.MsgspecError, RecursionError):
        raise _malformed(path, "it is not JSON") from None
    if version.format != FORMAT:
        raise _malformed(path, f"its format is not {FORMAT}")
    if version.version.split(".")[0] not in _MAJOR_VERSIONS:
        raise CheckpointException(
            f"{path} has version {version.version[:20]}; this version of forged reads {' and '.join(_MAJOR_VERSIONS)}",
            path,
            ExceptionType.INCOMPATIBLE_VERSION,
            fix="load it with the version of forged that saved it",
        )


def _check(manifest: Manifest) -> None:
    check_prefix(manifest.prefix)
    _require(1 <= manifest.world_size <= RANKS_MAX, "world_size")
    _require(0.0 <= manifest.created_at <= CREATED_AT_MAX, "created_at")
    _require(0 <= (manifest.step or 0) <= COUNT_MAX, "step")
    _require(0 <= (manifest.epoch or 0) <= COUNT_MAX, "epoch")
    sizes = _check_tensors(manifest)
    _check_chain(manifest)
    for file, size in manifest.extra_files.items():
        _check_file(manifest, file)
        _require(0 <= size <= SIZE_MAX, "extra_files")
    for number, part in enumerate(manifest.parts):
        _check_part(manifest, part, sizes)
        if part.stored is not None:
            lengths = chain.from_iterable(piece.lengths for piece in pieces(manifest, number))
            _require(all(map(_is_stored, part.stored, lengths)), "parts.stored")
    files = [part.file for part in manifest.own_parts] + [*manifest.extra_files]
    _require(len(set(files)) == len(files), "parts: a duplicate file")
    _check_states(manifest)


def _check_chain(manifest: Manifest) -> None:
    """Check that the chain consists of the checkpoints that the referenced files belong to."""
    links = manifest.links
    for link in links:
        check_prefix(link.prefix)
        _require(bool(link.save_id), "chain: a save_id is missing")
    prefixes = {manifest.prefix, *(link.prefix for link in links)}
    _require(len(prefixes) == len(links) + 1, "chain: a duplicate prefix")
    is_incremental = manifest.version.split(".")[0] == INCREMENTAL_VERSION.split(".")[0]
    _require(is_incremental == bool(links), "chain: it does not fit the version")
    used = set()
    for part in manifest.parts:
        if part.is_referenced:
            its = next((link for link in links if link.has_file(part.file)), None)
            _require(its is not None, f"file {part.file[:80]!r} is of no checkpoint of the chain")
            used.add(its)
    _require(len(used) == len(links), "chain: an unused checkpoint")


def _check_offsets(part: Part, offsets: list[int], sizes: Sequence[tuple[int, int]]) -> None:
    """Check that the pieces of a referenced file are in ascending order and lie in the file.

    `sizes`: by piece, its bytes in memory and its number of chunks.
    """
    _require(len(offsets) == len(part.tensors), "parts.offsets: the number of entries is not the number of pieces")
    lengths = [length for length, _ in sizes]
    if part.stored is not None:
        edges = accumulate((count for _, count in sizes), initial=0)
        lengths = [sum(map(abs, part.stored[first:end])) for first, end in pairwise(edges)]
    ends = [part.data_offset, *map(int.__add__, offsets, lengths)]
    _require(all(map(int.__le__, ends, [*offsets, part.size])), "parts.offsets")


def _check_states(manifest: Manifest) -> None:
    states = manifest.states
    _require(
        len(states.frame_of_rank) == len(states.own) == manifest.world_size,
        "states: the number of entries is not the number of ranks",
    )
    _require(_are_all(states.frame_of_rank, len(states.frames)), "states.frame_of_rank")
    places = [_check_frame(frame, manifest.tensors) for frame in states.frames]
    owner = manifest.tensors.ranks.get
    for rank, own in enumerate(states.own):
        placeholders = places[states.frame_of_rank[rank]]
        _require(
            len(own) == len(placeholders),
            "states.own: the number of entries is not the number of placeholders of the frame",
        )
        for node, place in zip(own, placeholders, strict=True):
            is_its = (owner(number) == rank for number in tensor_numbers(node, place.depth + 1))
            _require(all(is_its), "states.own: a tensor of another rank")


def _check_frame(frame: Node, tensors: Tensors) -> list[OpenPlace]:
    numbers, places = frame_content(frame)
    _require(_all_within(numbers, len(tensors.names)), "states.frames: an unknown tensor")
    _require(tensors.ranks.keys().isdisjoint(numbers), "states.frames: a per-rank tensor")
    _require(
        [place.number for place in places] == list(range(len(places))),
        "states.frames: placeholders are not numbered from 0 in order",
    )
    return places


class _Sizes(NamedTuple):
    """Sizes of the tensors."""

    kinds: list[_Kind]
    kind_of: list[int]
    """By tensor, the number of its kind."""


class _Kind(NamedTuple):
    """Tensors of the same shape and type."""

    shape: Shape
    itemsize: int
    grid: Grid
    of_whole: tuple[int, int]
    """The bytes and the number of chunks of a whole tensor."""


def _check_tensors(manifest: Manifest) -> _Sizes:
    tensors = manifest.tensors
    count = len(tensors.names)
    _require(len(tensors.dtypes) == len(tensors.shapes) == count, "tensors: columns of different lengths")
    _require(max(map(len, tensors.names), default=0) <= NAME_CHARS_MAX, "tensors.names")
    _require(_all_within([*tensors.ranks], count), "tensors.ranks")
    _require(_all_within([*tensors.ranks.values()], manifest.world_size), "tensors.ranks")
    _check_splits(tensors, manifest.world_size)
    owners = map(tensors.ranks.get, range(count))
    _require(len(set(zip(tensors.names, owners, strict=True))) == count, "tensors: a duplicate name")
    kinds, kind_of = manifest.tensor_kinds
    return _Sizes([_kind_of(*kind) for kind in kinds], kind_of)


def _check_splits(tensors: Tensors, world_size: int) -> None:
    _require(_all_within([*tensors.split_of], len(tensors.names)), "tensors.split_of")
    _require(_are_all(tensors.split_of.values(), len(tensors.splits)), "tensors.split_of")
    for split in tensors.splits:
        _require(bool(split) and _all_within([*split], world_size), "tensors.splits")
    bounds = [_bounds_of(split) for split in tensors.splits]
    for tensor, number in tensors.split_of.items():
        _check_box(bounds[number], tensors.shapes[tensor], "tensors.splits")


def _bounds_of(split: Mapping[int, BoxText]) -> Box:
    """The smallest box at the origin that covers all boxes of a division."""
    axes = {len(side) for box in split.values() for side in box}
    _require(len(axes) == 1 and min(chain((0,), *chain(*split.values()))) >= 0, "tensors.splits")
    ends = [map(int.__add__, *box) for box in split.values()]
    return whole(tuple(map(max, zip(*ends, strict=True))))


def _check_box(box: Box, shape: Shape, what: str) -> None:
    _require(len(box.offset) == len(box.shape) == len(shape), what)
    for start, length, size in zip(box.offset, box.shape, shape, strict=True):
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(f"{what}: a box outside its tensor")


def _kind_of(shape: Shape, dtype: str) -> _Kind:
    itemsize = dtype_of(dtype).itemsize
    _require(len(shape) <= AXES_MAX and min(shape, default=0) >= 0, "tensors.shapes")
    _require(math.prod(max(1, size) for size in shape) * max(1, itemsize) <= SIZE_MAX, "tensors.shapes")
    grid = grid_of(shape, itemsize)
    return _Kind(shape, itemsize, grid, (math.prod(shape) * itemsize, chunk_count(whole(shape), grid)))


def _check_part(manifest: Manifest, part: Part, sizes: _Sizes) -> None:
    if part.is_referenced:
        check_prefix(part.file)
        _require(0 <= part.rank < RANKS_MAX, "parts.rank")
    else:
        _check_file(manifest, part.file)
        _require(0 <= part.rank < manifest.world_size, "parts.rank")
    _require(0 <= part.data_offset <= min(part.size, HEADER_BYTES_MAX + 8) and part.size <= SIZE_MAX, "parts.size")
    _require(_all_within(part.tensors, len(manifest.tensors.names)), "parts.tensors")
    _require(
        len(part.box_of) in {0, len(part.tensors)}, "parts.box_of: the number of entries is not the number of pieces"
    )
    _require(_are_all({*part.box_of} - {_WHOLE}, len(part.boxes)), "parts.box_of")
    kinds = map(sizes.kind_of.__getitem__, part.tensors)
    placed = list(zip(part.box_of or repeat(_WHOLE), kinds, strict=False))
    sizes_of = {
        (box, kind): sizes.kinds[kind].of_whole if box == _WHOLE else _sizes_in(part.boxes[box], sizes.kinds[kind])
        for box, kind in set(placed)
    }
    of_pieces = list(map(sizes_of.__getitem__, placed))
    _check_chunks(part, sum(map(itemgetter(0), of_pieces)), sum(map(itemgetter(1), of_pieces)))
    if part.offsets is not msgspec.UNSET:
        _check_offsets(part, part.offsets, of_pieces)


def _sizes_in(box: BoxText, kind: _Kind) -> tuple[int, int]:
    """The bytes and the number of chunks of a box of a tensor."""
    checked = Box(*box)
    _check_box(checked, kind.shape, "parts.boxes")
    return checked.volume * kind.itemsize, chunk_count(checked, kind.grid)


def _check_chunks(part: Part, size: int, chunks: int) -> None:
    """Check the chunk lists of a part whose pieces have `size` bytes and `chunks` chunks."""
    _require(
        len(digests_of(part)) == chunks * DIGEST_BYTES,
        "parts.digests: the number of digests is not the number of chunks",
    )
    _require(len(base64.b64decode(part.header, validate=True)) == DIGEST_BYTES, "parts.header")
    if part.stored is not None:
        _require(len(part.stored) == chunks, "parts.stored")
        size = sum(map(abs, part.stored))
    if part.is_referenced:
        return
    _require(part.data_offset + size == part.size, "parts.size: it is not the sum of the sizes of the pieces")


def _is_stored(stored: int, length: int) -> bool:
    """Whether a chunk of that length can take so many bytes in the file."""
    return 0 < stored < length <= CHUNK_BYTES_MAX or stored == -length


def _all_within(numbers: Sequence[int], count: int) -> bool:
    """Whether all numbers are valid indexes of `count` things."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < count)


def _are_all(numbers: Iterable[int], count: int) -> bool:
    """Whether the numbers are exactly those of `count` things."""
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
        f"{path} is not a valid manifest: {why[:200]}",
        path,
        "use another checkpoint",
        code="checkpoint_manifest_malformed",
    )
