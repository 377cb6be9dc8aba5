"""The zstd codec: the `zstandard` package, or `compression.zstd` on interpreters for which that has no wheels.

`zstandard` decompresses into memory that is there already. `compression.zstd` returns new memory: chunks of weights
are unpacked 12 to 20 % slower with it, and compressed as fast, to the same bytes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX

WINDOW_BYTES_MAX = 2 * CHUNK_BYTES_MAX
"""A frame that needs more memory to be decompressed is refused."""
ENTROPY_LEVEL = 1
ENTROPY_HASH_LOG = 6
ENTROPY_MATCH_MIN = 7
"""With these parameters zstd finds only the most obvious repetitions, and codes each byte by how often it occurs."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class FrameError(Exception):
    """A frame cannot be decompressed, or holds another number of bytes than its header says."""


class Codec(Protocol):
    """Compresses and decompresses frames; for one thread."""

    def compress(self, data: memoryview, level: int | None) -> bytes:
        """The frame of some bytes, at a level of zstd; without one, by entropy coding almost alone."""
        ...

    def decompress_into(self, frame: memoryview, buffer: Bytes) -> None:
        """Fill the buffer with what a frame holds, and never write beside it."""
        ...


class ZstandardCodec:
    """A codec over the package `zstandard`."""

    def __init__(self, zstandard: Any) -> None:
        self._zstandard = zstandard
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self._compressors: dict[int | None, Any] = {}

    def compress(self, data: memoryview, level: int | None) -> bytes:
        if level not in self._compressors:
            self._compressors[level] = self._new_compressor(level)
        frame: bytes = self._compressors[level].compress(data)
        return frame

    def decompress_into(self, frame: memoryview, buffer: Bytes) -> None:
        try:
            count = self._decompressor.stream_reader(frame).readinto(buffer)
        except self._zstandard.ZstdError as error:
            raise FrameError(str(error)) from None
        if count != buffer.size:
            raise FrameError("a frame is short")

    def _new_compressor(self, level: int | None) -> Any:
        if level is not None:
            return self._zstandard.ZstdCompressor(level=level)
        parameters = self._zstandard.ZstdCompressionParameters.from_level(
            ENTROPY_LEVEL,
            strategy=self._zstandard.STRATEGY_FAST,
            hash_log=ENTROPY_HASH_LOG,
            min_match=ENTROPY_MATCH_MIN,
        )
        return self._zstandard.ZstdCompressor(compression_params=parameters)


class InterpreterCodec:
    """A codec over `compression.zstd`, or over `backports.zstd`, which has the same interface."""

    def __init__(self, zstd: Any) -> None:
        self._zstd = zstd
        self._compressors: dict[int | None, Any] = {}
        self._options = {zstd.DecompressionParameter.window_log_max: WINDOW_BYTES_MAX.bit_length() - 1}

    def compress(self, data: memoryview, level: int | None) -> bytes:
        if level not in self._compressors:
            self._compressors[level] = self._new_compressor(level)
        compressor = self._compressors[level]
        frame: bytes = compressor.compress(data, compressor.FLUSH_FRAME)
        return frame

    def decompress_into(self, frame: memoryview, buffer: Bytes) -> None:
        decompressor = self._zstd.ZstdDecompressor(options=self._options)
        try:
            data = decompressor.decompress(frame, buffer.size)
        except self._zstd.ZstdError as error:
            raise FrameError(str(error)) from None
        if len(data) != buffer.size or not decompressor.eof:
            raise FrameError("a frame holds another number of bytes than its header says")
        buffer[:] = np.frombuffer(data, np.uint8)

    def _new_compressor(self, level: int | None) -> Any:
        if level is not None:
            return self._zstd.ZstdCompressor(level=level)
        parameter = self._zstd.CompressionParameter
        return self._zstd.ZstdCompressor(
            options={
                parameter.compression_level: ENTROPY_LEVEL,
                parameter.strategy: int(self._zstd.Strategy.fast),
                parameter.hash_log: ENTROPY_HASH_LOG,
                parameter.min_match: ENTROPY_MATCH_MIN,
            }
        )


def _found(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


ZSTANDARD = _found("zstandard")
INTERPRETER_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def new_codec() -> Codec:
    """A codec for the calling thread."""
    return ZstandardCodec(ZSTANDARD) if ZSTANDARD is not None else InterpreterCodec(import_module(INTERPRETER_MODULE))
