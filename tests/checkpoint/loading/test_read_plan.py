"""A read plan covers each element once, in whole chunks, and reads nothing else."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import Box, Shape, intersection, whole
from forged.checkpoint.loading import read_plan
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.loading.read_plan import ChunkBatch, ReadPlan, plan
from tests.checkpoint.fixtures.layouts import partitions, small_chunks
from tests.checkpoint.fixtures.manifests import SMALL_SHAPES, boxes_in, manifest_of


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
            shapes = draw(st.lists(SMALL_SHAPES, min_size=1, max_size=3))
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

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_rows_of_a_tensor_may_lie_in_many_pieces_of_many_parts(self, data: st.DataObject) -> None:
        draw = data.draw
        pieces: list[list[tuple[int, Box]]] = [[], [], []]
        shapes: list[Shape] = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=3))
        lacking: list[tuple[int, Box]] = []
        for tensor, (height, width) in enumerate(shapes):
            cuts = sorted(draw(st.sets(st.integers(1, height - 1)))) if height > 1 else []
            for low, high in pairwise([0, *cuts, height]):
                box = Box((low, 0), (high - low, width))
                if draw(st.integers(0, 19)):
                    pieces[draw(st.integers(0, 2))].append((tensor, box))
                else:
                    lacking.append((tensor, box))
        for of_part in pieces:
            of_part.sort()
        with small_chunks(draw(st.sampled_from([1, 4])), draw(st.sampled_from([4, 64])), 1):
            index = Index(manifest_of(shapes, pieces))
            boxes = {target: draw(boxes_in(shape)) for target, shape in enumerate(shapes) if draw(st.booleans())}
            wanted_boxes = [boxes.get(target, whole(shape)) for target, shape in enumerate(shapes)]
            if any(intersection(wanted_boxes[tensor], box) for tensor, box in lacking):
                with pytest.raises(CheckpointException, match="lacks"):
                    plan(index, range(len(shapes)), boxes)
                return
            reads = plan(index, range(len(shapes)), boxes)
            for target, wanted in enumerate(wanted_boxes):
                assert sorted(elements_read(index, reads, target, wanted)) == sorted(elements(wanted))

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_spans_are_no_larger_than_a_block_unless_a_chunk_is(self, data: st.DataObject) -> None:
        shape = data.draw(SMALL_SHAPES)
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
        shapes: list[Shape] = [(4,), (11,), (4,)]
        index = Index(manifest_of(shapes, [[(tensor, whole(shape)) for tensor, shape in enumerate(shapes)]]))
        assert plan(index, [0, 2], {}, gap_bytes_max=10).batches == {0: [ChunkBatch([0], [0]), ChunkBatch([2], [1])]}
        assert plan(index, [0, 2], {}, gap_bytes_max=11).batches == {0: [ChunkBatch([0, 2], [0, 1])]}

    def test_a_thousand_small_tensors_make_one_batch(self) -> None:
        shapes: list[Shape] = [(16,)] * 1_000
        index = Index(manifest_of(shapes, [[(tensor, whole((16,))) for tensor in range(1_000)]]))
        assert len(plan(index, range(1_000), {}).batches[0]) == 1
