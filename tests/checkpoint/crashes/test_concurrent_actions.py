"""Two processes act on one checkpoint at once; neither harms the files that the other has committed."""

from __future__ import annotations

import pytest

from forged.checkpoint.errors import CheckpointException
from tests.checkpoint.crashes.crash_trials import COMPACT, DELETE, SAVE, SAVE_INCREMENT, Group, concurrent_actions
from tests.checkpoint.crashes.save_history import HALF
from tests.checkpoint.crashes.test_crash_states import IN_CHAINS, WORLDS

FOREGROUND = pytest.mark.parametrize("world", [world for world in WORLDS if not world.in_background], ids=str)

FOREGROUND_IN_CHAINS = pytest.mark.parametrize(
    "world", [world for world in IN_CHAINS if not world.in_background], ids=str
)


def code(error: BaseException | None) -> str:
    """Which error it is; nothing stands for success."""
    return error.code if isinstance(error, CheckpointException) else repr(error) if error else ""


@FOREGROUND
def test_one_of_two_saves_under_one_name_succeeds_and_the_other_is_refused(world: Group) -> None:
    outcomes = {
        (code(concurrent.first), code(concurrent.other), concurrent.found.get("new"), tuple(concurrent.wrong))
        for concurrent in concurrent_actions(world, SAVE, lambda history: history.save("new", 3))
    }
    assert outcomes == {("checkpoint_exists", "", 3, ()), ("", "checkpoint_exists", 2, ())}


@FOREGROUND
def test_save_during_a_deletion_succeeds_or_is_refused(world: Group) -> None:
    outcomes = {
        (code(concurrent.first), code(concurrent.other), concurrent.found.get("old"), tuple(concurrent.wrong))
        for concurrent in concurrent_actions(world, DELETE, lambda history: history.save("old", 3))
    }
    assert outcomes == {
        ("", "checkpoint_exists", None, ()),
        ("", "checkpoint_being_deleted", None, ()),
        ("", "", 3, ()),
    }


@FOREGROUND
def test_one_of_two_deletions_at_least_succeeds(world: Group) -> None:
    outcomes = {
        (code(concurrent.first), code(concurrent.other), concurrent.found.get("old"), tuple(concurrent.wrong))
        for concurrent in concurrent_actions(world, DELETE, lambda history: history.delete("old", 1))
    }
    assert outcomes <= {("", "", None, ()), ("checkpoint_missing", "", None, ()), ("", "checkpoint_missing", None, ())}


@FOREGROUND
def test_conversion_during_a_deletion_succeeds_or_is_refused(world: Group) -> None:
    for concurrent in concurrent_actions(world, DELETE, lambda history: history.convert("old", "new", 1)):
        assert not code(concurrent.first)
        assert concurrent.found.get("new") == (None if concurrent.other else 1)
        assert isinstance(concurrent.other, CheckpointException | None)
        assert not concurrent.wrong


@FOREGROUND_IN_CHAINS
def test_base_that_is_deleted_during_an_incremental_save_goes_or_the_save_does(world: Group) -> None:
    """Either the deletion finds the new manifest, or the save finds that its base is gone, or is full."""
    outcomes = set()
    for concurrent in concurrent_actions(world, SAVE_INCREMENT, lambda history: history.delete("old", 1)):
        assert HALF not in concurrent.found.values()
        assert not concurrent.wrong
        outcomes.add((code(concurrent.first), code(concurrent.other), *sorted(concurrent.found)))
    assert outcomes == {
        ("", "checkpoint_needed", "new", "old"),
        ("checkpoint_base_deleted", ""),
        ("", "", "new"),
    }


@FOREGROUND_IN_CHAINS
def test_checkpoint_that_is_deleted_during_its_compaction_is_gone(world: Group) -> None:
    for concurrent in concurrent_actions(world, COMPACT, lambda history: history.delete("new", 2)):
        assert not code(concurrent.other)
        assert code(concurrent.first) in {"", "checkpoint_missing", "checkpoint_file_missing"}
        assert concurrent.found == {"old": 1}
        assert not concurrent.wrong


@FOREGROUND_IN_CHAINS
def test_base_stays_until_the_compaction_of_what_uses_it_has_ended(world: Group) -> None:
    for concurrent in concurrent_actions(world, COMPACT, lambda history: history.delete("old", 1)):
        assert not code(concurrent.first)
        assert code(concurrent.other) in {"", "checkpoint_needed"}
        assert concurrent.found == ({"old": 1, "new": 2} if concurrent.other else {"new": 2})
        assert not concurrent.wrong
