"""A saved tree is matched with the state that it is loaded into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Tensors
from forged.checkpoint.loading.matching import Matching, PendingLeaf, resolve_pending
from forged.checkpoint.model import PerRank, ShardedArray
from forged.leaf_types import LeafType

TENSORS = Tensors(["a", "b", "c"], ["float64", "int64", "float64"], [(2,), (), (4, 2)])


class Wrapped:
    def __init__(self, data: Any) -> None:
        self.data = data
        self.shape = data.shape


WRAPPED = LeafType(lambda value: isinstance(value, Wrapped), lambda value: value.data, lambda array, _: Wrapped(array))


def matching(*others: Any, selected: Any = None) -> Matching:
    return Matching(TENSORS, [WRAPPED], selected, lambda: others)


class TestPairs:
    def test_arrays_are_paired_by_name(self) -> None:
        one, other = np.zeros(2), np.zeros((), int)
        found = matching()
        state = found.match({"d": {"x": {"l": [0]}, "y": {"m": [[7, 1]]}}}, {"y": {7: other}, "x": [one]})
        found.drop_mismatches()
        assert found.numbers == [0, 1]
        assert found.arrays[0] is one
        assert found.arrays[1] is other
        assert list(state) == ["x", "y"]
        assert state["x"][0] is one

    def test_values_and_container_types_come_from_the_checkpoint(self) -> None:
        node = {"d": {"t": {"t": [{"v": 1}]}, "l": {"l": [{"f": "0x1.0p+0"}]}, "n": {"v": None}}}
        state = matching().match(node, {"t": [5], "l": (7,), "n": "x"})
        assert state == {"t": (1,), "l": [1.0], "n": None}

    def test_sharded_arrays_have_boxes(self) -> None:
        found = matching()
        part = ShardedArray(np.zeros((1, 2)), (4, 2), (3, 0))
        all_of_it = ShardedArray(np.zeros((4, 2)), (4, 2), (0, 0))
        assert found.match(2, part) is part
        assert found.match(2, all_of_it) is all_of_it
        found.drop_mismatches()
        assert found.boxes == {0: Box((3, 0), (1, 2))}

    def test_a_per_rank_value_matches_with_or_without_per_rank(self) -> None:
        found = matching()
        array = np.zeros(2)
        assert found.match({"p": {"l": [0]}}, PerRank([array])) == [array]
        assert found.match({"p": {"l": [0]}}, [array]) == [array]

    def test_pending_leaves_are_converted_at_the_end(self) -> None:
        found = matching()
        array = np.zeros(2)
        state = found.match(
            {"d": {"x": {"t": [0]}, "y": {"l": [2]}}},
            {"x": (Wrapped(array),), "y": [ShardedArray(Wrapped(np.zeros((1, 2))).data, (4, 2), (0, 0))]},
        )
        assert found.has_pending
        assert isinstance(state["x"][0], PendingLeaf)
        value = resolve_pending(state)
        assert value["x"][0].data is array
        assert isinstance(value["y"][0], ShardedArray)

    def test_a_pending_shard_becomes_a_sharded_array(self) -> None:
        found = matching()
        part = ShardedArray(Wrapped(np.ones((1, 2))), (4, 2), (2, 0))
        value = resolve_pending(found.match(2, part))
        found.drop_mismatches()
        assert found.boxes == {0: Box((2, 0), (1, 2))}
        assert (value.offset, value.local.data.tolist()) == ((2, 0), [[1, 1]])


class TestDifferences:
    @pytest.mark.parametrize(
        ("current", "message"),
        [
            (np.zeros(3), "a is float64 (2,) in the checkpoint and float64 (3,) in the state"),
            (np.zeros(2, ">f8"), "a is float64 (2,) in the checkpoint and >f8 (2,) in the state"),
            (
                ShardedArray(np.zeros(1), (3,), (0,)),
                "a is of shape (2,) in the checkpoint and of shape (3,) in the state",
            ),
            (
                ShardedArray(np.zeros(1, int), (2,), (0,)),
                "a is float64 (1,) in the checkpoint and int64 (1,) in the state",
            ),
        ],
    )
    def test_another_shape_or_type_is_reported_and_not_paired(self, current: Any, message: str) -> None:
        found = matching()
        assert found.match(0, current) is current
        found.drop_mismatches()
        assert found.mismatched == {"a": message}
        assert found.numbers == []

    def test_one_sided_entries_are_reported(self) -> None:
        found = matching()
        state = found.match(
            {"d": {"x": 0, "y": {"l": [1, {"v": 3}]}, "v": {"v": 1}}}, {"z": {"w": np.ones(1)}, "y": [4]}
        )
        assert found.unexpected == [0, 1]
        assert found.missing == ["z/w"]
        assert state == {"y": [4, 3], "v": 1, "z": {"w": np.ones(1)}}

    def test_a_saved_value_replaces_a_container_without_arrays(self) -> None:
        found = matching()
        assert found.match({"v": 3}, {"x": [1]}) == 3
        assert found.match({"v": 3}, {"x": [np.zeros(1)]}, "here") == {"x": [np.zeros(1)]}
        assert found.missing == ["here/x/#0"]

    def test_a_read_only_array_is_refused(self) -> None:
        found = matching()
        array = np.zeros(2)
        array.flags.writeable = False
        found.match(0, array)
        with pytest.raises(CheckpointException, match="a of the state is read-only"):
            found.drop_mismatches()

    def test_unselected_arrays_are_neither_paired_nor_compared(self) -> None:
        found = matching(selected=lambda name: name != "a")
        array = np.zeros(99)
        array.flags.writeable = False
        found.match({"l": [0, 1]}, [array, np.zeros((), int)])
        found.drop_mismatches()
        assert found.numbers == [1]
        assert found.mismatched == {}


class TestOtherTrees:
    def test_missing_nodes_are_looked_up_in_other_trees(self) -> None:
        array = np.zeros((4, 2))
        found = matching({"d": {"x": {"d": {"c": 2, "v": {"v": 5}}}}}, {"d": {"x": {"d": {"c": 1}}}})
        assert found.match({"d": {}}, {"x": {"c": array, "v": 0}}) == {"x": {"c": array, "v": 5}}
        assert found.numbers == [2]
