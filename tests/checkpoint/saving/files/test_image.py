"""The image of a part has the bytes of its file for any memory layout of the arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forged.checkpoint.format.boxes import Box, chunk_lengths, chunks, grid_of, whole
from forged.checkpoint.format.tree import Leaf, flatten
from forged.checkpoint.ports import BLOCK_BYTES
from forged.checkpoint.saving.files.image import ArrayImage, blocks, layout_of, slice_of
from forged.checkpoint.saving.files.parts import FILE_METADATA, image_of
from forged.checkpoint.saving.files.plan import Description, plan

Array = np.ndarray[Any, Any]


def image(*arrays: Array) -> ArrayImage:
    """What one rank that has these would write."""
    leaves = flatten(list(arrays))[1]
    return image_of(plan([Description.of(leaves)]), 0, leaves)


def written(one: ArrayImage, backwards: bool = False) -> bytes:
    """The file, taken block by block."""
    data = bytearray(one.size)
    for offset in reversed(blocks(one.size)) if backwards else blocks(one.size):
        room = memoryview(bytearray(b"\xaa" * BLOCK_BYTES))
        block = one.block(offset, room)
        data[offset : offset + len(block)] = block
    return bytes(data)


def plainly(arrays: Sequence[Array]) -> bytes:
    """What stands behind the header."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def part(array: Array, slices: Sequence[slice]) -> Array:
    """Part of an array; of one without axes, too."""
    where: Any = (*slices, ...)
    found: Array = array[where]
    return found


def digests(arrays: Sequence[Array]) -> bytes:
    """The checksums of all chunks, worked out from the arrays."""
    return b"".join(
        xxhash.xxh3_128_digest(part(array, chunk.within(whole(array.shape))).tobytes())
        for array in arrays
        for chunk in chunks(whole(array.shape), grid_of(array.shape, array.itemsize))
    )


def check(*arrays: Array) -> None:
    one = image(*arrays)
    data = written(one)
    assert data == one.layout.header + plainly(arrays)
    assert bytes(one.digests) == digests(arrays)


dtypes = st.one_of(
    st.sampled_from(["?", "u1", "<i2", ">i4", "<f4", ">f8", "<c16", "S5", "U3", "<M8[ns]", "m8[s]", "S0", "U0", "V3"]),
    st.sampled_from([ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]),
).map(np.dtype)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Arrays of any type and shape, turned, sliced, reversed, broadcast, or in Fortran's order."""
    dtype, shape = draw(dtypes), draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    array = np.frombuffer(raw, dtype).reshape(shape) if count else np.empty(shape, dtype)
    match draw(st.integers(0, 5)):
        case 1:
            array = array.T
        case 2:
            array = part(array, [slice(None, None, draw(st.sampled_from([1, 2, -1]))) for _ in shape])
        case 3:
            array = np.asfortranarray(array)
        case 4:
            array = np.broadcast_to(array, (3, *array.shape))
        case 5:
            array = np.moveaxis(array, 0, -1) if array.ndim else array
    return array


@settings(deadline=None)
@given(st.lists(arrays(), max_size=6))
def test_a_file_is_its_header_and_the_bytes_of_its_arrays(some: list[Array]) -> None:
    check(*some)


@settings(deadline=None, max_examples=10)
@given(st.lists(arrays(), max_size=3), st.integers(0, 3), st.data())
def test_it_makes_no_difference_where_a_block_ends(some: list[Array], place: int, data: st.DataObject) -> None:
    """With an array between the small ones that is nearly, or just, or a little more than a block long."""
    long = np.arange(BLOCK_BYTES + data.draw(st.integers(-4200, 4200)), dtype=np.uint8)
    check(*some[:place], long, *some[place:])


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_may_span_many_blocks(order: Any) -> None:
    large = np.arange(3 * BLOCK_BYTES // 4 + 77 * 3, dtype=np.int32).reshape(3, -1).copy(order)
    check(np.zeros(3), large, np.ones(5))


def test_blocks_may_be_taken_in_any_order_and_more_than_once() -> None:
    some = [np.arange(BLOCK_BYTES // 2, dtype=np.int32), np.arange(9.0), np.arange(BLOCK_BYTES // 4, dtype=np.int32)]
    one = image(*some)
    assert written(one, backwards=True) == written(one) == one.layout.header + plainly(some)
    assert bytes(one.digests) == digests(some)


def test_ten_thousand_small_arrays() -> None:
    check(*(np.full(n % 300, n, np.int32) for n in range(10_000)))


def test_small_arrays_that_do_not_lie_in_a_row() -> None:
    grid = np.arange(40_000).reshape(200, 200)
    check(*(grid[:, n] for n in range(200)), *(grid[n:, ::3] for n in range(50)))


def test_strings_without_a_byte_have_a_checksum_wherever_they_lie() -> None:
    empty = np.empty(3, "S0")
    upto = BLOCK_BYTES - len(image(empty, np.zeros(8, np.uint8), empty).layout.header)
    check(empty, np.zeros(upto, np.uint8), empty, np.zeros(3), empty)
    check(empty)


def test_nothing_at_all_is_a_header() -> None:
    one = image()
    assert written(one) == one.layout.header
    assert bytes(one.digests) == b""


def test_the_pieces_begin_at_a_page() -> None:
    for count in (0, 1, 50, 500):
        assert len(image(*(np.zeros(n) for n in range(count))).layout.header) % 4096 == 0


def test_a_part_of_an_array_has_the_chunks_of_the_whole() -> None:
    """Its bytes are hashed between the same edges, wherever it begins."""
    held, wanted, shape = Box((100, 0), (700, 100)), Box((333, 0), (401, 100)), (1000, 100)
    array = np.arange(70_000.0).reshape(700, 100)
    leaf = Leaf("w", array, shape, False, held)
    description = Description(["w"], ["float64"], [shape], {0: (held.offset, held.shape)}, [])
    rest = [Box((0, 0), (100, 100)), Box((800, 0), (200, 100))]
    remaining = [Description(["w"], ["float64"], [shape], {0: (box.offset, box.shape)}, []) for box in rest]
    made = plan([description, *remaining])
    made.shares[0].boxes[0] = wanted
    one = ArrayImage(layout_of(made.tensors, made.shares[0], FILE_METADATA), [slice_of(leaf.array, held, wanted)])
    raw = np.ascontiguousarray(array[233:634]).tobytes()
    assert written(one) == one.layout.header + raw
    lengths = chunk_lengths(wanted, grid_of(shape, 8), 8)
    assert len(lengths) > 2
    at = 0
    for number, length in enumerate(lengths):
        assert bytes(one.digests[16 * number : 16 * number + 16]) == xxhash.xxh3_128_digest(raw[at : at + length])
        at += length


@settings(deadline=None)
@given(arrays())
def test_a_chunk_can_be_had_by_itself(array: Array) -> None:
    one = image(array)
    raw, at = plainly([array]), 0
    for length in one.layout.lengths_of(0) if one.layout.chunks else ():
        assert one.chunk(0, at, length).tobytes() == raw[at : at + length]
        at += length
