"""Frames: split a byte stream into payloads, without I/O.

A frame is a big-endian length of four bytes and that many bytes of payload.

Invariants:
- The payloads do not depend on how the stream was cut into reads.
- A length of 0 or above the limit is refused before any of its payload is kept, so a peer makes this end hold at most
  one frame and one read.
"""

from __future__ import annotations

import struct
from collections import deque

from forged.errors import PeerError

HEADER_BYTES = 4
FRAME_BYTES_MAX = 4 << 20

_header = struct.Struct(">I")
_unpack = _header.unpack_from
_pack = _header.pack


def encode(payload: bytes) -> bytes:
    """The frame of one payload."""
    return _pack(len(payload)) + payload


class FrameDecoder:
    """Splits received bytes into payloads."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._rest = bytearray()
        self._needed = HEADER_BYTES

    @property
    def partial(self) -> bool:
        """Whether an incomplete frame is held."""
        return bool(self._rest)

    @property
    def awaited(self) -> int:
        """The size of the incomplete frame, once its header has arrived; otherwise 0."""
        return self._needed if len(self._rest) >= HEADER_BYTES else 0

    def clear(self) -> None:
        """Drop the incomplete frame; the decoder cannot be used afterwards."""
        self._rest = bytearray()

    def feed(self, data: bytes, inbox: deque[bytes]) -> None:
        """Append the completed payloads to `inbox`, also those before an invalid length.

        Raises `PeerError` for an invalid length; the decoder cannot be used afterwards.
        """
        if not self._rest:
            self._cut(data, inbox)
            return
        self._rest += data
        if len(self._rest) >= self._needed:
            whole = bytes(self._rest)
            self._rest = bytearray()
            self._cut(whole, inbox)

    def _cut(self, data: bytes, inbox: deque[bytes]) -> None:
        start, end = 0, len(data)
        self._needed = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            (length,) = _unpack(data, start)
            if not 0 < length <= self.frame_bytes_max:
                raise self._refused(length)
            stop = start + HEADER_BYTES + length
            if stop > end:
                self._needed = HEADER_BYTES + length
                break
            inbox.append(data[start + HEADER_BYTES : stop])
            start = stop
        if start < end:
            self._rest += data[start:]

    def _refused(self, length: int) -> PeerError:
        return PeerError(
            "frame_length",
            f"a frame's length must be 1..{self.frame_bytes_max}, got {length}",
            "send bulk data over a side connection; see docs/protocol.md",
        )
