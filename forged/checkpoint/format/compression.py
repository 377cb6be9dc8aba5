"""Compression: the first bytes of all elements together, then their second ones, and so on, each of these a zstd frame.

Law: what was packed comes back to the last bit, or an error does; never more is written than there is room for. What
would hardly get smaller is left as it is.

Of a trained number the mantissa is noise, and the exponent is not. Where the exponents of many numbers stand together,
coding each by how often it occurs is most of what can be had; to look for repetitions costs time there, and even space.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX
from forged.checkpoint.format.zstd import FrameError, new_codec
from forged.checkpoint.model import CompressionLevel

PACKED_BYTES_MIN = 2_048
"""Less is not worth the trouble."""
SPARED_MIN = 0.03
"""What is spared of a chunk has to be this part of it."""
SAMPLE_BYTES_MIN = 1 << 13
SAMPLE_PART = 8
"""One in so many bytes of a plane is looked at to see whether there are repetitions."""
TRIES = 3
"""So often in a row nothing is gained before a tensor is left alone."""
REST = 15
"""So many of its chunks are stored as they are until it is tried again."""
JOINED_AT_ONCE = 1 << 16
WIDTH_MAX = 8
FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_SEARCHES = {CompressionLevel.BALANCED: 3, CompressionLevel.MAXIMUM: 12}
"""At which level of zstd repetitions are looked for, besides."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def pack(data: memoryview, itemsize: int, level: CompressionLevel) -> bytes | None:
    """Fewer bytes that say the same; None where they would not be so much fewer."""
    if level is CompressionLevel.NONE or not itemsize or len(data) % itemsize:
        return None
    if not PACKED_BYTES_MIN <= len(data) <= CHUNK_BYTES_MAX:
        # More has only an element that is so large itself: nobody is to unpack that for a few bytes.
        return None
    planes = _split(np.frombuffer(data, np.uint8), width_of(itemsize))
    search = _SEARCHES.get(level)
    whole_too = level is CompressionLevel.MAXIMUM
    frames = [_smallest(plane, search, whole_too=whole_too) for plane in planes]
    if sum(map(len, frames)) > len(data) * (1 - SPARED_MIN):
        return None
    return b"".join(frames)


def unpack_into(data: memoryview, itemsize: int, room: memoryview) -> None:
    """Fill the room with what was packed; an error if that is not as much, to the byte."""
    width = width_of(itemsize)
    if len(room) % width or not len(room):
        raise _unreadable("it is not for so much room")
    count, at = len(room) // width, 0
    planes = _own.planes(width, count)
    try:
        for plane in planes:
            end = at + _frame_bytes(data[at:], count)
            _own.codec.decompress_into(data[at:end], plane)
            at = end
    except FrameError as error:
        raise _unreadable(str(error)) from None
    if at != len(data):
        raise _unreadable("something follows its last frame")
    _join(planes, np.frombuffer(room, np.uint8))


def width_of(itemsize: int) -> int:
    """In how many planes the bytes of such elements are split; strings and complex numbers consist of smaller ones."""
    return min(itemsize & -itemsize, WIDTH_MAX) or 1


class CompressionBackoff:
    """Leaves a tensor alone for a while whose chunks do not get smaller. For one tensor, and one thread."""

    def __init__(self) -> None:
        self._in_vain = 0
        """How many chunks in a row are stored as they are, whether it was tried or not."""

    def should_try(self) -> bool:
        """Whether to try the next chunk."""
        return self._in_vain < TRIES or (self._in_vain - TRIES) % (REST + 1) == REST

    def record(self, got_smaller: bool) -> None:
        """What became of the next chunk."""
        self._in_vain = 0 if got_smaller else self._in_vain + 1


class _Own(threading.local):
    """What every thread has for itself: contexts of zstd serve one at a time, and memory that was touched is quick."""

    def __init__(self) -> None:
        self.codec = new_codec()
        self._scratch: Bytes = np.empty(0, np.uint8)

    def planes(self, width: int, count: int) -> Bytes:
        """Room for planes; the next call gives the same."""
        size = width * count
        if size > CHUNK_BYTES_MAX:
            return np.empty((width, count), np.uint8)
        if size > self._scratch.size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size].reshape(width, count)


_own = _Own()


def _smallest(plane: Bytes, search: int | None, *, whole_too: bool) -> bytes:
    """The frame of a plane; repetitions are looked for where a sample has some, or, with `whole_too`, everywhere."""
    data = plane.data
    counted = _own.codec.compress(data, None)
    if search is None:
        return counted
    if not whole_too and plane.size > SAMPLE_BYTES_MIN:
        sample = data[: max(SAMPLE_BYTES_MIN, plane.size // SAMPLE_PART)]
        if len(_own.codec.compress(sample, search)) >= len(_own.codec.compress(sample, None)):
            return counted
    return min(counted, _own.codec.compress(data, search), key=len)


def _split(data: Bytes, width: int) -> Bytes:
    """The planes of some elements, one in each row."""
    if width == 1:
        return data.reshape(1, -1)
    elements = data.view(f"<u{width}")
    planes = _own.planes(width, elements.size)
    np.copyto(planes[0], elements, casting="unsafe")
    for number in range(1, width):
        shift = elements.dtype.type(8 * number)
        np.right_shift(elements, shift, out=planes[number], dtype=elements.dtype, casting="unsafe")
    return planes


def _join(planes: Bytes, into: Bytes) -> None:
    """Put elements together again; as many at a time as stay in the cache."""
    width = len(planes)
    if width == 1:
        into[:] = planes[0]
        return
    elements = into.view(f"<u{width}")
    for start in range(0, elements.size, JOINED_AT_ONCE):
        some = elements[start : start + JOINED_AT_ONCE]
        some[:] = planes[-1, start : start + JOINED_AT_ONCE]
        for plane in planes[-2::-1]:
            np.left_shift(some, 8, out=some)
            np.bitwise_or(some, plane[start : start + JOINED_AT_ONCE], out=some)


def _frame_bytes(data: memoryview, content: int) -> int:
    """How long the frame is with which the data begins; refuses any that does not hold so many bytes."""
    at = _header_bytes(data, content)
    is_last = False
    while not is_last:
        block = int.from_bytes(data[at : at + 3], "little")
        is_last, is_run = bool(block & 1), block >> 1 & 3 == 1
        at += 3 + (1 if is_run else block >> 3)
        if at > len(data):
            raise _unreadable("a frame is cut off")
    return at


def _header_bytes(data: memoryview, content: int) -> int:
    """How long the header of a frame is (RFC 8878, 3.1.1.1); refuses options that `pack` does not use."""
    if len(data) < len(FRAME_MAGIC) + 1 or data[: len(FRAME_MAGIC)] != FRAME_MAGIC:
        raise _unreadable("a frame does not begin as one")
    descriptor = data[len(FRAME_MAGIC)]
    size_flag, is_single_segment = descriptor >> 6, descriptor >> 5 & 1
    if descriptor & 0b1_1111:
        raise _unreadable("a frame has a checksum, a dictionary or a reserved bit")
    start = len(FRAME_MAGIC) + 1 + (0 if is_single_segment else 1)
    size_bytes = 1 << size_flag if size_flag or is_single_segment else 0
    end = start + size_bytes
    said = int.from_bytes(data[start:end], "little") + (256 if size_bytes == 2 else 0)
    if not size_bytes or end > len(data) or said != content:
        raise _unreadable("a frame is not of the size that it has to be")
    return end


def _unreadable(why: str) -> CheckpointException:
    return corrupted(
        f"a compressed chunk cannot be read: {why}", "", "use another checkpoint", code="checkpoint_chunk_corrupt"
    )
