"""One rank's part of a save: described, laid out, written.

Law: what is written is what was described, and the receipt says what was written. A part that does not come to its end
leaves no file.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import xxhash

from forged.checkpoint.crew import THREADS, work_off
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.image import Image, Imaged, Layout, cut_out, lay_out
from forged.checkpoint.manifest import DIGEST_BYTES, Part
from forged.checkpoint.model import CompressionLevel
from forged.checkpoint.packing import Thrift, pack
from forged.checkpoint.plan import Plan, Share
from forged.checkpoint.ports import Halt, Source, Storage
from forged.checkpoint.staging import Staged
from forged.checkpoint.tree import Leaf

FILE_METADATA = {"format": "np", "by": "forged"}
"""What readers of safetensors files look for."""


def image_of(plan: Plan, rank: int, leaves: Sequence[Leaf], layout: Layout | None = None) -> Image:
    """What a rank writes, as the file that it will be."""
    share = plan.shares[rank]
    layout = layout or lay_out(plan.tensors, share, FILE_METADATA)
    if len(share.tensors) == len(leaves) and not share.boxes and plan.numbers[rank] == share.tensors:
        return Image(layout, [leaf.array for leaf in leaves])
    own = dict(zip(plan.numbers[rank], leaves, strict=True))
    arrays = []
    for place, number in enumerate(share.tensors):
        leaf = own[number]
        arrays.append(cut_out(leaf.array, leaf.box, share.box(place, leaf.global_shape)))
    return Image(layout, arrays)


def write(storage: Storage, file: str, rank: int, share: Share, image: Imaged, source: Source, halt: Halt) -> Part:
    """Write a part as it lies in memory; `source` is the image, or what was staged of it."""
    require_room(storage, file, source.size)
    storage.write(file, source, halt)
    storage.settle([file])
    return part_of(file, rank, share, image)


def part_of(file: str, rank: int, share: Share, image: Imaged) -> Part:
    """What the manifest says of a part."""
    header = image.layout.header
    return Part(
        file=file,
        rank=rank,
        size=image.size,
        data_offset=len(header),
        tensors=share.tensors,
        boxes=share.boxes,
        digests=base64.b64encode(image.digests).decode(),
        header=base64.b64encode(xxhash.xxh3_128_digest(header)).decode(),
    )


def write_packed(storage: Storage, file: str, rank: int, share: Share, packed: Packed, halt: Halt) -> Part:
    """Write a part compressed: chunk behind chunk, without a header."""
    require_room(storage, file, packed.size)
    storage.write(file, packed, halt)
    storage.settle([file])
    return Part(
        file=file,
        rank=rank,
        size=packed.size,
        data_offset=0,
        tensors=share.tensors,
        boxes=share.boxes,
        digests=base64.b64encode(packed.digests).decode(),
        header=base64.b64encode(xxhash.xxh3_128_digest(b"")).decode(),
        stored=packed.stored,
    )


class Packed:
    """A part compressed, in memory; a `ports.Source`."""

    def __init__(self, image: Imaged, staged: Staged | None, level: CompressionLevel, halt: Halt) -> None:
        self.digests = bytearray(image.digests)
        self.stored = [0] * image.layout.chunks
        self._level = level
        self._image = image
        self._staged = None if staged is None else staged.view()
        self._chunks: list[bytes | memoryview] = [b""] * image.layout.chunks
        work_off(self._pack, range(len(image.layout.boxes)), halt, THREADS)
        self._starts = list(accumulate(map(len, self._chunks), initial=0))

    @property
    def size(self) -> int:
        return self._starts[-1]

    def block(self, offset: int, room: memoryview) -> memoryview:
        """Copy a block."""
        number, at = bisect_right(self._starts, offset) - 1, offset
        end = min(offset + len(room), self.size)
        while at < end:
            start, chunk = self._starts[number], self._chunks[number]
            stop = min(end, start + len(chunk))
            room[at - offset : stop - offset] = chunk[at - start : stop - start]
            at, number = stop, number + 1
        return room[: end - offset]

    def _pack(self, place: int) -> None:
        """Compress the chunks of a piece, as long as that pays."""
        layout = self._image.layout
        offset, thrift = 0, Thrift()
        for number, length in enumerate(layout.lengths_of(place), layout.first_chunks[place]):
            raw = self._raw(place, offset, length)
            small = pack(raw, layout.itemsizes[place], self._level) if thrift.tries() else None
            thrift.tell(small is not None)
            self._chunks[number] = bytes(raw) if small is None else small
            self.stored[number] = -length if small is None else len(small)
            self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(raw)
            offset += length

    def _raw(self, place: int, offset: int, length: int) -> memoryview:
        if self._staged is None:
            return self._image.chunk(place, offset, length).data
        start = self._image.layout.starts[place] + offset
        return self._staged[start : start + length]


def require_room(storage: Storage, file: str, size: int) -> None:
    """Refuse to begin what cannot be ended."""
    free = storage.free_bytes()
    if free is not None and free < size:
        raise CheckpointException(
            f"{file} needs {size} bytes, and {storage.url} has room for {free}",
            file,
            ExceptionType.STORAGE_ERROR,
            code="checkpoint_disk_full",
            fix="delete checkpoints that are not needed (`forgectl ckpt rm`), or give it more room",
        )
