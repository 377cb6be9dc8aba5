"""A read plan covers each element once, in whole chunks, and reads nothing else."""

from __future__ import annotations

import base64
import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import Box, Shape, chunk_lengths, chunks, grid_of, whole
from forged.checkpoint.format.manifest import Manifest, Part, Tensors, deduplicate_boxes
from forged.checkpoint.format.states import States
from forged.checkpoint.loading import read_plan
from forged.checkpoint.loading.read_plan import ChunkBatch, Index, ReadPlan, offset_in, plan, subtract
from tests.checkpoint.fixtures.layouts import partitions, small_chunks

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)))


def manifest_of(
    shapes: list[Shape], pieces_of_parts: list[list[tuple[int, Box]]], stored: list[int] | None = None
) -> Manifest:
    """A manifest of tensors of bytes, of which each part holds some boxes."""
    parts = []
    for rank, pieces in enumerate(pieces_of_parts):
        lengths = [chunk_lengths(box, grid_of(shapes[tensor], 1), 1) for tensor, box in pieces]
        count, size = sum(map(len, lengths)), sum(map(sum, lengths))
        boxes: dict[int, Any] = {
            place: box for place, (tensor, box) in enumerate(pieces) if box != whole(shapes[tensor])
        }
        digests = base64.b64encode(bytes(16 * count)).decode()
        tensors = [tensor for tensor, _ in pieces]
        parts.append(
            Part(f"a/{rank}", rank, size + 7, 7, tensors, *deduplicate_boxes(boxes, len(tensors)), digests, "", stored)
        )
    names = [f"t{number}" for number in range(len(shapes))]
    return Manifest(
        "a", 0.0, len(pieces_of_parts), Tensors(names, ["uint8"] * len(shapes), shapes), States([], [], []), parts
    )


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))))


def elements_read(index: Index, reads: ReadPlan, target: int, wanted: Box) -> list[tuple[int, ...]]:
    """The elements that a plan puts into a target, according to its spans."""
    read: list[tuple[int, ...]] = []
    in_order = list(
        product(*(range(start, start + size) for start, size in zip(wanted.offset, wanted.shape, strict=True)))
    )
    for number, batches in reads.batches.items():
        layout = index.layout(number)
        for batch in batches:
            for chunk, its in zip(batch.chunks, batch.targets, strict=True):
                if its == target:
                    assert layout.chunk_box(chunk) == wanted
                    read += in_order
    for number, spans in reads.spans.items():
        layout = index.layout(number)
        for span in (one for one in spans if one.target == target):
            length = layout.memory_offsets[span.end] - layout.memory_offsets[span.first]
            if span.shared is None or span.box is None:
                mine = [
                    one for chunk in range(span.first, span.end) for one in sorted(elements(layout.chunk_box(chunk)))
                ]
                assert mine == in_order[span.at : span.at + length]
                read += mine
            else:
                assert span.box.volume == length
                assert elements(span.box) == {
                    one for chunk in range(span.first, span.end) for one in elements(layout.chunk_box(chunk))
                }
                assert all(
                    elements(layout.chunk_box(chunk)) & elements(span.shared) for chunk in range(span.first, span.end)
                )
                read += elements(span.shared)
    return read


class TestPlan:
    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_every_wanted_element_comes_from_one_chunk(self, data: st.DataObject) -> None:
        draw = data.draw
        with small_chunks(
            draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([8, 64])), draw(st.sampled_from([1, 32]))
        ):
            shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
            ranks = draw(st.integers(1, 4))
            pieces: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
            for tensor, shape in enumerate(shapes):
                for rank, box in enumerate(draw(partitions(shape, ranks))):
                    pieces[rank].append((tensor, box))
                pieces[draw(st.integers(0, ranks - 1))].append((tensor, draw(boxes_in(shape))))
            index = Index(manifest_of(shapes, pieces))
            boxes = {target: draw(boxes_in(shape)) for target, shape in enumerate(shapes) if draw(st.booleans())}
            strided = [target for target in range(len(shapes)) if draw(st.booleans())]
            reads = plan(index, range(len(shapes)), boxes, strided=strided, rank=draw(st.integers(0, 3)))
            for target, shape in enumerate(shapes):
                wanted = boxes.get(target, whole(shape))
                assert sorted(elements_read(index, reads, target, wanted)) == sorted(elements(wanted))
            assert reads.bytes_needed == sum(
                boxes.get(target, whole(shape)).volume for target, shape in enumerate(shapes)
            )
            assert all(span.at == -1 for spans in reads.spans.values() for span in spans if span.target in strided)

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_spans_are_no_larger_than_a_block_unless_a_chunk_is(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES)
        with small_chunks(4, 16, 1):
            index = Index(manifest_of([shape], [[(0, whole(shape))]]))
            reads = plan(index, [0], {0: data.draw(boxes_in(shape))})
            memory_offsets = index.layout(0).memory_offsets
            for span in reads.spans.get(0, []):
                assert span.end - span.first == 1 or memory_offsets[span.end] - memory_offsets[span.first] <= 16

    def test_a_box_that_no_part_has_is_named_with_its_offset(self) -> None:
        index = Index(manifest_of([(4, 4)], [[(0, Box((0, 0), (4, 2)))], [(0, Box((0, 2), (3, 2)))]]))
        with pytest.raises(CheckpointException) as caught:
            plan(index, [0], {})
        assert caught.value.code == "checkpoint_incomplete"
        assert "t0 from (3, 2) on with shape (1, 2)" in caught.value.message
        assert plan(index, [0], {0: Box((0, 0), (3, 4))}).bytes_needed == 12

    def test_an_empty_tensor_needs_no_part(self) -> None:
        assert plan(Index(manifest_of([(0, 3)], [[]])), [0], {}) == ReadPlan({}, {}, 0)

    def test_ranks_read_different_copies(self) -> None:
        index = Index(manifest_of([(8,)], [[(0, whole((8,)))] for _ in range(3)]))
        assert [[*plan(index, [0], {}, rank=rank).batches] for rank in range(4)] == [[0], [1], [2], [0]]

    def test_ranks_read_different_copies_of_partial_pieces(self) -> None:
        index = Index(manifest_of([(8,)], [[(0, Box((0,), (4,)))], [(0, Box((0,), (4,)))], [(0, Box((4,), (4,)))]]))
        for box in (Box((0,), (4,)), Box((0,), (2,))):
            assert [[*plan(index, [0], {0: box}, rank=rank).spans] for rank in range(3)] == [[0], [1], [0]]

    def test_too_many_scattered_boxes_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(read_plan, "FRAGMENTS_MAX", 20)
        pieces = [(0, Box((row, column), (1, 1))) for row in range(1, 19, 2) for column in range(1, 19, 2)]
        with pytest.raises(CheckpointException) as caught:
            plan(Index(manifest_of([(20, 20)], [[*pieces]])), [0], {})
        assert caught.value.code == "checkpoint_parts_scattered"

    def test_small_neighbours_are_batched_up_to_a_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(read_plan, "READ_BYTES_MAX", 10)
        shapes: list[Shape] = [(4,)] * 5
        index = Index(manifest_of(shapes, [[(tensor, whole((4,))) for tensor in range(5)]]))
        reads = plan(index, [4, 3, 2, 1, 0], {})
        assert reads.batches == {0: [ChunkBatch([0, 1], [4, 3]), ChunkBatch([2, 3], [2, 1]), ChunkBatch([4], [0])]}

    def test_a_wide_gap_ends_a_batch(self) -> None:
        shapes: list[Shape] = [(4,), (read_plan.GAP_BYTES_MAX + 1,), (4,)]
        index = Index(manifest_of(shapes, [[(tensor, whole(shape)) for tensor, shape in enumerate(shapes)]]))
        assert plan(index, [0, 2], {}).batches == {0: [ChunkBatch([0], [0]), ChunkBatch([2], [1])]}

    def test_a_thousand_small_tensors_make_one_batch(self) -> None:
        shapes: list[Shape] = [(16,)] * 1_000
        index = Index(manifest_of(shapes, [[(tensor, whole((16,))) for tensor in range(1_000)]]))
        assert len(plan(index, range(1_000), {}).batches[0]) == 1


class TestLayout:
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_layout_gives_offset_box_piece_and_tensor_of_each_chunk(self, data: st.DataObject) -> None:
        with small_chunks(4, 64, 1):
            shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
            pieces = [(tensor, data.draw(boxes_in(shape))) for tensor, shape in enumerate(shapes)]
            layout = Index(manifest_of(shapes, [pieces])).layout(0)
            at = 7
            number = 0
            for place, (tensor, box) in enumerate(pieces):
                for chunk in chunks(box, grid_of(shapes[tensor], 1)):
                    assert layout.file_offsets[number] == at
                    assert layout.chunk_box(number) == chunk
                    assert (layout.piece_of(number), layout.tensor_of(number)) == (place, tensor)
                    at, number = at + chunk.volume, number + 1
            assert (layout.file_offsets[-1], layout.chunks) == (at, number)

    def test_chunks_larger_in_the_file_than_in_memory_are_refused(self) -> None:
        manifest = manifest_of([(8,)], [[(0, whole((8,)))]], stored=[9])
        with pytest.raises(CheckpointException) as caught:
            Index(manifest).layout(0)
        assert caught.value.code == "checkpoint_manifest_malformed"


class TestBoxes:
    @given(data=st.data())
    def test_subtract_gives_the_rest_without_overlap(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES)
        outer = data.draw(boxes_in(shape))
        inner = data.draw(boxes_in(outer.shape))
        hole = Box(tuple(map(sum, zip(outer.offset, inner.offset, strict=True))), inner.shape)
        if not math.prod(hole.shape):
            return
        rest = [elements(box) for box in subtract(outer, hole)]
        assert sum(map(len, rest)) == outer.volume - hole.volume
        assert set().union(*rest) == elements(outer) - elements(hole)

    @given(data=st.data())
    def test_offset_is_given_for_contiguous_elements_only(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES.filter(lambda one: bool(math.prod(one))))
        outer = whole(shape)
        inner = data.draw(boxes_in(shape).filter(lambda box: bool(box.volume)))
        order = sorted(elements(outer))
        places = [order.index(one) for one in sorted(elements(inner))]
        at: Any = places[0] if places == list(range(places[0], places[-1] + 1)) else None
        assert offset_in(outer, inner) == at
