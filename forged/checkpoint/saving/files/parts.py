"""Writes one rank's part of a checkpoint, uncompressed or compressed.

Invariants:
- The returned `Part` describes exactly the bytes of the file.
- A part that could not be written leaves no file.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, pairwise

import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.compression import CompressionBackoff, compress
from forged.checkpoint.format.manifest import DIGEST_BYTES, Part, deduplicate_boxes
from forged.checkpoint.format.tree import Leaf
from forged.checkpoint.model import CompressionLevel
from forged.checkpoint.ports import ByteSource, CancelToken, Storage
from forged.checkpoint.saving.files.image import ArrayImage, Layout, PartImage, layout_of, slice_of
from forged.checkpoint.saving.files.plan import SavePlan, Share
from forged.checkpoint.saving.files.staging import StagedPart
from forged.checkpoint.thread_pool import THREADS, run_all

FILE_METADATA = {"format": "np", "by": "forged"}
"""Readers of safetensors files expect `format`."""
RUN_BYTES = 64 << 20
"""One thread compresses this much of a piece, and learns meanwhile whether the piece gets smaller."""


def image_of(plan: SavePlan, rank: int, leaves: Sequence[Leaf], layout: Layout | None = None) -> ArrayImage:
    """A rank's share as the image of its file."""
    share = plan.shares[rank]
    layout = layout or layout_of(plan.tensors, share, FILE_METADATA)
    if len(share.tensors) == len(leaves) and not share.boxes and plan.numbers[rank] == share.tensors:
        return ArrayImage(layout, [leaf.array for leaf in leaves])
    own = dict(zip(plan.numbers[rank], leaves, strict=True))
    arrays = []
    for place, number in enumerate(share.tensors):
        leaf = own[number]
        arrays.append(slice_of(leaf.array, leaf.box, share.box(place, leaf.global_shape)))
    return ArrayImage(layout, arrays)


def write_uncompressed(
    storage: Storage, file: str, rank: int, share: Share, image: PartImage, source: ByteSource, token: CancelToken
) -> Part:
    """Write a part as it is in memory; `source` is the image or its staged copy."""
    write_durably(storage, file, source, token)
    return part_of(file, rank, share, image)


def part_of(file: str, rank: int, share: Share, image: PartImage) -> Part:
    """The manifest's entry for a part."""
    header = image.layout.header
    boxes, box_of = deduplicate_boxes(share.boxes, len(share.tensors))
    return Part(
        file=file,
        rank=rank,
        size=image.size,
        data_offset=len(header),
        tensors=share.tensors,
        boxes=boxes,
        box_of=box_of,
        digests=base64.b64encode(image.digests).decode(),
        header=base64.b64encode(xxhash.xxh3_128_digest(header)).decode(),
    )


def empty_part(file: str, rank: int) -> Part:
    """The report of a rank without anything to write. There is no such file, and the manifest does not name it."""
    return Part(file, rank, 0, 0, [], [], [], "", "")


def write_compressed(
    storage: Storage, file: str, rank: int, share: Share, packed: CompressedPart, token: CancelToken
) -> Part:
    """Write a part as a sequence of compressed chunks without a header."""
    write_durably(storage, file, packed, token)
    boxes, box_of = deduplicate_boxes(share.boxes, len(share.tensors))
    return Part(
        file=file,
        rank=rank,
        size=packed.size,
        data_offset=0,
        tensors=share.tensors,
        boxes=boxes,
        box_of=box_of,
        digests=base64.b64encode(packed.digests).decode(),
        header=base64.b64encode(xxhash.xxh3_128_digest(b"")).decode(),
        stored=packed.stored,
    )


class CompressedPart:
    """A compressed part; a `ports.Source`.

    A storage needs the size of a file before its bytes. So all chunks are compressed first, and kept; or, without
    `keeps`, compressed again when they are written.
    """

    def __init__(
        self,
        image: PartImage,
        staged: StagedPart | None,
        level: CompressionLevel,
        token: CancelToken,
        *,
        keeps: bool = True,
    ) -> None:
        layout = image.layout
        self.digests = bytearray(DIGEST_BYTES * layout.chunks)
        self.stored = [0] * layout.chunks
        self._level = level
        self._image = image
        self._staged = None if staged is None else staged.view()
        self._token = token
        self._keeps = keeps
        self._lengths = list(chain.from_iterable(map(layout.lengths_of, range(len(layout.boxes)))))
        self._offsets = list(accumulate(self._lengths, initial=0))
        self._chunks: dict[int, bytes | memoryview] = {}
        """All chunks; without `keeps` those that cross a block's end, until the next block."""
        run_all(self._pack, self._runs(), token, THREADS)
        self._starts = list(accumulate(map(abs, self.stored), initial=0))

    @property
    def size(self) -> int:
        return self._starts[-1]

    def block(self, offset: int, room: memoryview) -> memoryview:
        number, at = bisect_right(self._starts, offset) - 1, offset
        end = min(offset + len(room), self.size)
        while at < end:
            start, chunk = self._starts[number], self._chunk(number)
            stop = min(end, start + len(chunk))
            room[at - offset : stop - offset] = chunk[at - start : stop - start]
            if stop < start + len(chunk):
                self._chunks[number] = chunk
            at, number = stop, number + 1
        return room[: end - offset]

    def _runs(self) -> Iterator[range]:
        """The chunks in runs for one thread each. A run belongs to one piece."""
        for first, end in pairwise(self._image.layout.first_chunks):
            while first < end:
                stop = min(end, max(first + 1, bisect_right(self._offsets, self._offsets[first] + RUN_BYTES) - 1))
                yield range(first, stop)
                first = stop

    def _pack(self, run: range) -> None:
        """Compress some chunks of a piece; skip chunks after several that did not get smaller."""
        backoff = CompressionBackoff()
        for number in run:
            self._token.check()
            raw = self._raw(number)
            small = compress(raw, self._itemsize(number), self._level) if backoff.should_try() else None
            backoff.record(small is not None)
            if self._keeps:
                self._chunks[number] = bytes(raw) if small is None else small
            self.stored[number] = -len(raw) if small is None else len(small)
            self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(raw)

    def _chunk(self, number: int) -> bytes | memoryview:
        """A chunk's bytes in the file."""
        if self._keeps:
            return self._chunks[number]
        found = self._chunks.pop(number, None)
        if found is not None:
            return found
        raw = self._raw(number)
        if self.stored[number] < 0:
            return raw
        small = compress(raw, self._itemsize(number), self._level)
        if small is None or len(small) != self.stored[number]:
            raise CheckpointException(
                "arrays were changed while they were written",
                type=ExceptionType.SAVE_FAILED,
                code="checkpoint_state_changed",
                fix="do not write to the arrays until the save is staged",
            )
        return small

    def _itemsize(self, number: int) -> int:
        return self._image.layout.itemsizes[self._place(number)]

    def _place(self, number: int) -> int:
        """The piece of a chunk."""
        return bisect_right(self._image.layout.first_chunks, number) - 1

    def _raw(self, number: int) -> memoryview:
        """A chunk's bytes in memory."""
        layout, place = self._image.layout, self._place(number)
        offset, length = self._offsets[number] - self._offsets[layout.first_chunks[place]], self._lengths[number]
        if self._staged is None:
            return self._image.chunk(place, offset, length).data
        start = layout.starts[place] + offset
        return self._staged[start : start + length]


def write_durably(storage: Storage, file: str, source: ByteSource, token: CancelToken) -> None:
    """Write a file with durable bytes and a durable name, or leave none."""
    require_free_space(storage, file, source.size)
    storage.write(file, source, token)
    try:
        storage.sync_names([file])
    except BaseException:
        with suppress(CheckpointException):
            storage.delete([file])
        raise


def require_free_space(storage: Storage, file: str, size: int) -> None:
    """Refuse a file that the free space cannot hold."""
    free = storage.free_bytes()
    if free is not None and free < size:
        raise CheckpointException(
            f"{file} needs {size} bytes; {storage.url} has {free} bytes free",
            file,
            ExceptionType.STORAGE_ERROR,
            code="checkpoint_disk_full",
            fix="delete checkpoints (`forgectl ckpt rm`), or enlarge the storage",
        )
