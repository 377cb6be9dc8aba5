"""Frames: how messages are told apart in a stream of bytes.

Law: a frame is a length of four bytes, big-endian, and as many bytes of payload. There is no I/O here and no meaning:
bytes go in, payloads come out, the same ones however the bytes were cut on their way. A length of zero or over the
limit is an error before a byte of it is kept, so a peer can make this end hold at most one frame and one read.
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
    """Cuts what arrives into payloads."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._rest = bytearray()
        self._needed = HEADER_BYTES

    @property
    def partial(self) -> bool:
        """Whether the beginning of a frame waits for its rest."""
        return bool(self._rest)

    def feed(self, data: bytes, inbox: deque[bytes]) -> None:
        """Take what arrived; put the payloads that are now whole into `inbox`, those before a wrong length included.

        After `PeerError` nothing more can be told apart.
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
            f"a frame announces {length} bytes, outside 1..{self.frame_bytes_max}",
            "send large data over a side connection; see docs/protocol.md",
        )
