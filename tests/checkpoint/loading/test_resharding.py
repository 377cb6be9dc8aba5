"""What a rank is given that does not say what it wants."""

from __future__ import annotations

from typing import Any

import pytest

from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Manifest, Tensors
from forged.checkpoint.format.states import States
from forged.checkpoint.loading.resharding import (
    NOTHING,
    boxes_for,
    common_to_all,
    lacking,
    pruned,
    tree_for,
    turns,
    united,
    without_private,
)
from forged.checkpoint.model import ReshardingStrategy

PARALLEL, SIMPLE = ReshardingStrategy.PARALLEL, ReshardingStrategy.SIMPLE


def manifest_of(trees: list[Any], shapes: list[Any], held: list[Any] | None = None, ranks: Any = None) -> Manifest:
    splits = [dict(enumerate(held))] if held else []
    names = [f"t{n}" for n in range(len(shapes))]
    tensors = Tensors(names, ["uint8"] * len(shapes), shapes, ranks or {}, splits, {0: 0} if held else {})
    return Manifest("a", 0.0, len(trees), tensors, States.of(trees), [])


class TestTrees:
    def test_in_the_same_world_a_rank_has_its_own_tree(self) -> None:
        trees = [{"d": {"x": number}} for number in range(2)]
        assert [tree_for(manifest_of(trees, [(1,)] * 2), rank, 2) for rank in range(2)] == trees

    def test_in_another_world_it_has_what_any_rank_had(self) -> None:
        trees = [
            {"d": {"same": 0, "a": {"d": {"v": {"v": 1}, "x": 1}}, "own": {"p": 3}}},
            {"d": {"same": 0, "a": {"d": {"v": {"v": 2}, "y": 2}}, "b": {"l": [0]}, "own": {"p": 4}}},
        ]
        manifest = manifest_of(trees, [(1,)] * 5, ranks={3: 0, 4: 1})
        assert tree_for(manifest, 1, 3) == {
            "d": {
                "same": 0,
                "a": {"d": {"v": {"v": 2}, "y": 2, "x": 1}},
                "b": {"l": [0]},
                "own": {"p": 4},
            }
        }
        assert "own" not in tree_for(manifest, 2, 3)["d"]
        assert lacking(manifest, 1) == set()
        assert lacking(manifest, 2) == {"t3", "t4"}

    def test_keys_that_are_no_strings_are_united_too(self) -> None:
        own, other = {"m": [[0, 1], ["x", 2]]}, {"m": [[1, 3], [0, 9]]}
        assert united(own, [other]) == {"m": [[0, 1], ["x", 2], [1, 3]]}
        assert united({"d": {}}, [other]) == {"m": [[1, 3], [0, 9]]}

    def test_what_differs_in_kind_stays_as_the_own_tree_has_it(self) -> None:
        assert united({"d": {"x": {"v": 1}}}, [{"d": {"x": {"d": {"y": 1}}}}]) == {"d": {"x": {"v": 1}}}
        assert united(5, [{"d": {}}]) == 5

    def test_a_tree_without_what_is_a_ranks_own_keeps_the_places_in_lists(self) -> None:
        tree = {
            "d": {"x": {"p": 0}, "y": {"l": [{"p": 1}, 2]}, "z": {"m": [[3, {"p": {"v": 1}}], [4, 5]]}, "v": {"v": 1}}
        }
        assert without_private(tree) == {"d": {"y": {"l": [NOTHING, 2]}, "z": {"m": [[4, 5]]}, "v": {"v": 1}}}
        assert without_private({"p": 3}) == without_private({"o": 0}) == NOTHING

    def test_a_tree_can_be_cut_down_to_some_tensors(self) -> None:
        tree = {"d": {"x": 0, "y": {"t": [1, 2]}, "z": {"p": {"d": {"w": 3}}}, "q": {"p": 4}}}
        assert pruned(tree, {1, 3}.__contains__, keeps_private=True) == {
            "d": {"y": {"t": [1, NOTHING]}, "z": {"p": {"d": {"w": 3}}}}
        }

    def test_the_tensors_that_all_ranks_had(self) -> None:
        assert common_to_all(manifest_of([{"l": [0, 1]}, {"l": [1, 2]}], [(1,)] * 3)) == {1}


class TestBoxes:
    def test_the_same_world_has_the_same_boxes(self) -> None:
        manifest = manifest_of([0, 0], [(5, 6)], [((0, 0), (2, 6)), ((2, 0), (3, 6))])
        assert boxes_for(manifest, 1, 2, PARALLEL, [0]) == {0: Box((2, 0), (3, 6))}
        assert boxes_for(manifest, 1, 2, SIMPLE, [0]) == {0: Box((2, 0), (3, 6))}

    @pytest.mark.parametrize(
        ("held", "boxes"),
        [
            ([((0, 0), (2, 6)), ((2, 0), (3, 6))], [((0, 0), (1, 6)), ((1, 0), (2, 6)), ((3, 0), (2, 6))]),
            ([((0, 0), (5, 3)), ((0, 3), (5, 3))], [((0, 0), (5, 2)), ((0, 2), (5, 2)), ((0, 4), (5, 2))]),
            ([((0, 0), (5, 6))] * 2, [((0, 0), (5, 6))] * 3),
        ],
    )
    def test_another_world_is_cut_along_the_axis_that_was_cut(self, held: Any, boxes: Any) -> None:
        manifest = manifest_of([0, 0], [(5, 6)], held)
        assert [boxes_for(manifest, rank, 3, PARALLEL, [0])[0] for rank in range(3)] == boxes

    def test_a_rank_that_had_no_part_is_given_none_in_the_same_world(self) -> None:
        manifest = manifest_of([0, 0], [(5,)], [((0,), (5,))])
        assert boxes_for(manifest, 0, 2, PARALLEL, [0]) == {0: Box((0,), (5,))}
        assert boxes_for(manifest, 1, 2, PARALLEL, [0]) == {}

    def test_nobody_is_given_a_part_by_simple(self) -> None:
        manifest = manifest_of([0, 0], [(5, 6)], [((0, 0), (2, 6)), ((2, 0), (3, 6))])
        assert boxes_for(manifest, 1, 3, SIMPLE, [0]) == {}

    def test_what_was_whole_everywhere_is_whole(self) -> None:
        assert boxes_for(manifest_of([0, 0], [(5,)]), 1, 3, PARALLEL, [0]) == {}


def test_whole_tensors_go_round_by_name_and_private_ones_to_their_own() -> None:
    manifest = manifest_of([0], [(1,)] * 5, ranks={4: 0})
    left = [turns(manifest, rank, 2, range(5)) for rank in range(2)]
    assert left == [{1, 3}, {0, 2}]
