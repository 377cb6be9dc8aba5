"""The header of a slot: whichever of its writes were done, only a whole slot is taken for whole."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.format.manifest import DIGEST_BYTES, Part
from forged.checkpoint.format.slot import (
    HEADER_BYTES,
    PAGE_BYTES,
    PART_OFFSET,
    SlotFrame,
    SlotHeader,
    SlotState,
    content_digest,
    decode_content,
    encode_frame,
    encode_header,
    read_header,
)

SIZE = 1 << 16
FRAME = SlotFrame("a", Part("a/00000000.00000-of-00001.safetensors", 0, 100, 8, [0], [], [], "", ""), b"")
DIGESTS = bytes(range(3 * DIGEST_BYTES))


def header_of(sequence: int = 1, save_id: str = "0123abcd", rank: int = 0, world_size: int = 1) -> SlotHeader:
    frame = encode_frame(FRAME)
    return SlotHeader(
        sequence, save_id, rank, world_size, 7, None, 2, 100, len(frame), 3, content_digest(frame + DIGESTS)
    )


def test_header_is_read_as_it_was_written() -> None:
    data = encode_header(header_of())
    assert len(data) == HEADER_BYTES <= PAGE_BYTES == PART_OFFSET
    assert read_header(data, SIZE) == header_of()
    assert read_header(bytes(HEADER_BYTES), SIZE) is SlotState.EMPTY
    assert read_header(data[:-1], SIZE) is SlotState.TORN


@given(st.sets(st.integers(0, HEADER_BYTES - 1), min_size=1), st.booleans())
def test_header_of_which_any_bytes_are_missing_is_not_whole(missing: set[int], is_cleared: bool) -> None:
    """While it is written over nothing, while it is cleared, and while it is written over another one."""
    before = bytes(HEADER_BYTES) if is_cleared else encode_header(header_of(sequence=2**40, save_id="ffffffff"))
    after = encode_header(header_of())
    data = bytes(before[place] if place in missing else byte for place, byte in enumerate(after))
    found = read_header(data, SIZE)
    if data in (before, after):
        return
    assert found in (SlotState.TORN, SlotState.EMPTY)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_arbitrary_bytes_are_no_header(data: bytes) -> None:
    assert not isinstance(read_header(data, SIZE), SlotHeader)


NUMBER = st.integers(0, 2**64 - 1)


@given(NUMBER, NUMBER, NUMBER, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), NUMBER, st.binary(max_size=16))
def test_header_of_a_hostile_writer_never_leads_out_of_the_slot(
    part: int, frame: int, chunks: int, rank: int, world_size: int, step: int, name: bytes
) -> None:
    """Its digest is right."""
    hostile = header_of()._replace(part_bytes=part, frame_bytes=frame, chunks=chunks, rank=rank, world_size=world_size)
    hostile = hostile._replace(step=step % 2**63, save_id=name.decode("latin-1").encode("ascii", "ignore").decode())
    found = read_header(encode_header(hostile), SIZE)
    if isinstance(found, SlotHeader):
        assert PART_OFFSET + found.part_bytes + found.content_bytes <= SIZE
        assert 0 <= found.rank < found.world_size
        assert found.save_id.isalnum()


def test_content_is_taken_only_with_its_digest() -> None:
    header, content = header_of(), encode_frame(FRAME) + DIGESTS
    found = decode_content(header, content)
    assert found is not None
    assert found.part.digests
    assert decode_content(header, content[:-1] + b"\0") is None
    assert decode_content(header, content[:-1]) is None
    other = header._replace(part_bytes=99)
    assert decode_content(other, content) is None
    garbage = msgspec.msgpack.encode([1]) + DIGESTS
    assert decode_content(header._replace(frame_bytes=2, content_digest=content_digest(garbage)), garbage) is None


@pytest.mark.parametrize("save_id", ["", "0123ABCD", "../0000a", "0123abcd0"])
def test_save_id_that_no_save_has_is_refused(save_id: str) -> None:
    assert read_header(encode_header(header_of(save_id=save_id)), SIZE) is SlotState.TORN
