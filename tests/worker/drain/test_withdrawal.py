from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import anyio
import pytest
from anyio.abc import TaskGroup

from forged.errors import Unavailable
from forged.worker.drain.drain import Drain
from forged.worker.drain.withdrawal import Parting, Withdrawal
from forged.worker.rescale.rescaler import Rescaler
from forged.worker.worker_state.current_world import CurrentWorld
from forged.worker.worker_state.job_view import JobView
from tests.kernel_fixture import task_group
from tests.telemetry.heard import Heard


class Scene:
    """A worker that is to go, which the daemon may keep."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.standing = JobView("me")
        self.log = Heard()
        self.beats: list[bool] = []
        """Whether it has said at each beat that it is on its way out."""
        self.may_go = True
        self.is_due = True
        self.reason = "the night"
        self.serves = 0
        """How many do its part for the others at this moment."""
        self.fails: Exception | None = None
        """What its part for the others fails of."""
        presence = CurrentWorld(self.standing, None)
        self.withdrawal = Withdrawal(self.standing, presence, cast("Drain", self), self._beat, tasks, self.log)

    async def begin(self, step: int = 7) -> Parting:
        return await self.withdrawal.begin(step, cast("Rescaler", self))

    def _beat(self) -> None:
        self.beats.append(self.withdrawal.is_under_way)

    # Of its departure.

    async def leave(self) -> bool:
        return self.may_go

    # Of its passage.

    async def rest(self) -> None:
        self.serves += 1
        try:
            await anyio.lowlevel.checkpoint()
            if self.fails is not None:
                raise self.fails
            await anyio.sleep_forever()
        finally:
            self.serves -= 1


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with task_group() as tasks:
        yield Scene(tasks)


async def test_it_does_its_part_for_the_others_until_it_goes() -> None:
    async with scene() as one:
        assert await one.begin() == Parting("the night", True)
        await anyio.wait_all_tasks_blocked()
        assert (one.serves, one.withdrawal.is_under_way) == (1, True)
        assert await one.withdrawal.end()
        assert (one.serves, one.withdrawal.is_under_way, one.beats) == (0, True, [True])


async def test_who_is_kept_is_told_again_only_behind_further_steps() -> None:
    async with scene() as one:
        await one.begin(7)
        one.may_go = False
        assert not await one.withdrawal.end()
        assert (one.withdrawal.is_under_way, one.beats) == (False, [True, False])
        assert not (await one.begin(7)).is_news
        assert not await one.withdrawal.end()
        assert (await one.begin(8)).is_news


async def test_who_is_interrupted_before_it_was_told_to_its_end_is_told_again() -> None:
    async with scene() as one:
        assert (await one.begin()).is_news
        assert (await one.begin()).is_news
        await one.withdrawal.end()
        assert not (await one.begin()).is_news


async def test_who_is_interrupted_does_its_part_for_the_others_once_and_without_a_break() -> None:
    async with scene() as one:
        await one.begin()
        await anyio.wait_all_tasks_blocked()
        await one.begin()
        await anyio.wait_all_tasks_blocked()
        assert (one.serves, one.beats) == (1, [True])


async def test_who_is_interrupted_and_has_come_to_be_needed_takes_part_as_before() -> None:
    async with scene() as one:
        await one.begin()
        await anyio.wait_all_tasks_blocked()
        await one.withdrawal.call_off()
        assert (one.serves, one.withdrawal.is_under_way, one.beats) == (0, False, [True, False])
        await one.withdrawal.call_off()
        assert one.beats == [True, False], "nothing is said by who takes part anyway"
        await one.begin()
        await anyio.wait_all_tasks_blocked()
        assert one.serves == 1


@pytest.mark.parametrize("error", [Unavailable("no", "it changed size"), RuntimeError("it changed size")])
async def test_what_fails_in_giving_is_told_and_keeps_nobody_from_going(error: Exception) -> None:
    async with scene() as one:
        one.fails = error
        await one.begin()
        await anyio.wait_all_tasks_blocked()
        (said,) = one.log.of("gives nothing to others any more")
        assert "it changed size" in said["why"]
        assert await one.withdrawal.end()
