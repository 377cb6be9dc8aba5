"""What a worker says to the daemon.

Law: what the others wait for is said until the daemon has heard it, however long it is away. That a report comes too
late for its attempt is nobody's mistake; every other refusal is told. All of it goes under the incarnation of this
worker, so that nothing is taken for the word of another with its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, TypeVar

import anyio
import msgspec

from forged import retry
from forged.client.client import ForgedClient
from forged.elastic.compatibility import SharedConfig
from forged.elastic.messages import (
    AnnounceLeave,
    AttemptProgress,
    Heartbeat,
    JoinJob,
    JoinReply,
    LeaveJob,
    ReadLeave,
    ReportReady,
    ReportStopped,
    ReportTrouble,
)
from forged.elastic.model import WorkerId
from forged.elastic.rescale.attempt import StopReport
from forged.errors import ForgedError, RequestRefused
from forged.jobs.model import SettingValue
from forged.kernel.messages import Request
from forged.log import Log
from forged.retry import RetryPolicy
from forged.worker.daemon.wait_reporter import pauses

R = TypeVar("R")

PERSEVERING = RetryPolicy(attempts=None, delay_s=0.05, exponential=True, delay_max_s=1.0, jitter=0.5)
LEAVE_TIMEOUT_S = 2.0
"""How long it tries to say goodbye, whatever happens meanwhile."""


class Registration:
    """One worker's word."""

    def __init__(
        self, client: ForgedClient, job: str, worker: WorkerId, incarnation: bytes, source: Random, log: Log
    ) -> None:
        self._client = client
        self.job = job
        self.worker = worker
        self.incarnation = incarnation
        self._random = source
        self._log = log

    async def join(
        self,
        pid: int,
        attributes: Mapping[str, str],
        settings: dict[str, SettingValue] | None,
        *,
        again: bool = False,
        with_data: bool = False,
        local_world_size: int = 1,
        common: SharedConfig | None = None,
    ) -> JoinReply:
        """Become a worker of the job; `again`, to learn what was missed."""
        return await self.say(
            JoinJob(
                self.job,
                self.worker,
                self.incarnation,
                pid,
                local_world_size,
                attributes=dict(attributes),
                settings=settings,
                rejoin=again,
                with_data=with_data,
                shared_config=common,
            )
        )

    async def stopped(self, attempt: int, stop: StopReport) -> bool:
        """Say where this worker has stopped; false if that comes too late."""
        return await self._report(
            ReportStopped(
                self.job,
                self.worker.id,
                self.incarnation,
                attempt,
                stop.step,
                stop.epoch,
                stop.learning_rate,
                stop.global_batch_size,
                stop.holds_state,
                stop.finished,
            )
        )

    async def ready(self, attempt: int) -> bool:
        """Say that this worker has the state; false if that comes too late."""
        return await self._report(ReportReady(self.job, self.worker.id, self.incarnation, attempt))

    async def announce_leave(self, reason: str) -> bool:
        """Say that this worker is to go, so that others form a world without it; tells whether it may go at once."""
        leave = await self.say(AnnounceLeave(self.job, self.worker.id, self.incarnation, reason))
        return leave.may_leave

    async def may_leave(self) -> bool:
        """Whether it may by now; costs the daemon no decision."""
        leave = await self.say(ReadLeave(self.job, self.worker.id, self.incarnation))
        return leave.may_leave

    async def leave_if_it_may(self, reason: str, step: int) -> bool:
        """Go, unless the others need this worker; tells whether it has gone."""
        leave = await self.say(
            LeaveJob(self.job, self.worker.id, self.incarnation, reason, step=step, if_permitted=True)
        )
        return leave.may_leave

    async def complain(self, generation: int, peer: str, why: str) -> None:
        """Say that this worker cannot go on with its world."""
        await self.say(ReportTrouble(self.job, self.worker.id, self.incarnation, generation, peer, reason=why))

    async def leave(self, reason: str, step: int, patience_s: float, *, done: bool, failed: bool) -> bool:
        """Say that this worker goes, if that can be said in time; who is interrupted tries no longer than a moment.

        Tells whether there is nothing left to be said.
        """
        is_said = False
        request = LeaveJob(self.job, self.worker.id, self.incarnation, reason, done, failed, step)
        with anyio.move_on_after(patience_s) as scope:
            # Who is cancelled says it all the same, unless nobody listens.
            with anyio.move_on_after(min(patience_s, LEAVE_TIMEOUT_S), shield=True) as moment:
                is_said = await self._leave(request)
            if moment.cancelled_caught:
                is_said = await self._leave(request)
        if scope.cancelled_caught:
            # What is left of some time is no round number.
            why = f"the daemon did not answer within {round(patience_s, 2):g} s"
            self._log.warning("could not say goodbye", why=why)
        return is_said

    async def _leave(self, request: LeaveJob) -> bool:
        try:
            await self.say(request)
        except ForgedError as error:
            self._log.warning("could not say goodbye", why=str(error))
            return isinstance(error, RequestRefused)
        return True

    def beat(self, step: int, marks: int, every_s: float, *, parting: bool = False) -> None:
        """Say that this worker lives, and how soon it says so again, if somebody listens."""
        self._client.signal(Heartbeat(self.job, self.worker.id, self.incarnation, step, marks, every_s, parting))

    def receiving(self, attempt: int, received: int, *, trouble: str, unreached: str) -> None:
        """Say how much of the state has come, if somebody listens; and whom this worker does not reach, and why."""
        said = AttemptProgress(self.job, self.worker.id, self.incarnation, attempt, received)
        self._client.signal(msgspec.structs.replace(said, trouble=trouble, unreachable_peer=unreached))

    async def _report(self, request: Request[Any]) -> bool:
        try:
            await self.say(request)
        except RequestRefused as error:
            if error.code != "attempt_over":
                raise
            self._log.info("a report came too late", why=error.message)
            return False
        return True

    async def say(self, request: Request[R]) -> R:
        """Say something until the daemon has heard it."""
        return await persevere(lambda: self._client.request(request), self._random, self._log)


async def persevere(act: Callable[[], Awaitable[R]], source: Random, log: Log) -> R:
    """Do something until the world lets it be done; what would never be is raised."""
    began_at, quiet = anyio.current_time(), pauses()
    due_s = next(quiet)

    def passes(error: Exception) -> bool:
        nonlocal due_s
        if not retry.is_retryable(error) or getattr(error, "code", "") == "client_closed":
            return False
        tried_s = anyio.current_time() - began_at
        if tried_s < due_s:
            log.info("trying again", why=str(error))
        else:
            log.warning("still trying", for_s=round(tried_s), why=str(error))
            due_s = tried_s + next(quiet)
        return True

    return await retry.run(PERSEVERING, act, sleep=anyio.sleep, random=source.random, retryable=passes)
