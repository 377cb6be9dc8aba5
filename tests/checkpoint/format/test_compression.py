from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX
from forged.checkpoint.format.compression import (
    CHUNKS_SKIPPED,
    COMPRESSED_BYTES_MIN,
    FAILURES_BEFORE_BACKOFF,
    SAVING_MIN,
    CompressionBackoff,
    compress,
    decompress_into,
    width_of,
)
from forged.checkpoint.model import CompressionLevel

LEVELS = [CompressionLevel.FAST, CompressionLevel.BALANCED, CompressionLevel.MAXIMUM]
WIDE = 8 * COMPRESSED_BYTES_MIN
GUARD = 0xA5


def seen(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def unpacked(packed: bytes, itemsize: int, size: int) -> bytes:
    """The decompressed bytes; fails if memory around them was written."""
    out = bytearray([GUARD]) * (size + 32)
    decompress_into(memoryview(packed), itemsize, memoryview(out)[16 : size + 16])
    assert out[:16] == out[size + 16 :] == bytearray([GUARD]) * 16
    return bytes(out[16 : size + 16])


def refused(packed: bytes, itemsize: int, size: int) -> CheckpointException:
    """The error that decompression raises; fails if memory around the output was written."""
    out = bytearray([GUARD]) * (size + 32)
    with pytest.raises(CheckpointException) as caught:
        decompress_into(memoryview(packed), itemsize, memoryview(out)[16 : size + 16])
    assert out[:16] == out[size + 16 :] == bytearray([GUARD]) * 16
    assert caught.value.type is ExceptionType.CORRUPTED_CHECKPOINT
    return caught.value


def weights(dtype: Any, count: int = WIDE) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(1).standard_normal(count) * 0.02).astype(dtype)


ARRAYS = {
    "float16": weights(np.float16),
    "float32": weights(np.float32),
    "float64": weights(np.float64),
    "bfloat16": weights(ml_dtypes.bfloat16),
    "float8": weights(ml_dtypes.float8_e4m3fn),
    "complex64": weights(np.complex64),
    "complex128": weights(np.complex128),
    "longdouble": weights(np.longdouble),
    "big-endian": weights(">f4"),
    "int64": np.arange(WIDE),
    "bool": np.arange(WIDE) % 7 == 0,
    "text": np.array([f"word {number % 17}" for number in range(WIDE)]),
    "bytes of an odd length": np.array([b"abcdefg", b"xyz"] * WIDE),
    "a time": np.arange(WIDE).astype("M8[s]"),
    "zeros": np.zeros(WIDE, np.float32),
    "not a number": np.full(WIDE, np.nan, np.float32),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ARRAYS)
def test_decompression_gives_the_compressed_bytes(name: str, level: CompressionLevel) -> None:
    array = ARRAYS[name]
    data = seen(array)
    packed = compress(data, array.itemsize, level)
    assert packed is not None
    assert len(packed) <= len(data) * (1 - SAVING_MIN)
    assert unpacked(packed, array.itemsize, len(data)) == bytes(data)


@settings(max_examples=60)
@given(
    st.binary(min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 300),
    st.sampled_from(LEVELS),
)
def test_any_bytes_survive_compression(seed: bytes, itemsize: int, count: int, level: CompressionLevel) -> None:
    data = (seed * (itemsize * count * 64 // len(seed) + 1))[: itemsize * count * 64]
    packed = compress(memoryview(data), itemsize, level)
    assert packed is None or unpacked(packed, itemsize, len(data)) == data


@pytest.mark.parametrize("level", LEVELS)
def test_noise_stays_uncompressed(level: CompressionLevel) -> None:
    noise = np.random.default_rng(2).integers(0, 256, WIDE * 4, np.uint8)
    assert compress(seen(noise), 4, level) is None


def test_level_none_and_small_chunks_stay_uncompressed() -> None:
    zeros = memoryview(bytes(WIDE))
    assert compress(zeros, 4, CompressionLevel.NONE) is None
    assert compress(zeros[: COMPRESSED_BYTES_MIN - 4], 4, CompressionLevel.MAXIMUM) is None
    assert compress(zeros[:0], 4, CompressionLevel.FAST) is None
    assert compress(zeros[:0], 0, CompressionLevel.FAST) is None


def test_an_element_larger_than_a_chunk_stays_uncompressed() -> None:
    assert compress(memoryview(bytes(CHUNK_BYTES_MAX)), CHUNK_BYTES_MAX, CompressionLevel.FAST) is not None
    assert compress(memoryview(bytes(CHUNK_BYTES_MAX + 1)), CHUNK_BYTES_MAX + 1, CompressionLevel.FAST) is None


def test_bytes_that_are_no_whole_elements_stay_uncompressed() -> None:
    assert compress(memoryview(bytes(WIDE + 1)), 4, CompressionLevel.FAST) is None


def test_unaligned_read_only_memory_is_compressed() -> None:
    data = bytes(3) + weights(np.float32).tobytes()
    packed = compress(memoryview(data)[3:], 4, CompressionLevel.FAST)
    assert packed is not None
    assert unpacked(packed, 4, len(data) - 3) == data[3:]


def test_a_higher_level_is_never_larger() -> None:
    for array in ARRAYS.values():
        sizes = [len(compress(seen(array), array.itemsize, level) or b"") for level in LEVELS]
        assert sizes[0] >= sizes[2]
        assert sizes[0] >= sizes[1]


def test_a_plain_zstd_reader_reads_the_planes() -> None:
    array = weights(np.float32)
    packed = compress(seen(array), 4, CompressionLevel.FAST)
    assert packed is not None
    with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as reader:
        planes = np.frombuffer(reader.read(), np.uint8).reshape(4, -1)
    assert planes.T.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("itemsize", "width"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (7, 1), (12, 4), (40, 8), (0, 1)]
)
def test_number_of_planes_by_element_size(itemsize: int, width: int) -> None:
    assert width_of(itemsize) == width


def small() -> tuple[bytes, int]:
    array = np.arange(COMPRESSED_BYTES_MIN, dtype=np.float32)
    packed = compress(seen(array), 4, CompressionLevel.FAST)
    assert packed is not None
    return packed, array.nbytes


def test_every_truncation_is_refused() -> None:
    packed, size = small()
    for length in range(0, len(packed), 7):
        refused(packed[:length], 4, size)


@pytest.mark.parametrize("more", [b"\0", b"garbage", zstandard.compress(b""), zstandard.compress(b"more")])
def test_data_after_the_last_frame_are_refused(more: bytes) -> None:
    packed, size = small()
    refused(packed + more, 4, size)


@pytest.mark.parametrize("out", [0, 4, 8188, 8196, 8190, 1 << 20])
def test_an_output_of_another_size_is_refused(out: int) -> None:
    packed, size = small()
    assert out != size
    refused(packed, 4, out)


def test_a_frame_with_larger_content_is_refused_before_decompression() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    assert len(bomb) < 1 << 20
    refused(bomb, 1, 4096)


def test_a_frame_that_declares_too_little_content_is_refused() -> None:
    """The content size in the header is lowered; the blocks hold more."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(np.arange(2048, dtype=np.uint16).tobytes()))
    place = frame.index((4096 - 256).to_bytes(2, "little"))
    frame[place : place + 2] = (2048 - 256).to_bytes(2, "little")
    refused(bytes(frame), 1, 2048)


@pytest.mark.parametrize(
    "compressor",
    [
        zstandard.ZstdCompressor(write_content_size=False),
        zstandard.ZstdCompressor(write_checksum=True),
        zstandard.ZstdCompressor(
            dict_data=zstandard.ZstdCompressionDict(
                b"an unknown dictionary for zstd  " * 20, zstandard.DICT_TYPE_RAWCONTENT
            )
        ),
    ],
)
def test_frames_with_other_options_decompress_correctly_or_are_refused(compressor: zstandard.ZstdCompressor) -> None:
    data = b"an unknown dictionary for zstd  " * 100
    with suppress(CheckpointException):
        assert unpacked(compressor.compress(data), 1, len(data)) == data


@settings(max_examples=300)
@given(st.data())
def test_flipped_bits_give_an_error_or_as_many_bytes(data: st.DataObject) -> None:
    packed, size = small()
    damaged = bytearray(packed)
    damaged[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CheckpointException):
        unpacked(bytes(damaged), 4, size)


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]))
def test_garbage_is_refused(garbage: bytes, itemsize: int) -> None:
    refused(garbage, itemsize, 4096)


def test_threads_compress_independently() -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        for number in range(20):
            array = np.random.default_rng(seed * 100 + number).standard_normal(WIDE).astype(np.float32)
            packed = compress(seen(array), 4, CompressionLevel.FAST)
            if packed is None or unpacked(packed, 4, array.nbytes) != array.tobytes():
                failures.append(f"{seed}/{number}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def tried(backoff: CompressionBackoff, chunks: int) -> list[bool]:
    """Which of several incompressible chunks are tried."""
    found = []
    for _ in range(chunks):
        found.append(backoff.should_try())
        backoff.record(False)
    return found


def test_an_incompressible_tensor_is_retried_at_intervals() -> None:
    skipped = [False] * CHUNKS_SKIPPED + [True]
    expected = [True] * FAILURES_BEFORE_BACKOFF + skipped + skipped + [False]
    assert tried(CompressionBackoff(), len(expected)) == expected


def test_one_success_ends_the_backoff() -> None:
    backoff = CompressionBackoff()
    tried(backoff, FAILURES_BEFORE_BACKOFF + CHUNKS_SKIPPED)
    assert backoff.should_try()
    backoff.record(True)
    assert tried(backoff, FAILURES_BEFORE_BACKOFF + 1) == [True] * FAILURES_BEFORE_BACKOFF + [False]


def test_a_compressible_tensor_is_always_tried() -> None:
    backoff = CompressionBackoff()
    for _ in range(3 * FAILURES_BEFORE_BACKOFF):
        assert tried(backoff, FAILURES_BEFORE_BACKOFF - 1) == [True] * (FAILURES_BEFORE_BACKOFF - 1)
        backoff.record(True)
