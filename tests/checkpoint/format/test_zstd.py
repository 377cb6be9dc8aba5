"""Both codecs over zstd."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import zstandard

from forged.checkpoint.format import compression, zstd
from forged.checkpoint.format.zstd import WINDOW_BYTES_MAX, Codec, FrameError, InterpreterCodec, ZstandardCodec
from forged.checkpoint.model import CompressionLevel

SIZE = 1 << 18
GUARD = 0xA5
CODECS: dict[str, Codec] = {
    "zstandard": ZstandardCodec(zstandard),
    "interpreter": InterpreterCodec(import_module(zstd.INTERPRETER_MODULE)),
}
LEVELS = [None, 3, 12]


def exponents() -> bytes:
    """The upper bytes of some weights."""
    weights = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
    return (weights.view(np.uint32) >> 24).astype(np.uint8).tobytes()


def decompressed(codec: Codec, frame: bytes, size: int) -> bytes:
    """What a frame holds; nothing is written beside the buffer."""
    memory = np.full(size + 32, GUARD, np.uint8)
    try:
        codec.decompress_into(memoryview(frame), memory[16 : size + 16])
    finally:
        assert set(memory[:16]) | set(memory[size + 16 :]) == {GUARD}
    return memory[16 : size + 16].tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_codecs_make_the_same_bytes(level: int | None) -> None:
    one, other = (codec.compress(memoryview(exponents()), level) for codec in CODECS.values())
    assert one == other
    assert len(one) < SIZE // 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CODECS)
def test_bytes_come_back(name: str, level: int | None) -> None:
    codec = CODECS[name]
    for data in (exponents(), bytes(SIZE), np.random.default_rng(2).bytes(SIZE)):
        assert decompressed(codec, codec.compress(memoryview(data), level), SIZE) == data


@pytest.mark.parametrize("name", CODECS)
def test_frame_that_does_not_fill_the_buffer_is_refused(name: str) -> None:
    frame = zstandard.compress(exponents())
    with pytest.raises(FrameError):
        decompressed(CODECS[name], frame, SIZE + 1)
    with pytest.raises(FrameError):
        decompressed(CODECS[name], frame[:-5], SIZE)


@pytest.mark.parametrize("name", CODECS)
def test_garbage_is_refused(name: str) -> None:
    with pytest.raises(FrameError):
        decompressed(CODECS[name], b"garbage" * 100, SIZE)


@pytest.mark.parametrize("name", CODECS)
def test_frame_with_a_large_window_is_refused(name: str) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=WINDOW_BYTES_MAX.bit_length())
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(exponents()) + stream.flush()
    with pytest.raises(FrameError):
        decompressed(CODECS[name], frame, SIZE)


def test_codec_of_the_interpreter_is_used_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(np.random.default_rng(1).standard_normal(SIZE).astype(np.float32).tobytes())
    packed = compression.compress(data, 4, CompressionLevel.FAST)
    monkeypatch.setattr(zstd, "ZSTANDARD", None)
    codec = zstd.new_codec()
    assert isinstance(codec, InterpreterCodec)
    monkeypatch.setattr(compression._thread_local, "codec", codec)
    assert compression.compress(data, 4, CompressionLevel.FAST) == packed
    room = bytearray(len(data))
    assert packed is not None
    compression.decompress_into(memoryview(packed), 4, memoryview(room))
    assert room == data
