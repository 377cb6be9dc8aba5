"""What a rank loads when it gives no state to fill."""

from __future__ import annotations

from typing import Any

import pytest

from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Manifest, Tensors
from forged.checkpoint.format.states import States
from forged.checkpoint.loading.resharding import (
    PLACEHOLDER,
    boxes_for,
    left_to_other_ranks,
    merge_trees,
    missing_per_rank,
    prune,
    tensors_of_all_ranks,
    tree_for,
    without_per_rank,
)
from forged.checkpoint.model import ReshardingStrategy

PARALLEL, SIMPLE = ReshardingStrategy.PARALLEL, ReshardingStrategy.SIMPLE


def manifest_of(
    trees: list[Any], shapes: list[Any], boxes_by_rank: list[Any] | None = None, ranks: Any = None
) -> Manifest:
    splits = [dict(enumerate(boxes_by_rank))] if boxes_by_rank else []
    names = [f"t{n}" for n in range(len(shapes))]
    tensors = Tensors(names, ["uint8"] * len(shapes), shapes, ranks or {}, splits, {0: 0} if boxes_by_rank else {})
    return Manifest("a", 0.0, len(trees), tensors, States.of(trees), [])


class TestTrees:
    def test_with_the_same_world_size_a_rank_has_its_own_tree(self) -> None:
        trees = [{"d": {"x": number}} for number in range(2)]
        assert [tree_for(manifest_of(trees, [(1,)] * 2), rank, 2) for rank in range(2)] == trees

    def test_trees_of_all_ranks_are_merged_for_another_world_size(self) -> None:
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
        assert missing_per_rank(manifest, 1) == set()
        assert missing_per_rank(manifest, 2) == {"t3", "t4"}

    def test_non_string_keys_are_merged(self) -> None:
        own, other = {"m": [[0, 1], ["x", 2]]}, {"m": [[1, 3], [0, 9]]}
        assert merge_trees(own, [other]) == {"m": [[0, 1], ["x", 2], [1, 3]]}
        assert merge_trees({"d": {}}, [other]) == {"m": [[1, 3], [0, 9]]}

    def test_nodes_of_different_kinds_are_not_merged(self) -> None:
        assert merge_trees({"d": {"x": {"v": 1}}}, [{"d": {"x": {"d": {"y": 1}}}}]) == {"d": {"x": {"v": 1}}}
        assert merge_trees(5, [{"d": {}}]) == 5

    def test_without_per_rank_values_list_items_keep_their_positions(self) -> None:
        tree = {
            "d": {"x": {"p": 0}, "y": {"l": [{"p": 1}, 2]}, "z": {"m": [[3, {"p": {"v": 1}}], [4, 5]]}, "v": {"v": 1}}
        }
        assert without_per_rank(tree) == {"d": {"y": {"l": [PLACEHOLDER, 2]}, "z": {"m": [[4, 5]]}, "v": {"v": 1}}}
        assert without_per_rank({"p": 3}) == without_per_rank({"o": 0}) == PLACEHOLDER

    def test_prune_keeps_only_the_selected_tensors(self) -> None:
        tree = {"d": {"x": 0, "y": {"t": [1, 2]}, "z": {"p": {"d": {"w": 3}}}, "q": {"p": 4}}}
        assert prune(tree, {1, 3}.__contains__, keep_per_rank=True) == {
            "d": {"y": {"t": [1, PLACEHOLDER]}, "z": {"p": {"d": {"w": 3}}}}
        }

    def test_tensors_of_all_ranks_are_those_in_every_frame(self) -> None:
        assert tensors_of_all_ranks(manifest_of([{"l": [0, 1]}, {"l": [1, 2]}], [(1,)] * 3)) == {1}


class TestBoxes:
    def test_the_same_world_size_has_the_same_boxes(self) -> None:
        manifest = manifest_of([0, 0], [(5, 6)], [((0, 0), (2, 6)), ((2, 0), (3, 6))])
        assert boxes_for(manifest, 1, 2, PARALLEL, [0]) == {0: Box((2, 0), (3, 6))}
        assert boxes_for(manifest, 1, 2, SIMPLE, [0]) == {0: Box((2, 0), (3, 6))}

    @pytest.mark.parametrize(
        ("boxes_by_rank", "boxes"),
        [
            ([((0, 0), (2, 6)), ((2, 0), (3, 6))], [((0, 0), (1, 6)), ((1, 0), (2, 6)), ((3, 0), (2, 6))]),
            ([((0, 0), (5, 3)), ((0, 3), (5, 3))], [((0, 0), (5, 2)), ((0, 2), (5, 2)), ((0, 4), (5, 2))]),
            ([((0, 0), (5, 6))] * 2, [((0, 0), (5, 6))] * 3),
        ],
    )
    def test_another_world_size_is_split_along_the_saved_axis(self, boxes_by_rank: Any, boxes: Any) -> None:
        manifest = manifest_of([0, 0], [(5, 6)], boxes_by_rank)
        assert [boxes_for(manifest, rank, 3, PARALLEL, [0])[0] for rank in range(3)] == boxes

    def test_with_the_same_world_size_a_rank_without_a_part_gets_none(self) -> None:
        manifest = manifest_of([0, 0], [(5,)], [((0,), (5,))])
        assert boxes_for(manifest, 0, 2, PARALLEL, [0]) == {0: Box((0,), (5,))}
        assert boxes_for(manifest, 1, 2, PARALLEL, [0]) == {}

    def test_simple_gives_no_parts(self) -> None:
        manifest = manifest_of([0, 0], [(5, 6)], [((0, 0), (2, 6)), ((2, 0), (3, 6))])
        assert boxes_for(manifest, 1, 3, SIMPLE, [0]) == {}

    def test_a_tensor_saved_whole_is_loaded_whole(self) -> None:
        assert boxes_for(manifest_of([0, 0], [(5,)]), 1, 3, PARALLEL, [0]) == {}


def test_simple_deals_whole_tensors_by_name_except_per_rank_ones() -> None:
    manifest = manifest_of([0], [(1,)] * 5, ranks={4: 0})
    left = [left_to_other_ranks(manifest, rank, 2, range(5)) for rank in range(2)]
    assert left == [{1, 3}, {0, 2}]
