"""What is planned to be read: each element once, whole chunks, and no more than that."""

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
from forged.checkpoint.loading.read_plan import Index, Plan, Sheaf, offset_in, plan, without
from tests.checkpoint.layouts import partitions, small_chunks

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)))


def manifest_of(shapes: list[Shape], held: list[list[tuple[int, Box]]], stored: list[int] | None = None) -> Manifest:
    """A manifest of tensors of bytes, of which each part holds some boxes."""
    parts = []
    for rank, pieces in enumerate(held):
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
    return Manifest("a", 0.0, len(held), Tensors(names, ["uint8"] * len(shapes), shapes), States([], [], []), parts)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))))


def elements_read(index: Index, found: Plan, want: int, wanted: Box) -> list[tuple[int, ...]]:
    """The elements that a plan puts into a want, by what it says of each span."""
    read: list[tuple[int, ...]] = []
    in_order = list(
        product(*(range(start, start + size) for start, size in zip(wanted.offset, wanted.shape, strict=True)))
    )
    for number, sheaves in found.sheaves.items():
        layout = index.layout(number)
        for sheaf in sheaves:
            for chunk, its in zip(sheaf.chunks, sheaf.wants, strict=True):
                if its == want:
                    assert layout.box_of(chunk) == wanted
                    read += in_order
    for number, spans in found.spans.items():
        layout = index.layout(number)
        for span in (one for one in spans if one.want == want):
            length = layout.memory[span.end] - layout.memory[span.first]
            if span.taken is None or span.box is None:
                mine = [one for chunk in range(span.first, span.end) for one in sorted(elements(layout.box_of(chunk)))]
                assert mine == in_order[span.at : span.at + length]
                read += mine
            else:
                assert span.box.volume == length
                assert elements(span.box) == {
                    one for chunk in range(span.first, span.end) for one in elements(layout.box_of(chunk))
                }
                assert all(
                    elements(layout.box_of(chunk)) & elements(span.taken) for chunk in range(span.first, span.end)
                )
                read += elements(span.taken)
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
            held: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
            for tensor, shape in enumerate(shapes):
                for rank, box in enumerate(draw(partitions(shape, ranks))):
                    held[rank].append((tensor, box))
                held[draw(st.integers(0, ranks - 1))].append((tensor, draw(boxes_in(shape))))
            index = Index(manifest_of(shapes, held))
            boxes = {want: draw(boxes_in(shape)) for want, shape in enumerate(shapes) if draw(st.booleans())}
            strided = [want for want in range(len(shapes)) if draw(st.booleans())]
            found = plan(index, range(len(shapes)), boxes, strided=strided, rank=draw(st.integers(0, 3)))
            for want, shape in enumerate(shapes):
                wanted = boxes.get(want, whole(shape))
                assert sorted(elements_read(index, found, want, wanted)) == sorted(elements(wanted))
            assert found.needed == sum(boxes.get(want, whole(shape)).volume for want, shape in enumerate(shapes))
            assert all(span.at == -1 for spans in found.spans.values() for span in spans if span.want in strided)

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_spans_are_no_larger_than_a_block_unless_a_chunk_is(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES)
        with small_chunks(4, 16, 1):
            index = Index(manifest_of([shape], [[(0, whole(shape))]]))
            found = plan(index, [0], {0: data.draw(boxes_in(shape))})
            memory = index.layout(0).memory
            for span in found.spans.get(0, []):
                assert span.end - span.first == 1 or memory[span.end] - memory[span.first] <= 16

    def test_what_nobody_has_is_named_with_its_place(self) -> None:
        index = Index(manifest_of([(4, 4)], [[(0, Box((0, 0), (4, 2)))], [(0, Box((0, 2), (3, 2)))]]))
        with pytest.raises(CheckpointException) as caught:
            plan(index, [0], {})
        assert caught.value.code == "checkpoint_incomplete"
        assert "t0 from (3, 2) on with shape (1, 2)" in caught.value.message
        assert plan(index, [0], {0: Box((0, 0), (3, 4))}).needed == 12

    def test_a_tensor_without_elements_needs_nobody_to_have_it(self) -> None:
        assert plan(Index(manifest_of([(0, 3)], [[]])), [0], {}) == Plan({}, {}, 0)

    def test_readers_take_turns_among_copies(self) -> None:
        index = Index(manifest_of([(8,)], [[(0, whole((8,)))] for _ in range(3)]))
        assert [[*plan(index, [0], {}, rank=rank).sheaves] for rank in range(4)] == [[0], [1], [2], [0]]

    def test_readers_of_parts_take_turns_too(self) -> None:
        index = Index(manifest_of([(8,)], [[(0, Box((0,), (4,)))], [(0, Box((0,), (4,)))], [(0, Box((4,), (4,)))]]))
        for box in (Box((0,), (4,)), Box((0,), (2,))):
            assert [[*plan(index, [0], {0: box}, rank=rank).spans] for rank in range(3)] == [[0], [1], [0]]

    def test_parts_that_leave_ever_more_fragments_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(read_plan, "FRAGMENTS_MAX", 20)
        pieces = [(0, Box((row, column), (1, 1))) for row in range(1, 19, 2) for column in range(1, 19, 2)]
        with pytest.raises(CheckpointException) as caught:
            plan(Index(manifest_of([(20, 20)], [[*pieces]])), [0], {})
        assert caught.value.code == "checkpoint_parts_scattered"

    def test_small_neighbours_are_bound_in_a_sheaf_as_far_as_a_block_goes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(read_plan, "READ_BYTES_MAX", 10)
        shapes: list[Shape] = [(4,)] * 5
        index = Index(manifest_of(shapes, [[(tensor, whole((4,))) for tensor in range(5)]]))
        found = plan(index, [4, 3, 2, 1, 0], {})
        assert found.sheaves == {0: [Sheaf([0, 1], [4, 3]), Sheaf([2, 3], [2, 1]), Sheaf([4], [0])]}

    def test_a_wide_gap_ends_a_sheaf(self) -> None:
        shapes: list[Shape] = [(4,), (read_plan.GAP_BYTES_MAX + 1,), (4,)]
        index = Index(manifest_of(shapes, [[(tensor, whole(shape)) for tensor, shape in enumerate(shapes)]]))
        assert plan(index, [0, 2], {}).sheaves == {0: [Sheaf([0], [0]), Sheaf([2], [1])]}

    def test_many_small_tensors_make_few_objects(self) -> None:
        shapes: list[Shape] = [(16,)] * 1_000
        index = Index(manifest_of(shapes, [[(tensor, whole((16,))) for tensor in range(1_000)]]))
        assert len(plan(index, range(1_000), {}).sheaves[0]) == 1


class TestLayout:
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_it_knows_where_each_chunk_is_and_what(self, data: st.DataObject) -> None:
        with small_chunks(4, 64, 1):
            shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
            pieces = [(tensor, data.draw(boxes_in(shape))) for tensor, shape in enumerate(shapes)]
            layout = Index(manifest_of(shapes, [pieces])).layout(0)
            at = 7
            number = 0
            for place, (tensor, box) in enumerate(pieces):
                for chunk in chunks(box, grid_of(shapes[tensor], 1)):
                    assert layout.starts[number] == at
                    assert layout.box_of(number) == chunk
                    assert (layout.place_of(number), layout.tensor_of(number)) == (place, tensor)
                    at, number = at + chunk.volume, number + 1
            assert (layout.starts[-1], layout.chunks) == (at, number)

    def test_chunks_that_grow_when_packed_are_refused(self) -> None:
        manifest = manifest_of([(8,)], [[(0, whole((8,)))]], stored=[9])
        with pytest.raises(CheckpointException) as caught:
            Index(manifest).layout(0)
        assert caught.value.code == "checkpoint_manifest_malformed"


class TestBoxes:
    @given(data=st.data())
    def test_a_box_without_a_part_of_it_is_the_rest(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES)
        outer = data.draw(boxes_in(shape))
        inner = data.draw(boxes_in(outer.shape))
        hole = Box(tuple(map(sum, zip(outer.offset, inner.offset, strict=True))), inner.shape)
        if not math.prod(hole.shape):
            return
        rest = [elements(box) for box in without(outer, hole)]
        assert sum(map(len, rest)) == outer.volume - hole.volume
        assert set().union(*rest) == elements(outer) - elements(hole)

    @given(data=st.data())
    def test_an_offset_is_told_where_the_elements_lie_together(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES.filter(lambda one: bool(math.prod(one))))
        outer = whole(shape)
        inner = data.draw(boxes_in(shape).filter(lambda box: bool(box.volume)))
        order = sorted(elements(outer))
        places = [order.index(one) for one in sorted(elements(inner))]
        at: Any = places[0] if places == list(range(places[0], places[-1] + 1)) else None
        assert offset_in(outer, inner) == at
