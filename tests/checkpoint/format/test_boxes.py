from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.format import boxes
from forged.checkpoint.format.boxes import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    Box,
    Grid,
    Shape,
    chunk_bytes,
    chunk_count,
    chunk_lengths,
    chunks,
    chunks_within,
    grid_of,
    intersection,
    offset_in,
    subtract,
    whole,
)
from tests.checkpoint.fixtures.manifests import SMALL_SHAPES

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 40]), max_size=3).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
SMALLEST = st.sampled_from([1, 8, 64, CHUNK_BYTES_MIN])


@contextmanager
def chunks_from(smallest: int) -> Iterator[None]:
    """Use tiny chunks, so that small arrays have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "CHUNK_BYTES_MIN", smallest)
        yield


@st.composite
def within(draw: st.DrawFn, shape: Shape) -> Box:
    """A box in an array of that shape."""
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offset, strict=True)))


def places(box: Box) -> set[tuple[int, ...]]:
    """The indices of all elements of a box."""
    return set(product(*(range(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))))


@given(st.data(), SHAPES)
def test_the_intersection_contains_the_common_elements(data: st.DataObject, shape: Shape) -> None:
    a, b = data.draw(within(shape)), data.draw(within(shape))
    found = intersection(a, b)
    assert (places(found) if found else set()) == places(a) & places(b)
    if places(b):
        assert a.covers(b) == (places(b) <= places(a))


@given(st.data(), SHAPES)
def test_within_gives_the_index_of_a_box(data: st.DataObject, shape: Shape) -> None:
    outer = data.draw(within(shape))
    inner = data.draw(within(outer.shape))
    inner = Box(tuple(a + b for a, b in zip(outer.offset, inner.offset, strict=True)), inner.shape)
    array = np.arange(math.prod(shape)).reshape(shape)
    there = array[outer.within(whole(shape))][inner.within(outer)]
    assert there.tolist() == array[inner.within(whole(shape))].tolist()


@given(st.data(), SHAPES, ITEMSIZES, SMALLEST)
def test_chunks_follow_each_other_in_the_bytes_of_a_box(
    data: st.DataObject, shape: Shape, itemsize: int, smallest: int
) -> None:
    box = data.draw(within(shape))
    with chunks_from(smallest):
        grid = grid_of(shape, itemsize)
    array = np.arange(box.volume).reshape(box.shape)
    found = list(chunks(box, grid))
    together = [array[chunk.within(box)].reshape(-1) for chunk in found]
    assert np.concatenate([*together, np.array([], int)]).tolist() == array.reshape(-1).tolist()
    assert [chunk.volume * itemsize for chunk in found] == chunk_lengths(box, grid, itemsize)
    assert chunk_count(box, grid) == len(found)
    assert all(chunk.volume for chunk in found)


@given(st.data(), SHAPES, ITEMSIZES, SMALLEST)
def test_two_boxes_are_cut_at_the_same_places(data: st.DataObject, shape: Shape, itemsize: int, smallest: int) -> None:
    """Where both boxes have all of the uncut axes, their common elements lie in the same cells."""
    with chunks_from(smallest):
        grid = grid_of(shape, itemsize)
    cells = list(chunks(whole(shape), grid))
    box = data.draw(within(shape))
    for chunk in chunks(box, grid):
        over = [cell for cell in cells if intersection(cell, chunk)]
        assert len(over) == 1
        assert intersection(over[0], box) == chunk


@given(st.data(), SHAPES, ITEMSIZES, SMALLEST)
def test_chunks_within_gives_overlapping_chunks_with_their_numbers(
    data: st.DataObject, shape: Shape, itemsize: int, smallest: int
) -> None:
    box, wanted = data.draw(within(shape)), data.draw(within(shape))
    with chunks_from(smallest):
        grid = grid_of(shape, itemsize)
    expected = [(number, chunk) for number, chunk in enumerate(chunks(box, grid)) if intersection(chunk, wanted)]
    assert list(chunks_within(box, grid, wanted)) == expected


@given(st.lists(st.integers(1, 1 << 20), max_size=4).map(tuple), ITEMSIZES)
def test_no_chunk_exceeds_the_limit(shape: Shape, itemsize: int) -> None:
    grid = grid_of(shape, itemsize)
    if shape:
        row = math.prod(shape[grid.axis + 1 :]) * itemsize
        assert grid.step * row <= CHUNK_BYTES_MAX
        assert 1 <= grid.step <= shape[grid.axis]


@given(st.lists(st.integers(1, 1 << 10), max_size=3).map(tuple), ITEMSIZES)
def test_a_small_array_is_one_chunk(shape: Shape, itemsize: int) -> None:
    if math.prod(shape) * itemsize <= CHUNK_BYTES_MIN:
        assert chunk_count(whole(shape), grid_of(shape, itemsize)) == 1


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, CHUNK_BYTES_MIN),
        (1 << 23, CHUNK_BYTES_MIN),
        (10 << 20, CHUNK_BYTES_MIN),
        (1 << 26, 1 << 20),
        (1 << 40, CHUNK_BYTES_MAX),
    ],
)
def test_larger_arrays_have_larger_chunks(nbytes: int, expected: int) -> None:
    assert chunk_bytes(nbytes) == expected


@pytest.mark.parametrize(
    ("shape", "itemsize", "grid"),
    [
        ((), 8, Grid(0, 1)),
        ((0,), 4, Grid(0, 1)),
        ((1 << 28,), 4, Grid(0, 1 << 20)),
        ((4, 1 << 26), 4, Grid(1, 1 << 20)),
        ((2621, 1024), 4, Grid(0, 32)),
        ((5,), CHUNK_BYTES_MAX * 2, Grid(0, 1)),
    ],
)
def test_grid_of_examples(shape: Shape, itemsize: int, grid: Grid) -> None:
    assert grid_of(shape, itemsize) == grid


def test_chunks_of_a_huge_tensor_are_counted_without_listing() -> None:
    shape = (1 << 20, 1 << 20, 1 << 20)
    assert chunk_count(whole(shape), grid_of(shape, 1)) == 1 << 38


@given(data=st.data())
def test_subtract_gives_the_rest_without_overlap(data: st.DataObject) -> None:
    shape = data.draw(SMALL_SHAPES)
    outer = data.draw(within(shape))
    inner = data.draw(within(outer.shape))
    hole = Box(tuple(map(sum, zip(outer.offset, inner.offset, strict=True))), inner.shape)
    if not math.prod(hole.shape):
        return
    rest = [places(box) for box in subtract(outer, hole)]
    assert sum(map(len, rest)) == outer.volume - hole.volume
    assert set().union(*rest) == places(outer) - places(hole)


@given(data=st.data())
def test_offset_is_given_for_contiguous_elements_only(data: st.DataObject) -> None:
    shape = data.draw(SMALL_SHAPES.filter(lambda one: bool(math.prod(one))))
    outer = whole(shape)
    inner = data.draw(within(shape).filter(lambda box: bool(box.volume)))
    order = sorted(places(outer))
    indices = [order.index(one) for one in sorted(places(inner))]
    at = indices[0] if indices == list(range(indices[0], indices[-1] + 1)) else None
    assert offset_in(outer, inner) == at
