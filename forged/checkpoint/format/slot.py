"""The format of a slot: memory of a host that holds one rank's part of a save, and outlives the rank's process.

A slot is a header page, then the part as its file has it, then the frame (what a manifest needs to name the part) and
the digests of all chunks of the part.

Invariants:
- The header is cleared before anything behind it changes, and written when all of that is in place. So wherever its
  writer dies, a slot with a valid header is whole, and any other one is not taken for whole.
- The header's digest covers the header, which holds the digest of frame and digests, which hold those of the part.
- A reader relies on nothing that it has not verified: the writer may be hostile, or may write at the same time.
"""

from __future__ import annotations

import base64
import re
import struct
from enum import StrEnum
from typing import NamedTuple

import msgspec
import xxhash

from forged.checkpoint.format.manifest import DIGEST_BYTES, MANIFEST_BYTES_MAX, RANKS_MAX, SIZE_MAX, Part
from forged.checkpoint.model import COUNT_MAX

PAGE_BYTES = 4096
PART_OFFSET = PAGE_BYTES
"""The part begins at a page, for direct I/O."""
MAGIC = b"FORGSLOT"
VERSION = 1
NO_NUMBER = -1
"""Stands for a step or an epoch that the save has not."""
CONTENT_BYTES_MAX = MANIFEST_BYTES_MAX
"""Of frame and digests of all slots of a save, which take more bytes in the manifest."""
_HEADER = struct.Struct("<8sIIIIQQQQqqQ16s16s")
HEADER_BYTES = _HEADER.size + DIGEST_BYTES
_SAVE_ID = re.compile(r"[0-9a-f]{8}")


class SlotState(StrEnum):
    """What a slot's header says."""

    WHOLE = "whole"
    EMPTY = "empty"
    """Nothing was staged yet, or a copy has begun and not ended."""
    TORN = "torn"
    """The header was being written or cleared, or was never one."""


class SlotHeader(NamedTuple):
    """What a whole slot holds."""

    sequence: int
    """Counts the copies of its writer: the larger one is the newer one."""
    save_id: str
    rank: int
    world_size: int
    step: int | None
    epoch: int | None
    generation: int
    part_bytes: int
    frame_bytes: int
    chunks: int
    content_digest: bytes
    """Of frame and digests."""

    @property
    def frame_offset(self) -> int:
        return PART_OFFSET + self.part_bytes

    @property
    def content_bytes(self) -> int:
        """The size of frame and digests."""
        return self.frame_bytes + self.chunks * DIGEST_BYTES

    @property
    def size(self) -> int:
        """The bytes of the slot that are used."""
        return slot_bytes(self.part_bytes, self.content_bytes)


class SlotFrame(msgspec.Struct, frozen=True, array_like=True):
    """What a manifest needs to name the part; the digests of the part's chunks follow it."""

    prefix: str
    part: Part
    """Without its chunks' digests."""
    manifest: bytes
    """At the root: the manifest without parts; empty at the other ranks."""


def slot_bytes(part_bytes: int, content_bytes: int) -> int:
    """The size of a slot for a part of this size."""
    return PART_OFFSET + part_bytes + content_bytes


def encode_frame(frame: SlotFrame) -> bytes:
    return msgspec.msgpack.encode(frame)


def content_digest(content: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(content)


def encode_header(header: SlotHeader) -> bytes:
    """The header with its digest."""
    body = _HEADER.pack(
        MAGIC,
        VERSION,
        header.rank,
        header.world_size,
        0,
        header.sequence,
        header.part_bytes,
        header.frame_bytes,
        header.chunks,
        NO_NUMBER if header.step is None else header.step,
        NO_NUMBER if header.epoch is None else header.epoch,
        header.generation,
        header.save_id.encode(),
        header.content_digest,
    )
    return body + xxhash.xxh3_128_digest(body)


def read_header(data: bytes, size: int) -> SlotHeader | SlotState:
    """The header of a whole slot of `size` bytes, from its first `HEADER_BYTES`; else what the slot is instead."""
    if len(data) < HEADER_BYTES:
        return SlotState.TORN
    body, digest = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES]
    if not any(data[:HEADER_BYTES]):
        return SlotState.EMPTY
    if xxhash.xxh3_128_digest(body) != digest:
        return SlotState.TORN
    magic, version, rank, world_size, _, sequence, part, frame, chunks, step, epoch, generation, save_id, content = (
        _HEADER.unpack(body)
    )
    try:
        name = save_id.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        return SlotState.TORN
    header = SlotHeader(
        sequence,
        name,
        rank,
        world_size,
        None if step == NO_NUMBER else step,
        None if epoch == NO_NUMBER else epoch,
        generation,
        part,
        frame,
        chunks,
        content,
    )
    is_known = magic == MAGIC and version == VERSION and _SAVE_ID.fullmatch(name) is not None
    return header if is_known and _is_consistent(header, size) else SlotState.TORN


def _is_consistent(header: SlotHeader, size: int) -> bool:
    """Whether the numbers fit each other and the slot. A hostile writer can give a wrong header a right digest."""
    counts = (header.step, header.epoch)
    return (
        0 <= header.rank < header.world_size <= RANKS_MAX
        and all(count is None or 0 <= count <= COUNT_MAX for count in counts)
        and header.part_bytes <= SIZE_MAX
        and header.content_bytes <= CONTENT_BYTES_MAX
        and header.size <= size
    )


def decode_content(header: SlotHeader, content: bytes) -> SlotFrame | None:
    """Frame and digests, as the part with its digests; None if they are not those that the header names."""
    if len(content) != header.content_bytes or content_digest(content) != header.content_digest:
        return None
    try:
        frame = msgspec.msgpack.decode(content[: header.frame_bytes], type=SlotFrame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    part = frame.part
    if part.size != header.part_bytes or part.rank != header.rank or part.stored is not None or part.is_referenced:
        return None
    digests = base64.b64encode(content[header.frame_bytes :]).decode()
    return msgspec.structs.replace(frame, part=msgspec.structs.replace(part, digests=digests))
