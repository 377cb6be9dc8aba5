"""The step loop: which step the script does next, and when there is none any more.

Invariants:
- A step counts when all members of the world have finished it. An aborted step is repeated from the state before it.
- Inside `with step:` an aborted collective leaves the block; the script has nothing to undo as long as it changes its
  state after the last collective of a step. An exception of the script's own leaves the block likewise where the world
  of the step is over (`forged.worker.steps.step_errors`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from forged.elastic.messages import MEETING_CHARS_MAX
from forged.elastic.model import ClusterTopology, WorkerStatus
from forged.errors import RequestRefused
from forged.worker.collectives.world import World
from forged.worker.drain import Leaving
from forged.worker.errors import JobEnded, StepAborted
from forged.worker.process.worker_process import WorkerProcess
from forged.worker.rescaler import Rescaler
from forged.worker.session import WorkerSession
from forged.worker.steps.step_errors import StepErrors
from forged.worker.worker_state import step_clock
from forged.worker.worker_state.session_state import CurrentWorld

Decide = Callable[[int, Exception], bool]
"""Whether the step of this number, which an exception has left, is void and is repeated."""


class Step(int):
    """The number of a step, and a context manager in which the step may be aborted."""

    is_entered: bool
    """Whether the script does the step inside `with step:`."""
    _current_world: CurrentWorld
    _errors: StepErrors
    _decide: Decide
    _commit: Callable[[], None] | None
    _was_aborted: bool | None
    _was_committed: bool | None

    @classmethod
    def numbered(
        cls,
        number: int,
        current_world: CurrentWorld,
        errors: StepErrors,
        decide: Decide | None = None,
        commit: Callable[[], None] | None = None,
    ) -> Self:
        """`decide` is asked about an exception that leaves a `with step:` block; default: what is known now decides.

        `commit` waits for the vote of all ranks; None in a script with an event loop.
        """
        step = cls(number)
        step.is_entered, step._current_world, step._was_aborted, step._was_committed = False, current_world, None, None
        step._errors, step._decide, step._commit = errors, decide or errors.decide, commit
        return step

    @property
    def aborted(self) -> bool:
        """Whether the step was aborted, so that it is repeated."""
        return self._current_world.is_void if self._was_aborted is None else self._was_aborted

    def abort(self, reason: str) -> NoReturn:
        """Void the step at all ranks, which repeat it in a new world: raises `StepAborted`, inside the block."""
        raise StepAborted(reason)

    @property
    def is_committed(self) -> bool:
        """Whether all ranks have voted for the step, so that the script changes its state."""
        return self._current_world.is_committed if self._was_committed is None else self._was_committed

    def commit(self) -> None:
        """Wait until all ranks have come here, and change the state after that; in a script without an event loop.

        Raises `StepAborted` if the world is over before. After it an exception of the step is raised unchanged and at
        once, and a step that the script finishes is not repeated.
        """
        if self._commit is None:
            raise RequestRefused(
                "commit_asynchronous",
                "`step.commit()` would wait for the event loop in the loop's own thread",
                "call `await worker.commit_step()`",
            )
        self._commit()

    def end(self) -> None:
        """Keep the result: the script may hold the object while the worker does other steps."""
        self._was_aborted, self._was_committed = self.aborted, self.is_committed

    def __enter__(self) -> Self:
        self.is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and self._decide(int(self), error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and await self._errors.decide_in_time(int(self), error)


class Entering(NamedTuple):
    """A world is entered: the subscribers of `world_entered` are to be told before its first step."""

    topology: ClusterTopology
    step: int
    """The number of that step."""


def _leaving() -> RequestRefused:
    return RequestRefused(
        "worker_leaving",
        "this worker is leaving and has left its world, so it has no collectives with other workers",
        "save without collectives",
    )


class StepLoop:
    """The steps of one worker in one session."""

    def __init__(self, session: WorkerSession, process: WorkerProcess) -> None:
        self.errors = StepErrors(session.state, session.log)
        self._session = session
        self._process = process
        self._state = session.state
        self._view = session.state.view
        self._current_world = session.state.current_world
        self._progress = session.state.progress
        self._step: Step | None = None
        """The object of the present step."""

    def step_numbered(
        self, number: int, decide: Decide | None = None, commit: Callable[[], None] | None = None
    ) -> Step:
        """The object of the present step (see `Step.numbered`)."""
        self._step = Step.numbered(number, self._current_world, self.errors, decide, commit)
        return self._step

    # Between two steps.

    async def come_to_step(self, total: int | None = None) -> int | Leaving | Entering | None:
        """Wait until a step may begin, and return its number; None when there are no more.

        A caller that gets a `Leaving` tells the subscribers of `leaving`, and calls `finish_leaving`. One that gets an
        `Entering` tells those of `world_entered`, and calls `finish_entering` if none has failed.
        """
        self._process.check()
        if self._current_world.is_committed:
            self.errors.give_up_state(self._progress.step, "another step was begun")
        session = self._session
        rescaler = await session.register()
        if not self._state.is_leave_due:
            # The script was interrupted while it saved, and the worker is needed by now.
            await session.drain.cancel_leaving()
        try:
            return await self._advance(rescaler, total)
        finally:
            session.wait_reporter.end()

    async def _advance(self, rescaler: Rescaler, total: int | None) -> int | Leaving | Entering | None:
        view, current_world, progress, session = self._view, self._current_world, self._progress, self._session
        while view.end is None and not session.is_over:
            is_done = total is not None and progress.step >= total
            session.tell_done(is_done and not current_world.may_step)
            if view.completed is not None:
                await self._complete(view.completed)
            elif is_done and current_world.may_step:
                # Before a drain: only the world knows that the training is complete.
                await session.leave("training completed", done=True)
            elif self._state.is_leave_due:
                return await session.drain.start_leaving(rescaler)
            elif not current_world.may_step:
                session.wait_reporter.begin()
                current_world.step_clock.wait_between_steps(self._cause_of_wait)
                await rescaler.advance()
            else:
                current_world.begin_step()
                progress.begin_step()
                if current_world.is_entry_due:
                    current_world.activate(self._state.worker)
                    return Entering(current_world.topology, progress.step)
                self._process.look_after_pulse()
                current_world.step_clock.begin_step()
                return progress.step
        if view.end is not None:
            await self._fail(view.end)
        return None

    @property
    def _cause_of_wait(self) -> str:
        """What the time is spent on while this worker is in no world that continues."""
        if self._view.paused:
            return step_clock.PAUSED
        if not self._session.is_connected:
            return step_clock.STANDSTILL
        return step_clock.WORKERS if self._view.waiting else step_clock.RESCALE

    def finish_entering(self) -> None:
        """The subscribers of `world_entered` have been told."""
        self._current_world.is_entry_due = False

    async def finish_step(self) -> bool:
        """Tell the other ranks that the step is finished; returns whether it is committed."""
        self._process.check()
        if self._step is not None:
            self._step.end()
            self._step = None
        if not self._current_world.is_void:
            self._current_world.mark()
            self._progress.finish_step(is_voted=self._current_world.is_committed)
        is_committed = await self._current_world.end_step(self._progress.step)
        self._current_world.step_clock.end_step(is_committed=is_committed)
        if is_committed:
            self._progress.commit_step()
        return is_committed

    # Collectives.

    def collective(self) -> AbstractContextManager[World]:
        """Run a collective inside the block; while the script saves, in a world of its own, which only a single worker
        has."""
        self._process.check()
        if not self._state.drain.is_leaving:
            return self._current_world.collective()
        own_world = self._session.drain.own_world
        if own_world is None:
            raise _leaving()
        return nullcontext(own_world)

    def meeting(self, name: str) -> AbstractContextManager[None]:
        """Run collectives that are not the library's inside the block."""
        self._process.check()
        if not 0 < len(name) <= MEETING_CHARS_MAX:
            limits = f"a text of 1 to {MEETING_CHARS_MAX} characters"
            raise RequestRefused(
                "meeting_name_invalid", f"the name of a meeting must be {limits}, got {name[:80]!r}", "shorten the name"
            )
        if self._state.drain.is_leaving:
            raise _leaving()
        return self._current_world.named_meeting(name)

    async def commit_step(self) -> None:
        """Vote for the present step, and wait until all ranks have."""
        self._process.check()
        if not self._current_world.is_stepping:
            raise RequestRefused("step_missing", "a commit was called between two steps", "commit inside a step")
        await self._current_world.commit_step(self._progress.step)

    # The end.

    async def finish_leaving(self) -> bool:
        """Leave, now that the subscribers of `leaving` have been told; false if the worker is needed after all."""
        drain = self._session.drain
        leaves = await drain.finish_leaving()
        if leaves:
            await self._session.leave(drain.reason)
        return leaves

    async def _complete(self, step: int) -> None:
        """Another worker has reported that the training is complete."""
        if self._is_left_out:
            # The other workers may have repeated a step that this one had finished, with other samples.
            await self._session.leave(self._session.drain.reason)
            return
        if self._progress.has_finished and step > self._progress.step:
            # All members have finished the step, or the training would not be complete.
            self._progress.commit_step()
        if self._progress.holds_state and self._progress.step >= step:
            await self._session.leave("training completed", done=True)
            return
        why = "the training was complete before this worker joined it"
        await self._session.leave(why)
        await self._fail(JobEnded("job_completed", why, "take the result from a worker that trained"))

    @property
    def _is_left_out(self) -> bool:
        """Whether the worker drains, and the committed world is without it."""
        view = self._view
        return view.draining is not None and self._progress.holds_state and self._state.worker not in view.topology

    async def _fail(self, error: Exception) -> None:
        self._current_world.status = WorkerStatus.FAILED
        await self._current_world.leave()
        raise error
