"""A packing and blocks that tests draw."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from forged.memory import BlockStatus, MemoryBlock
from forged.memory.traces import Buffer, plan

FREE, ALLOCATED, PINNED, CACHED = BlockStatus
BUFFERS = [Buffer("a", 0, 100, 512), Buffer("b", 0, 50, 256), Buffer("c", 50, 100, 256), Buffer("d", 10, 11, 256)]
PACKING = plan(BUFFERS, 1024)
BLOCKS = [
    MemoryBlock("1", 0, 512, ALLOCATED, "embedding"),
    MemoryBlock("2", 512, 128, PINNED, "<b>"),
    MemoryBlock("3", 640, 128, CACHED, "gradients"),
    MemoryBlock("", 768, 256, FREE),
]


def pixels_of(png: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of a PNG as this project writes them; checks the checksum of each chunk."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(png):
        length = struct.unpack_from(">I", png, at)[0]
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + content) == struct.unpack_from(">I", png, at + 8 + length)[0]
        chunks[kind] = content
        at += 12 + length
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * 3)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)
