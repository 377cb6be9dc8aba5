"""Save plans for worlds of any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.boxes import Box, Shape, grid_of, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.tree import flatten
from forged.checkpoint.model import PerRank, ShardedArray
from forged.checkpoint.saving.files.plan import UNSPLIT_BYTES_MAX, Description, SavePlan, plan

DTYPES = st.sampled_from(["uint8", "float32", "bfloat16", "complex128", "|S5"])


def described(*arrays: tuple[str, str, Shape, Box | None], private: Sequence[int] = ()) -> Description:
    """What a rank says of arrays: name, type, whole shape, and the part that it has."""
    return Description(
        [name for name, *_ in arrays],
        [dtype for _, dtype, *_ in arrays],
        [shape for _, _, shape, _ in arrays],
        {number: (part.offset, part.shape) for number, (*_, part) in enumerate(arrays) if part is not None},
        list(private),
    )


def described_state(state: object) -> Description:
    return Description.of(flatten(state)[1])


def written(made: SavePlan, tensor: int) -> list[tuple[int, Box]]:
    """The boxes of a tensor with the ranks that write them."""
    shape = tuple(made.tensors.shapes[tensor])
    return [
        (rank, share.box(place, shape))
        for rank, share in enumerate(made.shares)
        for place, number in enumerate(share.tensors)
        if number == tensor
    ]


def times_covered(shape: Shape, boxes: Iterable[Box]) -> tuple[int, int]:
    """How often the elements of an array lie in the boxes: the least and the most."""
    boxes = [box for box in boxes if box.volume]
    edges = [
        sorted({0, size, *(e for b in boxes for e in (b.offset[a], b.offset[a] + b.shape[a]))})
        for a, size in enumerate(shape)
    ]
    counts = [
        sum(all(o <= corner < o + s for o, s, corner in zip(box.offset, box.shape, cell, strict=True)) for box in boxes)
        for cell in product(*(one[:-1] for one in edges))
    ]
    return min(counts, default=0), max(counts, default=0)


def bytes_of(made: SavePlan, rank: int) -> int:
    share, tensors = made.shares[rank], made.tensors
    return sum(
        share.box(place, tuple(tensors.shapes[number])).volume * dtype_of(tensors.dtypes[number]).itemsize
        for place, number in enumerate(share.tensors)
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Small and large shapes, with empty and uneven axes."""
    axes = draw(st.integers(0, 3))
    return tuple(draw(st.one_of(st.integers(0, 5), st.integers(1, 700))) for _ in range(axes))


@st.composite
def slabs(draw: st.DrawFn, shape: Shape, parts: int) -> list[Box]:
    """An array cut along one axis into so many parts, some of which may be empty."""
    axis = draw(st.integers(0, len(shape) - 1))
    edges = [
        0,
        *sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=parts - 1, max_size=parts - 1))),
        shape[axis],
    ]
    found = []
    for start, end in pairwise(edges):
        offset, size = [0] * len(shape), list(shape)
        offset[axis], size[axis] = start, end - start
        found.append(Box(tuple(offset), tuple(size)))
    return found


@st.composite
def worlds(draw: st.DrawFn) -> list[Description]:
    """What some ranks have: copies, parts along any axis, groups that have parts alike, and things of their own."""
    ranks = draw(st.integers(1, 5))
    holdings: list[list[tuple[str, str, Shape, Box | None]]] = [[] for _ in range(ranks)]
    own: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 6))):
        name, dtype, shape = f"t{number}", draw(DTYPES), draw(shapes())
        kind = draw(st.sampled_from(["copies", "some", "private", "parts", "groups"]))
        holders = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
        if kind == "copies" or not shape or kind == "some":
            parts: list[Box | None] = [None] * ranks
        elif kind == "private":
            parts = [None] * ranks
            for rank in holders:
                own[rank].append(len(holdings[rank]))
        else:
            groups = ranks if kind == "parts" else draw(st.integers(1, ranks))
            boxes = draw(slabs(shape, groups))
            parts = [boxes[rank % groups] for rank in range(ranks)]
        has_all = kind not in {"some", "private"}
        for rank in range(ranks) if has_all else holders:
            holdings[rank].append((name, dtype, shape, parts[rank]))
    return [described(*mine, private=its) for mine, its in zip(holdings, own, strict=True)]


@settings(deadline=None)
@given(worlds(), st.integers(1, 3))
def test_every_element_of_every_tensor_is_written(world: list[Description], copies: int) -> None:
    made = plan(world, copies)
    for number, shape in enumerate(made.tensors.shapes):
        if math.prod(shape):
            assert times_covered(tuple(shape), (box for _, box in written(made, number)))[0] >= 1


@settings(deadline=None)
@given(worlds(), st.integers(1, 3))
def test_rank_writes_only_boxes_it_holds_and_none_twice(world: list[Description], copies: int) -> None:
    made = plan(world, copies)
    for number in range(len(made.tensors.names)):
        boxes = written(made, number)
        assert len(set(boxes)) == len(boxes)
        for rank, box in boxes:
            held = world[rank].box(made.numbers[rank].index(number))
            assert held.covers(box) or not box.volume


@settings(deadline=None)
@given(worlds(), st.integers(1, 8))
def test_replicated_box_is_written_once_per_copy(world: list[Description], copies: int) -> None:
    made = plan(world, copies)
    for number, shape in enumerate(made.tensors.shapes):
        holders = [rank for rank, its in enumerate(made.numbers) if number in its]
        are_copies = all(made.numbers[rank].index(number) not in world[rank].boxes for rank in holders)
        if are_copies and whole(shape).volume:
            wanted = min(copies, len(holders))
            assert times_covered(tuple(shape), (box for _, box in written(made, number))) == (wanted, wanted)


@settings(deadline=None)
@given(st.lists(st.tuples(DTYPES, shapes()), min_size=1, max_size=12), st.integers(1, 6))
def test_ranks_that_have_the_same_write_equally_much(arrays: list[tuple[str, Shape]], ranks: int) -> None:
    world = [described(*((f"t{n}", dtype, shape, None) for n, (dtype, shape) in enumerate(arrays)))] * ranks
    made = plan(world)
    total = sum(whole(shape).volume * dtype_of(dtype).itemsize for dtype, shape in arrays)
    unit = UNSPLIT_BYTES_MAX
    for dtype, shape in arrays:
        grid, itemsize = grid_of(shape, dtype_of(dtype).itemsize), dtype_of(dtype).itemsize
        row = math.prod(shape[1:]) * itemsize
        unit = max(unit, row * grid.step if shape and grid.axis == 0 else row)
    for rank in range(ranks):
        assert abs(bytes_of(made, rank) - total / ranks) <= unit


@settings(deadline=None)
@given(worlds())
def test_per_rank_value_is_written_by_its_rank_only(world: list[Description]) -> None:
    made = plan(world)
    for rank, description in enumerate(world):
        for place in description.private:
            number = made.numbers[rank][place]
            assert made.tensors.ranks[number] == rank
            assert [writer for writer, _ in written(made, number)] == [rank]
            assert sum(number in its for its in made.numbers) == 1


@settings(deadline=None)
@given(worlds(), st.integers(1, 3))
def test_plan_survives_encoding(world: list[Description], copies: int) -> None:
    made = plan(world, copies)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SavePlan) == plan(world, copies)


@settings(deadline=None)
@given(worlds())
def test_manifest_records_the_boxes_of_each_rank(world: list[Description]) -> None:
    made = plan(world)
    if not any(description.boxes for description in world):
        assert (made.tensors.splits, made.tensors.split_of) == ([], {})
        return
    told = {
        (rank, tensor): box
        for tensor, split in made.tensors.split_of.items()
        for rank, box in made.tensors.splits[split].items()
    }
    assert told == {
        (rank, made.numbers[rank][place]): box
        for rank, description in enumerate(world)
        for place, box in description.boxes.items()
    }


def test_equal_splits_share_one_entry() -> None:
    def rank_at(rank: int) -> Description:
        half, column = Box((2 * rank, 0), (2, 3)), Box((0, rank), (4, 2 - rank))
        return described(("a", "int8", (4, 3), half), ("b", "float64", (4, 3), half), ("c", "int8", (4, 2), column))

    tensors = plan([rank_at(0), rank_at(1)]).tensors
    assert tensors.split_of == {0: 0, 1: 0, 2: 1}
    assert tensors.splits[0] == {0: ((0, 0), (2, 3)), 1: ((2, 0), (2, 3))}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_an_array_of_which_a_part_is_missing_is_refused(ranks: int) -> None:
    boxes = [Box((rank, 0), (1, 3)) for rank in range(ranks)]
    with pytest.raises(CheckpointException, match="boxes of w do not cover") as caught:
        plan([described(("w", "float32", (ranks + 1, 3), box)) for box in boxes])
    assert (caught.value.code, caught.value.type) == ("checkpoint_incomplete", ExceptionType.VALIDATION_FAILED)


def test_overlapping_boxes_do_not_cover_a_gap() -> None:
    boxes = [Box((0,), (6,)), Box((2,), (6,))]
    with pytest.raises(CheckpointException, match="do not cover"):
        plan([described(("w", "float32", (10,), box)) for box in boxes])


def test_parts_that_overlap_are_taken_if_nothing_is_missing() -> None:
    boxes = [Box((0,), (6,)), Box((4,), (6,))]
    made = plan([described(("w", "float32", (10,), box)) for box in boxes])
    assert written(made, 0) == list(enumerate(boxes))


def test_a_hole_in_the_middle_is_found() -> None:
    ring = [Box((0, 0), (1, 3)), Box((2, 0), (1, 3)), Box((1, 0), (1, 1)), Box((1, 2), (1, 1)), Box((0, 0), (2, 1))]
    with pytest.raises(CheckpointException, match="do not cover"):
        plan([described(("w", "float32", (3, 3), box)) for box in ring])


def test_boxes_with_too_fine_a_grid_are_refused_unless_one_covers_all() -> None:
    sizes = range(1, 80)
    boxes = [Box((0,) * 4, (size,) * 4) for size in sizes] + [Box((size,) * 4, (80 - size,) * 4) for size in sizes]
    with pytest.raises(CheckpointException, match="divide it into"):
        plan([described(("w", "uint8", (80,) * 4, box)) for box in boxes])
    made = plan([described(("w", "uint8", (80,) * 4, box)) for box in [*boxes, whole((80,) * 4)]])
    assert times_covered((80,) * 4, [written(made, 0)[-1][1]]) == (1, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("w", "float32", (3,), None), ("w", "float64", (3,), None)),
        (("w", "float32", (3,), None), ("w", "float32", (4,), None)),
    ],
)
def test_error_names_the_array_that_differs_and_how(
    first: tuple[str, str, Shape, None], second: tuple[str, str, Shape, None]
) -> None:
    with pytest.raises(CheckpointException, match=r"w is float.* at rank 2, but float32 \(3,\) at rank 0") as caught:
        plan([described(first), described(first), described(second)])
    assert caught.value.code == "checkpoint_ranks_differ"
    assert "ShardedArray" in caught.value.fix


def test_tensor_of_one_rank_is_written_by_that_rank() -> None:
    made = plan([described(("a", "uint8", (3,), None)), described(("b", "uint8", (3,), None))])
    assert [written(made, number) for number in range(2)] == [[(0, whole((3,)))], [(1, whole((3,)))]]


def test_a_large_value_without_axes_is_not_cut() -> None:
    huge = described(("s", f"|S{4 * UNSPLIT_BYTES_MAX}", (), None))
    assert [box for _, box in written(plan([huge] * 3), 0)] == [whole(())]


def test_empty_descriptions_give_empty_shares() -> None:
    assert [share.tensors for share in plan([described()] * 3).shares] == [[], [], []]


def test_generators_of_several_ranks_stay_apart_though_they_draw_the_same() -> None:
    state = {"rng": PerRank({"keys": np.zeros(3)}), "w": np.zeros(3)}
    made = plan([described_state(state)] * 2)
    assert made.tensors.names.count("rng/keys") == 2
    assert made.tensors.names.count("w") == 1


def test_a_part_is_described_by_where_it_lies() -> None:
    description = described_state({"w": ShardedArray(np.zeros((2, 3), np.float32), (4, 3), (2, 0)), "b": np.zeros(1)})
    assert (description.box(0), description.box(1)) == (Box((2, 0), (2, 3)), whole((1,)))


def test_description_digest_covers_every_field() -> None:
    one = described(("w", "float32", (4,), Box((0,), (2,))))
    changed = [
        described(("v", "float32", (4,), Box((0,), (2,)))),
        described(("w", "float64", (4,), Box((0,), (2,)))),
        described(("w", "float32", (5,), Box((0,), (2,)))),
        described(("w", "float32", (4,), Box((1,), (2,)))),
        described(("w", "float32", (4,), None)),
        described(("w", "float32", (4,), Box((0,), (2,))), private=[0]),
    ]
    assert one.digest() == described(("w", "float32", (4,), Box((0,), (2,)))).digest()
    assert len({one.digest(), *(other.digest() for other in changed)}) == 1 + len(changed)
