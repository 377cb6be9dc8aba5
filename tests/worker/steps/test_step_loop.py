"""A step as the script sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from forged.elastic.model import WorkerId
from forged.log import SILENT
from forged.worker.collectives.world import World as MeshWorld
from forged.worker.errors import StepAborted
from forged.worker.steps.step_errors import StepErrors
from forged.worker.steps.step_loop import Step
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import CurrentWorld, SessionState


class World(SimpleNamespace):
    """The part of a worker's world that a step looks at."""

    is_void = is_committed = False


def numbered(world: World | None = None) -> Step:
    state = SessionState(WorkerId("me", "", 0), TrainingProgress(None, 0))
    state.current_world.world = cast("MeshWorld", SimpleNamespace(size=1, ending=None, void=lambda reason: None))
    return Step.numbered(3, cast("CurrentWorld", world or World()), StepErrors(state, SILENT))


def test_step_equals_its_number() -> None:
    step = numbered()
    assert (step, step + 1, f"{step}", [0, 1, 2, 5][step]) == (3, 4, "3", 5)


def test_step_says_whether_it_was_entered() -> None:
    step = numbered()
    assert not step.is_entered
    with step:
        assert step.is_entered


def test_step_block_suppresses_only_its_own_abort() -> None:
    with numbered():
        raise StepAborted("a peer died")
    with pytest.raises(ValueError, match="mine"), numbered():
        raise ValueError("mine")


def test_step_says_whether_it_was_aborted_after_the_next_one_began() -> None:
    world = World()
    first, second = numbered(world), numbered(world)
    assert not first.aborted
    world.is_void = True
    assert first.aborted
    first.end()
    world.is_void = False
    second.end()
    world.is_void = True
    assert (first.aborted, second.aborted) == (True, False)
