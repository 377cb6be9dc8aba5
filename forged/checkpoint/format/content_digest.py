"""The digest of a checkpoint's content: of what a load returns, whichever files it lies in.

Invariants:
- Compaction, a move and a rename of a checkpoint keep the digest.
- Only the manifest is read; a validation compares the bytes with the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from forged.checkpoint.format.boxes import chunks, grid_of
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import DIGEST_BYTES, Manifest, digests_of, pieces

SCHEME = "forged:"
"""Stands before the digest in the checksum of a model."""


def content_digest(manifest: Manifest) -> str:
    """SHA-256, in hexadecimal digits, over the tensors with the checksums of their chunks, and the other values."""
    tensors = manifest.tensors
    digest = hashlib.sha256(msgspec.json.encode(manifest.states))
    columns = zip(tensors.names, tensors.dtypes, tensors.shapes, _chunks_by_tensor(manifest), strict=True)
    for number, (name, dtype, shape, its_chunks) in enumerate(columns):
        digest.update(msgspec.json.encode([name, dtype, shape, tensors.ranks.get(number)]))
        for line in sorted(its_chunks):
            digest.update(line)
    return digest.hexdigest()


def tensor_bytes(manifest: Manifest) -> int:
    """The bytes of all tensors, without compression and each counted once."""
    tensors = manifest.tensors
    total = 0
    for shape, dtype in zip(tensors.shapes, tensors.dtypes, strict=True):
        size = dtype_of(dtype).itemsize
        for length in shape:
            size *= length
        total += size
    return total


def _chunks_by_tensor(manifest: Manifest) -> list[set[bytes]]:
    """By tensor, its chunks with their checksums; a chunk that several ranks have written counts once."""
    found: list[set[bytes]] = [set() for _ in manifest.tensors.names]
    for number in range(len(manifest.parts)):
        for tensor, line in _chunks_of_part(manifest, number):
            found[tensor].add(line)
    return found


def _chunks_of_part(manifest: Manifest, number: int) -> Iterator[tuple[int, bytes]]:
    tensors, digests = manifest.tensors, digests_of(manifest.parts[number])
    for piece in pieces(manifest, number):
        grid = grid_of(tensors.shapes[piece.tensor], dtype_of(tensors.dtypes[piece.tensor]).itemsize)
        for chunk, box in enumerate(chunks(piece.box, grid), piece.first_chunk):
            digest = digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            yield piece.tensor, msgspec.json.encode([box.offset, box.shape, digest.hex()])
