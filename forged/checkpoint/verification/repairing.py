"""Repair in place: corrupt chunks of a checkpoint's files are replaced by healthy copies of the same bytes.

Invariants:
- A file is replaced as a whole, by one with the same bytes everywhere else, so that its manifest and the checkpoints
  that use it stay right, and a crash leaves the old file or the new one.
- Without a healthy copy of each corrupt chunk of a file, it is not changed.
- Chunks of compressed files are not repaired: their stored bytes cannot be told from their content.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import xxhash

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading.fetching import corrupt_chunk
from forged.checkpoint.loading.manifest_index import Index, PartLayout
from forged.checkpoint.loading.repair import CopyRepairer
from forged.checkpoint.model import RepairedChunk
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Reader, Storage, bounded
from forged.checkpoint.storage import listing

CORRUPT_BYTES_MAX = 1 << 30
"""So many corrupt bytes of one file are held in memory at once."""


def repair(
    storage: Storage, prefix: str, token: CancelToken, draw: Callable[[int], bytes] = os.urandom
) -> list[RepairedChunk]:
    """Replace the corrupt chunks of a checkpoint's files; raises the error of the first one without a healthy copy."""
    storage = bounded(storage, token)
    manifest = listing.read_manifest(storage, prefix)
    index = Index(manifest)
    repairer = CopyRepairer(storage, index, token)
    repaired: list[RepairedChunk] = []
    for number in range(len(manifest.parts)):
        token.check()
        repaired += _repair_part(storage, index, number, repairer, token, draw)
    return repaired


def _repair_part(
    storage: Storage,
    index: Index,
    number: int,
    repairer: CopyRepairer,
    token: CancelToken,
    draw: Callable[[int], bytes],
) -> list[RepairedChunk]:
    layout, manifest = index.layout(number), index.manifest
    if layout.part.stored is not None:
        return []
    with storage.open(layout.part.file) as reader:
        bad = dict(_corrupt_chunks(index, layout, reader, token))
        if not bad:
            return []
        repaired = []
        patches: dict[int, bytes] = {}
        for chunk, cause in bad.items():
            room = bytearray(layout.file_offsets[chunk + 1] - layout.file_offsets[chunk])
            repaired.append(repairer.repair(layout, chunk, memoryview(room), cause))
            patches[layout.file_offsets[chunk]] = bytes(room)
        name = _new_name(manifest, draw)
        storage.write(name, _Patched(reader, patches), token)
    try:
        storage.sync_names([name])
        storage.move(name, layout.part.file)
    except BaseException:
        storage.delete([name])
        raise
    return repaired


def _corrupt_chunks(
    index: Index, layout: PartLayout, reader: Reader, token: CancelToken
) -> Iterator[tuple[int, CheckpointException]]:
    """The chunks whose bytes are wrong, with their errors; refuses a file that cannot be repaired chunk by chunk."""
    file, size = layout.part.file, layout.part.size
    if reader.size != size:
        text = f"{file} has {reader.size} bytes, expected {size}"
        raise corrupted(text, file, "use another checkpoint", code="checkpoint_file_size")
    left = CORRUPT_BYTES_MAX
    for first, end in layout.runs():
        for chunk in range(first, end):
            token.check()
            data = bytearray(layout.file_offsets[chunk + 1] - layout.file_offsets[chunk])
            reader.read_into(layout.file_offsets[chunk], memoryview(data))
            if xxhash.xxh3_128_digest(data) != layout.digest(chunk):
                error = corrupt_chunk(index, layout, chunk)
                left -= len(data)
                if left < 0:
                    raise error
                yield chunk, error


def _new_name(manifest: Manifest, draw: Callable[[int], bytes]) -> str:
    """A name that the deletion of the checkpoint, and that of left files, know."""
    own = draw(listing.SAVE_ID_BYTES).hex()
    return f"{manifest.prefix}/{manifest.save_id}.{own}-00000-of-00001.safetensors"


class _Patched:
    """A file's bytes with some ranges replaced; a `ports.ByteSource`."""

    def __init__(self, reader: Reader, patches: dict[int, bytes]) -> None:
        self._reader = reader
        self._patches = patches
        self.size = reader.size

    def block(self, offset: int, room: memoryview) -> memoryview:
        """The block at `offset`."""
        view = room[: min(BLOCK_BYTES, self.size - offset)]
        self._reader.read_into(offset, view)
        for start, data in self._patches.items():
            low, high = max(start, offset), min(start + len(data), offset + len(view))
            if low < high:
                view[low - offset : high - offset] = data[low - start : high - start]
        return view
