"""Chunk compression: the bytes of all elements are split into planes, and each plane is one zstd frame.

Plane 0 holds the first byte of every element, plane 1 the second byte, and so on. The mantissas of trained weights are
noise, their exponents are not: entropy coding of the exponent planes is most of the gain, and searching for repetitions
there costs time and sometimes space.

Invariants:
- Decompression returns exactly the compressed bytes, or raises an error.
- Decompression never writes outside the given memory.
- Data that hardly gets smaller is left uncompressed.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX
from forged.checkpoint.format.zstd import FrameError, new_codec
from forged.checkpoint.model import CompressionLevel

COMPRESSED_BYTES_MIN = 2_048
"""Smaller chunks stay uncompressed."""
SAVING_MIN = 0.03
"""The least part of a chunk that compression must save."""
SAMPLE_BYTES_MIN = 1 << 13
SAMPLE_PART = 8
"""One in so many bytes of a plane is sampled for repetitions."""
FAILURES_BEFORE_BACKOFF = 3
"""After so many incompressible chunks in a row, chunks of the tensor are skipped."""
CHUNKS_SKIPPED = 15
"""So many chunks are stored uncompressed before the next try."""
ELEMENTS_JOINED_AT_ONCE = 1 << 16
WIDTH_MAX = 8
FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_SEARCH_LEVELS = {CompressionLevel.BALANCED: 3, CompressionLevel.MAXIMUM: 12}
"""The zstd level at which repetitions are searched as well."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def compress(data: memoryview, itemsize: int, level: CompressionLevel) -> bytes | None:
    """The compressed bytes; None if they would not be at least `SAVING_MIN` smaller."""
    if level is CompressionLevel.NONE or not itemsize or len(data) % itemsize:
        return None
    if not COMPRESSED_BYTES_MIN <= len(data) <= CHUNK_BYTES_MAX:
        # Only a single element can be larger than a chunk; compressing it is not worth the memory to decompress it.
        return None
    planes = _split(np.frombuffer(data, np.uint8), width_of(itemsize))
    search = _SEARCH_LEVELS.get(level)
    whole_too = level is CompressionLevel.MAXIMUM
    frames = [_smallest(plane, search, whole_too=whole_too) for plane in planes]
    if sum(map(len, frames)) > len(data) * (1 - SAVING_MIN):
        return None
    return b"".join(frames)


def decompress_into(data: memoryview, itemsize: int, out: memoryview) -> None:
    """Fill `out` with the decompressed bytes; raise if they are not exactly as many."""
    width = width_of(itemsize)
    if len(out) % width or not len(out):
        raise _unreadable(f"it does not decompress to {len(out)} bytes")
    count, at = len(out) // width, 0
    planes = _thread_local.planes(width, count)
    try:
        for plane in planes:
            end = at + _frame_bytes(data[at:], count)
            _thread_local.codec.decompress_into(data[at:end], plane)
            at = end
    except FrameError as error:
        raise _unreadable(str(error)) from None
    if at != len(data):
        raise _unreadable("data follow the last frame")
    _join(planes, np.frombuffer(out, np.uint8))


def width_of(itemsize: int) -> int:
    """The number of planes for an element size; strings and complex numbers consist of smaller numbers."""
    return min(itemsize & -itemsize, WIDTH_MAX) or 1


class CompressionBackoff:
    """Skips compression of a tensor for a while after several chunks did not get smaller. Not thread-safe."""

    def __init__(self) -> None:
        self._failures = 0
        """Chunks in a row that were stored uncompressed, tried or skipped."""

    def should_try(self) -> bool:
        """Whether to compress the next chunk."""
        skipped = self._failures - FAILURES_BEFORE_BACKOFF
        return skipped < 0 or skipped % (CHUNKS_SKIPPED + 1) == CHUNKS_SKIPPED

    def record(self, got_smaller: bool) -> None:
        """Record the outcome for the next chunk."""
        self._failures = 0 if got_smaller else self._failures + 1


class _ThreadLocal(threading.local):
    """A thread's codec, which is not thread-safe, and its scratch memory, which is faster when reused."""

    def __init__(self) -> None:
        self.codec = new_codec()
        self._scratch: Bytes = np.empty(0, np.uint8)

    def planes(self, width: int, count: int) -> Bytes:
        """Scratch memory for planes; each call returns the same memory."""
        size = width * count
        if size > CHUNK_BYTES_MAX:
            return np.empty((width, count), np.uint8)
        if size > self._scratch.size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size].reshape(width, count)


_thread_local = _ThreadLocal()


def _smallest(plane: Bytes, search: int | None, *, whole_too: bool) -> bytes:
    """The smaller frame of a plane; with a search for repetitions where a sample has some, or if `whole_too`."""
    data = plane.data
    counted = _thread_local.codec.compress(data, None)
    if search is None:
        return counted
    if not whole_too and plane.size > SAMPLE_BYTES_MIN:
        sample = data[: max(SAMPLE_BYTES_MIN, plane.size // SAMPLE_PART)]
        if len(_thread_local.codec.compress(sample, search)) >= len(_thread_local.codec.compress(sample, None)):
            return counted
    return min(counted, _thread_local.codec.compress(data, search), key=len)


def _split(data: Bytes, width: int) -> Bytes:
    """Split elements into planes, one per row."""
    if width == 1:
        return data.reshape(1, -1)
    elements = data.view(f"<u{width}")
    planes = _thread_local.planes(width, elements.size)
    np.copyto(planes[0], elements, casting="unsafe")
    for number in range(1, width):
        shift = elements.dtype.type(8 * number)
        np.right_shift(elements, shift, out=planes[number], dtype=elements.dtype, casting="unsafe")
    return planes


def _join(planes: Bytes, into: Bytes) -> None:
    """Join planes into elements, in portions that stay in the CPU cache."""
    width = len(planes)
    if width == 1:
        into[:] = planes[0]
        return
    elements = into.view(f"<u{width}")
    for start in range(0, elements.size, ELEMENTS_JOINED_AT_ONCE):
        some = elements[start : start + ELEMENTS_JOINED_AT_ONCE]
        some[:] = planes[-1, start : start + ELEMENTS_JOINED_AT_ONCE]
        for plane in planes[-2::-1]:
            np.left_shift(some, 8, out=some)
            np.bitwise_or(some, plane[start : start + ELEMENTS_JOINED_AT_ONCE], out=some)


def _frame_bytes(data: memoryview, content: int) -> int:
    """The length of the first frame; refuses a frame whose content is not `content` bytes."""
    at = _header_bytes(data, content)
    is_last = False
    while not is_last:
        block = int.from_bytes(data[at : at + 3], "little")
        is_last, is_run = bool(block & 1), block >> 1 & 3 == 1
        at += 3 + (1 if is_run else block >> 3)
        if at > len(data):
            raise _unreadable("a frame is truncated")
    return at


def _header_bytes(data: memoryview, content: int) -> int:
    """The length of a frame header (RFC 8878, 3.1.1.1); refuses options that `compress` does not use."""
    if len(data) < len(FRAME_MAGIC) + 1 or data[: len(FRAME_MAGIC)] != FRAME_MAGIC:
        raise _unreadable("a frame lacks the zstd magic number")
    descriptor = data[len(FRAME_MAGIC)]
    size_flag, is_single_segment = descriptor >> 6, descriptor >> 5 & 1
    if descriptor & 0b1_1111:
        raise _unreadable("a frame has a checksum, a dictionary or a reserved bit")
    start = len(FRAME_MAGIC) + 1 + (0 if is_single_segment else 1)
    size_bytes = 1 << size_flag if size_flag or is_single_segment else 0
    end = start + size_bytes
    declared = int.from_bytes(data[start:end], "little") + (256 if size_bytes == 2 else 0)
    if not size_bytes or end > len(data) or declared != content:
        raise _unreadable(f"a frame does not declare {content} bytes of content")
    return end


def _unreadable(why: str) -> CheckpointException:
    return corrupted(
        f"a compressed chunk cannot be read: {why}", "", "use another checkpoint", code="checkpoint_chunk_corrupt"
    )
