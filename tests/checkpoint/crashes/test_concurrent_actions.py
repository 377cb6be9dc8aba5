"""Two processes act on one checkpoint at once; neither harms the files that the other has committed."""

from __future__ import annotations

import pytest

from forged.checkpoint.errors import CheckpointException
from tests.checkpoint.crashes.crash_trials import DELETE, SAVE, Group, concurrent_actions
from tests.checkpoint.crashes.test_crash_states import WORLDS

FOREGROUND = pytest.mark.parametrize("world", [world for world in WORLDS if not world.in_background], ids=str)


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
