"""Reads slots: those of one rank as files, and those of all ranks as the checkpoint that they make up.

Invariants:
- Slots are read into memory of the reader: their writer may shorten or change them meanwhile. They are mapped, which
  takes a copy less, only where the writer could end the reader anyway.
- Every byte that is returned has been compared with a digest that the reader had before.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain

import msgspec
import xxhash

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.manifest import DIGEST_BYTES, Manifest, decode, digests_of, encode, pieces
from forged.checkpoint.format.slot import (
    CONTENT_BYTES_MAX,
    HEADER_BYTES,
    PART_OFFSET,
    SlotFrame,
    SlotHeader,
    SlotState,
    decode_content,
    read_header,
)
from forged.checkpoint.storage import listing

TORN = "checkpoint_slot_torn"


class SlotFile:
    """An open slot; the descriptor is its own."""

    def __init__(self, fd: int, *, is_mapped: bool = False) -> None:
        """With `is_mapped`, a writer that shortens the slot ends this process (SIGBUS)."""
        self._fd = fd
        size = os.fstat(fd).st_size
        self._map = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)) if is_mapped and size else None

    def view(self, offset: int, length: int) -> memoryview | None:
        """Some bytes where they are; None for a slot that is not mapped."""
        if self._map is None:
            return None
        if offset + length > len(self._map):
            raise corrupted(f"a slot ends at byte {len(self._map)}", "", code=TORN)
        return self._map[offset : offset + length]

    def lock(self) -> bool:
        """Keep its writer from overwriting the slot until it is closed here; false if it is being overwritten."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def header(self) -> SlotHeader | SlotState:
        """What the slot holds at this moment."""
        return read_header(os.pread(self._fd, HEADER_BYTES, 0), os.fstat(self._fd).st_size)

    def whole_header(self) -> SlotHeader:
        """What the slot holds; an error if that is not whole."""
        header = self.header()
        if not isinstance(header, SlotHeader):
            raise corrupted(f"a slot is {header}", "", code=TORN)
        return header

    def frame(self, header: SlotHeader) -> SlotFrame:
        """Frame and digests of the save that the header names."""
        content = bytearray(header.content_bytes)
        self.read_into(header.frame_offset, memoryview(content))
        frame = decode_content(header, bytes(content))
        if frame is None:
            raise torn(header)
        return frame

    def read_into(self, offset: int, room: memoryview) -> None:
        """Fill `room` with the bytes from `offset` on."""
        done = 0
        while done < len(room):
            count = os.preadv(self._fd, [room[done:]], offset + done)
            if not count:
                raise corrupted(f"a slot ends at byte {offset + done}", "", code=TORN)
            done += count

    def close(self) -> None:
        os.close(self._fd)


class SlotPart:
    """The part in a slot; a `ports.ByteSource` and a `ports.Reader`, which verifies what it returns."""

    def __init__(self, file: SlotFile, header: SlotHeader, manifest: Manifest, number: int) -> None:
        part = manifest.parts[number]
        self.size = part.size
        self._file = file
        self._header = header
        self._digests = digests_of(part)
        lengths = chain.from_iterable(piece.lengths for piece in pieces(manifest, number))
        self._marks = list(accumulate(lengths, initial=part.data_offset))
        """The offset of each chunk in the part, and the end of the last one."""
        lead = bytearray(part.data_offset)
        file.read_into(PART_OFFSET, memoryview(lead))
        if xxhash.xxh3_128_digest(lead) != base64.b64decode(part.header):
            raise torn(header)
        self._lead = bytes(lead)

    def block(self, offset: int, room: memoryview) -> memoryview:
        view = self._file.view(PART_OFFSET + offset, len(room))
        if view is None:
            self._read_room(offset, room)
            return room
        self._verify(offset, view)
        return view

    def read_into(self, offset: int, *rooms: memoryview) -> None:
        """Fill the rooms, one after another, and verify all chunks that begin in them."""
        for room in rooms:
            self._read_room(offset, room)
            offset += len(room)

    def _read_room(self, offset: int, room: memoryview) -> None:
        self._file.read_into(PART_OFFSET + offset, room)
        end = offset + len(room)
        if offset < len(self._lead):
            ahead = min(end, len(self._lead)) - offset
            room[:ahead] = self._lead[offset : offset + ahead]
        self._verify(offset, room)

    def _verify(self, offset: int, room: memoryview) -> None:
        """Verify all chunks that begin in `room`, which was read from `offset` on."""
        marks, end = self._marks, offset + len(room)
        for chunk in range(bisect_left(marks, offset), min(bisect_left(marks, end), len(marks) - 1)):
            start, stop = marks[chunk], marks[chunk + 1]
            bytes_of = room[start - offset : stop - offset]
            if stop > end:
                bytes_of = self._across(bytes_of, stop - start, end)
            if xxhash.xxh3_128_digest(bytes_of) != self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]:
                raise torn(self._header)

    def _across(self, head: memoryview, length: int, end: int) -> memoryview:
        """A chunk of which the rest lies behind the room."""
        whole = memoryview(bytearray(length))
        whole[: len(head)] = head
        self._file.read_into(PART_OFFSET + end, whole[len(head) :])
        return whole

    def mapped(self) -> memoryview | None:
        return None


class SlotSet:
    """The slots of all ranks of one save."""

    def __init__(self, files: Sequence[SlotFile]) -> None:
        """The files are given by rank. An error if the slots do not make up a checkpoint, or change meanwhile."""
        self._files = list(files)
        self._headers = headers = [file.whole_header() for file in files]
        if sum(header.content_bytes for header in headers) > CONTENT_BYTES_MAX:
            # A hostile writer could have this process read more than fits into its memory.
            raise torn(headers[0])
        frames = [file.frame(header) for file, header in zip(files, headers, strict=True)]
        bare = decode(frames[0].manifest, f"{frames[0].prefix}.metadata.json")
        written = [place for place, frame in enumerate(frames) if frame.part.tensors]
        manifest = msgspec.structs.replace(bare, parts=[frames[place].part for place in written])
        self.data = encode(manifest)
        """The manifest as it is published."""
        # Decoding checks all numbers of the parts against those of the tensors.
        self.manifest = decode(self.data, manifest.path)
        for rank, header in enumerate(headers):
            if (header.rank, header.world_size, header.save_id) != (rank, len(headers), self.manifest.save_id):
                raise torn(header)
        if self.manifest.world_size != len(headers):
            raise torn(headers[0])
        for place in written:
            # A hostile writer could name a file of another save, which would be replaced.
            if frames[place].part.file != part_name(self.manifest.prefix, headers[place]):
                raise torn(headers[place])
        self.parts = {
            frames[place].part.file: SlotPart(files[place], headers[place], self.manifest, number)
            for number, place in enumerate(written)
        }

    def require_unchanged(self) -> None:
        """Refuse slots that their writers have begun to overwrite."""
        for file, header in zip(self._files, self._headers, strict=True):
            if file.header() != header:
                raise torn(header)


def part_name(prefix: str, header: SlotHeader) -> str:
    """The name of the file that a slot becomes."""
    return listing.part_name(prefix, header.save_id, header.rank, header.world_size, is_packed=False)


def torn(header: SlotHeader) -> CheckpointException:
    """The slot holds something else by now, or never was whole."""
    return corrupted(f"the slot of rank {header.rank} has changed, or is damaged", "", code=TORN)
