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
import zstandard

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX
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
WINDOW_BYTES_MAX = 2 * CHUNK_BYTES_MAX
"""A frame that wants more memory for itself is not one of ours."""
_SEARCHES = {CompressionLevel.BALANCED: 3, CompressionLevel.MAXIMUM: 12}
"""At which level of zstd repetitions are looked for, besides."""
_COUNTING = {"strategy": zstandard.STRATEGY_FAST, "hash_log": 6, "min_match": 7}
"""What makes zstd see but the repetitions that nobody could overlook."""

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
            if _own.decompressor.stream_reader(data[at:end]).readinto(plane) != count:
                raise _unreadable("a frame is short")
            at = end
    except zstandard.ZstdError as error:
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
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self._compressors: dict[int | None, zstandard.ZstdCompressor] = {}
        self._scratch: Bytes = np.empty(0, np.uint8)

    def planes(self, width: int, count: int) -> Bytes:
        """Room for planes; the next call gives the same."""
        size = width * count
        if size > CHUNK_BYTES_MAX:
            return np.empty((width, count), np.uint8)
        if size > self._scratch.size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size].reshape(width, count)

    def compressor(self, search: int | None) -> zstandard.ZstdCompressor:
        """One that looks for repetitions at that level of zstd, or for hardly any."""
        if search not in self._compressors:
            self._compressors[search] = (
                zstandard.ZstdCompressor(level=search)
                if search is not None
                else zstandard.ZstdCompressor(
                    compression_params=zstandard.ZstdCompressionParameters.from_level(1, **_COUNTING)
                )
            )
        return self._compressors[search]


_own = _Own()


def _smallest(plane: Bytes, search: int | None, *, whole_too: bool) -> bytes:
    """The frame of a plane; repetitions are looked for where a sample has some, or, with `whole_too`, everywhere."""
    data = plane.data
    counted = _own.compressor(None).compress(data)
    if search is None:
        return counted
    if not whole_too and plane.size > SAMPLE_BYTES_MIN:
        sample = data[: max(SAMPLE_BYTES_MIN, plane.size // SAMPLE_PART)]
        if len(_own.compressor(search).compress(sample)) >= len(_own.compressor(None).compress(sample)):
            return counted
    return min(counted, _own.compressor(search).compress(data), key=len)


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
    try:
        parameters = zstandard.get_frame_parameters(data)
        at = zstandard.frame_header_size(data)
    except zstandard.ZstdError as error:
        raise _unreadable(str(error)) from None
    if parameters.content_size != content or parameters.has_checksum or parameters.dict_id:
        raise _unreadable("a frame is not of the size that it has to be")
    is_last = False
    while not is_last:
        block = int.from_bytes(data[at : at + 3], "little")
        is_last, is_run = bool(block & 1), block >> 1 & 3 == 1
        at += 3 + (1 if is_run else block >> 3)
        if at > len(data):
            raise _unreadable("a frame is cut off")
    return at


def _unreadable(why: str) -> CheckpointException:
    return corrupted(
        f"a compressed chunk cannot be read: {why}", "", "use another checkpoint", code="checkpoint_chunk_corrupt"
    )
