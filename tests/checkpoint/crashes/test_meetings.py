"""Two processes at one checkpoint: each is told how it stands, and neither harms what the other was told is there."""

from __future__ import annotations

import pytest

from forged.checkpoint.errors import CheckpointException
from tests.checkpoint.crashes.crash_trials import DELETE, SAVE, Group, meetings
from tests.checkpoint.crashes.test_crash_states import WORLDS

FOREGROUND = pytest.mark.parametrize("world", [world for world in WORLDS if not world.in_background], ids=str)


def code(error: BaseException | None) -> str:
    """Which error it is; nothing stands for success."""
    return error.code if isinstance(error, CheckpointException) else repr(error) if error else ""


@FOREGROUND
def test_one_of_two_saves_under_one_name_succeeds_and_the_other_is_refused(world: Group) -> None:
    outcomes = {
        (code(meeting.first), code(meeting.other), meeting.found.get("new"), tuple(meeting.wrong))
        for meeting in meetings(world, SAVE, lambda history: history.save("new", 3))
    }
    assert outcomes == {("checkpoint_exists", "", 3, ()), ("", "checkpoint_exists", 2, ())}


@FOREGROUND
def test_save_during_a_deletion_succeeds_or_is_refused(world: Group) -> None:
    outcomes = {
        (code(meeting.first), code(meeting.other), meeting.found.get("old"), tuple(meeting.wrong))
        for meeting in meetings(world, DELETE, lambda history: history.save("old", 3))
    }
    assert outcomes == {
        ("", "checkpoint_exists", None, ()),
        ("", "checkpoint_being_deleted", None, ()),
        ("", "", 3, ()),
    }


@FOREGROUND
def test_one_of_two_deletions_at_least_succeeds(world: Group) -> None:
    outcomes = {
        (code(meeting.first), code(meeting.other), meeting.found.get("old"), tuple(meeting.wrong))
        for meeting in meetings(world, DELETE, lambda history: history.delete("old", 1))
    }
    assert outcomes <= {("", "", None, ()), ("checkpoint_missing", "", None, ()), ("", "checkpoint_missing", None, ())}


@FOREGROUND
def test_conversion_during_a_deletion_succeeds_or_is_refused(world: Group) -> None:
    for meeting in meetings(world, DELETE, lambda history: history.convert("old", "new", 1)):
        assert not code(meeting.first)
        assert meeting.found.get("new") == (None if meeting.other else 1)
        assert isinstance(meeting.other, CheckpointException | None)
        assert not meeting.wrong
