from __future__ import annotations

import struct
import tracemalloc
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import PeerError
from forged.net.protocol import frames
from forged.net.protocol.frames import FRAME_BYTES_MAX, FrameDecoder

LIMIT = 64

payloads = st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=8)
garbage = st.binary(max_size=200)
framed = payloads.map(lambda many: b"".join(map(frames.encode, many)))
streams = st.lists(garbage | framed, max_size=4).map(b"".join)


@st.composite
def pieces(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    data = draw(whole)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def read(data: Iterable[bytes], limit: int = LIMIT) -> tuple[list[bytes], bool]:
    """The decoded payloads, and whether the input was refused."""
    decoder, inbox = FrameDecoder(limit), deque[bytes]()
    try:
        for piece in data:
            decoder.feed(piece, inbox)
    except PeerError:
        return list(inbox), True
    return list(inbox), False


def expected(data: bytes, limit: int = LIMIT) -> tuple[list[bytes], bool]:
    """The expected result, computed simply."""
    found: list[bytes] = []
    while len(data) >= 4:
        (length,) = struct.unpack(">I", data[:4])
        if not 0 < length <= limit:
            return found, True
        if len(data) < 4 + length:
            break
        found.append(data[4 : 4 + length])
        data = data[4 + length :]
    return found, False


def test_a_frame_is_its_length_in_four_bytes_big_endian_and_its_payload() -> None:
    assert frames.encode(b"abc") == b"\x00\x00\x00\x03abc"


@given(pieces(framed))
def test_frames_come_out_as_they_went_in_however_they_were_cut(data: list[bytes]) -> None:
    assert read(data) == expected(b"".join(data))


@given(pieces(streams))
def test_any_bytes_in_any_pieces_give_the_right_payloads_or_a_peer_error(data: list[bytes]) -> None:
    assert read(data) == expected(b"".join(data))


@given(framed)
def test_one_byte_at_a_time_is_enough(data: bytes) -> None:
    assert read(data[index : index + 1] for index in range(len(data))) == expected(data)


@pytest.mark.parametrize("length", [0, LIMIT + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_outside_the_limits_is_refused_as_soon_as_it_is_known(length: int) -> None:
    header = struct.pack(">I", length)
    assert read([header[:3]]) == ([], False)
    assert read([header[:3], header[3:]]) == ([], True)


def test_a_frame_at_the_limit_is_taken() -> None:
    assert read([frames.encode(bytes(LIMIT))]) == ([bytes(LIMIT)], False)


def test_frames_before_an_invalid_length_are_kept() -> None:
    assert read([frames.encode(b"good") + bytes(4)]) == ([b"good"], True)


def test_oversized_frame_error_names_limit_and_fix() -> None:
    with pytest.raises(PeerError, match=r"must be 1..8, got 9 \(send bulk data over a side connection") as caught:
        FrameDecoder(8).feed(frames.encode(bytes(9)), deque())
    assert caught.value.code == "frame_length"


def test_a_beginning_that_waits_for_its_rest_is_partial() -> None:
    decoder, inbox = FrameDecoder(), deque[bytes]()
    assert not decoder.partial
    decoder.feed(b"\x00", inbox)
    assert decoder.partial
    decoder.feed(b"\x00\x00\x01a", inbox)
    assert not decoder.partial


def test_the_limit_may_be_raised_between_frames() -> None:
    decoder, inbox = FrameDecoder(4), deque[bytes]()
    decoder.feed(frames.encode(b"1234"), inbox)
    decoder.frame_bytes_max = 8
    decoder.feed(frames.encode(b"12345678"), inbox)
    assert list(inbox) == [b"1234", b"12345678"]


def test_a_header_that_announces_much_costs_nothing_before_it_comes() -> None:
    decoders = [FrameDecoder() for _ in range(100)]
    tracemalloc.start()
    try:
        for decoder in decoders:
            decoder.feed(struct.pack(">I", FRAME_BYTES_MAX) + b"x", deque())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100 * 1024


def test_a_large_frame_in_small_pieces_costs_a_few_times_its_size() -> None:
    decoder, inbox = FrameDecoder(), deque[bytes]()
    data = memoryview(frames.encode(bytes(FRAME_BYTES_MAX)))
    tracemalloc.start()
    try:
        for start in range(0, len(data), 4096):
            decoder.feed(bytes(data[start : start + 4096]), inbox)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(inbox.pop()) == FRAME_BYTES_MAX
    assert peak < 4 * FRAME_BYTES_MAX
