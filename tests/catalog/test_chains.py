from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forged.catalog import (
    ChainBroken,
    ChainCyclic,
    CheckpointInvalid,
    CheckpointMeta,
    CheckpointUnknown,
    chain_length,
    chain_size,
    estimate_restore_time,
    find_chain_root,
    restoration_chain,
    validate_checkpoint,
)
from tests.catalog.records import COMPLETE, CORRUPTED, CREATING, DELETED, chain, record

WALK = Callable[[Sequence[CheckpointMeta], str], Any]
WALKS: list[WALK] = [chain_length, find_chain_root, restoration_chain, chain_size]
each_walk = pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
ABC = chain("a", "b", "c")


@pytest.mark.parametrize(("target", "length"), [("a", 1), ("b", 2), ("c", 3)])
def test_length_counts_the_checkpoints_down_to_the_root(target: str, length: int) -> None:
    assert chain_length(ABC, target) == length


def test_root_is_the_checkpoint_without_a_parent() -> None:
    assert [find_chain_root(ABC, target) for target in "abc"] == ["a", "a", "a"]


def test_there_is_no_root_of_a_checkpoint_that_is_not_there() -> None:
    assert find_chain_root(ABC, "d") is None
    assert find_chain_root([], "a") is None


def test_restoration_chain_goes_from_the_root_to_the_target() -> None:
    assert restoration_chain(list(reversed(ABC)), "c") == ["a", "b", "c"]
    assert restoration_chain(ABC, "a") == ["a"]


def test_checkpoint_that_is_being_written_has_its_chain() -> None:
    assert restoration_chain([*ABC[:2], replace(ABC[2], state=CREATING)], "c") == ["a", "b", "c"]


def test_size_is_that_of_the_whole_chain() -> None:
    sizes = [replace(one, size_bytes=size) for one, size in zip(ABC, [2**60, 20, 3], strict=True)]
    assert chain_size([*sizes, record("d", "a", size_bytes=1000)], "c") == 2**60 + 23


@pytest.mark.parametrize("walk", [chain_length, restoration_chain, chain_size], ids=lambda walk: walk.__name__)
def test_chain_of_an_unknown_checkpoint_is_refused(walk: WALK) -> None:
    for known in ([], ABC):
        with pytest.raises(CheckpointUnknown) as refused:
            walk(known, "d")
        assert refused.value.checkpoint_id == "d"


@each_walk
def test_missing_parent_is_refused_by_its_name(walk: WALK) -> None:
    with pytest.raises(ChainBroken, match="the chain of checkpoint c is broken: a is missing") as refused:
        walk(ABC[1:], "c")
    assert refused.value.checkpoint_id == "a"


@each_walk
@pytest.mark.parametrize("state", [CREATING, CORRUPTED, DELETED])
def test_parent_that_is_not_complete_breaks_the_chain(walk: WALK, state: Any) -> None:
    with pytest.raises(ChainBroken, match=f"b is {state}") as refused:
        walk([ABC[0], replace(ABC[1], state=state), ABC[2]], "c")
    assert refused.value.checkpoint_id == "b"


@each_walk
@pytest.mark.parametrize(("parents", "named"), [("b", "a"), ("a", "a"), ("c", "a")])
def test_cycle_is_refused_with_a_checkpoint_in_it(walk: WALK, parents: str, named: str) -> None:
    cyclic = [replace(ABC[0], parent_id=parents), *ABC[1:]]
    with pytest.raises(ChainCyclic) as refused:
        walk(cyclic, "a")
    assert refused.value.checkpoint_id == named


def test_chain_that_leads_into_a_cycle_is_refused() -> None:
    with pytest.raises(ChainCyclic, match="the chain of checkpoint c has a cycle: b builds on itself"):
        chain_length([replace(ABC[0], parent_id="b"), *ABC[1:]], "c")


@pytest.mark.parametrize("state", [CORRUPTED, DELETED])
def test_target_that_is_damaged_has_no_restoration_chain(state: Any) -> None:
    damaged = [*ABC[:2], replace(ABC[2], state=state)]
    with pytest.raises(ChainBroken, match=f"c is {state}"):
        restoration_chain(damaged, "c")
    assert chain_length(damaged, "c") == 3


def test_chain_of_100_000_is_walked_without_recursion() -> None:
    long = chain(*map(str, range(100_000)))
    assert chain_length(long, "99999") == 100_000


@given(st.permutations(list(range(8))), st.lists(st.integers(-1, 7), min_size=8, max_size=8))
def test_any_graph_has_a_whole_chain_or_is_refused(order: list[int], parents: list[int]) -> None:
    records = [record(str(one), str(parents[one]) if parents[one] >= 0 else None) for one in order]
    by_id = {one.checkpoint_id: one for one in records}
    for target in by_id:
        try:
            found = restoration_chain(records, target)
        except ChainCyclic:
            continue
        assert found[-1] == target
        assert by_id[found[0]].parent_id is None
        assert [by_id[one].parent_id for one in found[1:]] == found[:-1]
        assert (chain_length(records, target), find_chain_root(records, target)) == (len(found), found[0])


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "base", "each", "speed", "expected"),
    [
        ([], 100, 10, 1.0, 100),
        ([1000, 500], 100, 10, 10.0, 270),
        ([1000], 0, 0, 0.5, 2000),
        ([999], 5, 7, 1000.0, 12),
        ([10], 5, 7, float("inf"), 12),
    ],
)
def test_restore_takes_a_base_an_overhead_for_each_and_the_transfer(
    sizes: list[int], base: int, each: int, speed: float, expected: int
) -> None:
    records = [record(str(number), size_bytes=size) for number, size in enumerate(sizes)]
    assert estimate_restore_time(records, base, each, speed) == expected


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_speed_at_which_nothing_arrives_is_refused(speed: float) -> None:
    with pytest.raises(CheckpointInvalid, match="bytes_per_ms must be above 0"):
        estimate_restore_time(ABC, 1, 1, speed)


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ABC, ids=lambda one: one.checkpoint_id)
def test_checkpoint_with_a_sound_chain_is_valid(checkpoint: CheckpointMeta) -> None:
    validate_checkpoint(checkpoint, ABC)
    validate_checkpoint(checkpoint, [one for one in ABC if one is not checkpoint])


def test_checkpoint_that_is_being_written_needs_no_path_yet() -> None:
    validate_checkpoint(record("d", "c", state=CREATING, storage_path="", step=300), ABC)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"storage_path": ""}, "checkpoint a is not valid: storage_path must be not empty, got ''"),
        ({"checkpoint_id": ""}, "checkpoint_id"),
        ({"training_run_id": ""}, "training_run_id"),
        ({"epoch": -1}, "epoch must be an integer from 0"),
        ({"step": -1}, "step must be an integer from 0"),
        ({"step": 2**64}, "step must be an integer from 0"),
        ({"step": 1.0}, "step must be an integer from 0"),
        ({"size_bytes": -1}, "size_bytes"),
        ({"state": CORRUPTED}, "state must be creating or complete, got 'corrupted'"),
        ({"state": DELETED}, "state"),
        ({"checkpoint_type": "incremental"}, "parent_id"),
        ({"step": -1, "epoch": -1}, "epoch must be an integer from 0 to 4294967295, got -1; step must"),
    ],
)
def test_invalid_values_are_refused_by_field(changes: dict[str, Any], text: str) -> None:
    fields = {name: getattr(ABC[0], name) for name in ABC[0].__struct_fields__} | changes
    if "checkpoint_type" in changes:
        fields["checkpoint_type"] = type(ABC[0].checkpoint_type)(changes["checkpoint_type"])
    with pytest.raises(CheckpointInvalid) as refused:
        validate_checkpoint(CheckpointMeta(**fields), [])
    assert text in refused.value.message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": 99}, "step must be at or after its parent b (epoch 0, step 100), got 99"),
        ({"epoch": 1, "step": 0}, ""),
        ({"step": 100}, ""),
        ({"training_run_id": "other"}, "training_run_id must be run, as of its parent, got 'other'"),
    ],
)
def test_child_is_of_its_parents_run_and_not_before_it(changes: dict[str, Any], text: str) -> None:
    child = replace(ABC[2], **changes)
    if not text:
        validate_checkpoint(child, ABC)
        return
    with pytest.raises(CheckpointInvalid) as refused:
        validate_checkpoint(child, ABC)
    assert text in refused.value.message
    assert refused.value.checkpoint_id == "c"


@pytest.mark.parametrize("state", [CREATING, CORRUPTED, DELETED])
def test_checkpoint_on_a_broken_chain_is_not_valid(state: Any) -> None:
    with pytest.raises(ChainBroken, match=f"a is {state}"):
        validate_checkpoint(ABC[2], [replace(ABC[0], state=state), *ABC[1:]])
    with pytest.raises(ChainBroken, match="a is missing"):
        validate_checkpoint(ABC[2], ABC[1:])
    with pytest.raises(ChainCyclic):
        validate_checkpoint(ABC[2], [replace(ABC[0], parent_id="c"), *ABC[1:]])
    assert ABC[0].state is COMPLETE
