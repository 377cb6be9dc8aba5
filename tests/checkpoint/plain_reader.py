"""A minimal reader of checkpoints that shares little code with the engine.

It compares every chunk with its checksum, as docs/checkpoint-format.md specifies.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import xxhash

from forged.checkpoint.format.compression import decompress_into
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Manifest, Part, Piece, digests_of, pieces
from forged.checkpoint.format.tree import unflatten
from forged.checkpoint.ports import Storage
from forged.checkpoint.storage.listing import read_manifest
from tests.checkpoint.sameness import require_same

Array = np.ndarray[Any, Any]


def state_of(storage: Storage, prefix: str, rank: int = 0) -> Any:
    """The state that a rank saved, with whole arrays in place of its parts."""
    manifest = read_manifest(storage, prefix)
    arrays = arrays_in(storage, manifest)
    return unflatten(manifest.tree(rank), arrays.__getitem__)


def arrays_in(storage: Storage, manifest: Manifest) -> list[Array]:
    """All tensors, in the manifest's order; every element was found in some piece."""
    tensors = manifest.tensors
    arrays = [np.empty(shape, dtype_of(dtype)) for shape, dtype in zip(tensors.shapes, tensors.dtypes, strict=True)]
    found = [np.zeros(shape, bool) for shape in tensors.shapes]
    for number, part in enumerate(manifest.parts):
        data = storage.read(part.file, 1 << 40)
        assert len(data) == part.size
        assert xxhash.xxh3_128_digest(data[: part.data_offset]) == base64.b64decode(part.header)
        at = part.data_offset
        for piece in pieces(manifest, number):
            at, raw = _bytes_of(piece, part, data, at, arrays[piece.tensor].itemsize)
            where = tuple(slice(o, o + s) for o, s in zip(piece.box.offset, piece.box.shape, strict=True))
            if raw:
                arrays[piece.tensor][where] = np.frombuffer(raw, arrays[piece.tensor].dtype).reshape(piece.box.shape)
            found[piece.tensor][where] = True
        assert at == part.size
    assert all(one.all() for one in found)
    return arrays


def _bytes_of(piece: Piece, part: Part, data: bytes, at: int, itemsize: int) -> tuple[int, bytes]:
    """The offset of the next piece, and the bytes of this one."""
    digests, chunks = digests_of(part), []
    for chunk, length in enumerate(piece.lengths, piece.first_chunk):
        stored = length if part.stored is None else part.stored[chunk]
        raw = bytearray(data[at : at + abs(stored)])
        if part.stored is not None and stored > 0:
            raw = bytearray(length)
            decompress_into(memoryview(data)[at : at + stored], itemsize, memoryview(raw))
        assert len(raw) == length
        assert xxhash.xxh3_128_digest(raw) == digests[16 * chunk : 16 * chunk + 16]
        chunks.append(bytes(raw))
        at += abs(stored)
    return at, b"".join(chunks)


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal bit for bit, in values and types."""
    try:
        require_same(found, expected)
    except AssertionError:
        return False
    return True
