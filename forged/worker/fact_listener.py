"""How a worker learns what happens to its job.

Law: facts are heard in their order, for as long as the worker is registered. What was missed is asked for, by one
question at a time, and training goes on meanwhile. Whoever the daemon does not want any more learns why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

from anyio.abc import TaskGroup

from forged.client.client import ForgedClient
from forged.client.stream import FactStream
from forged.elastic.messages import ShowCluster
from forged.elastic.phases import Phase
from forged.errors import ForgedError, RequestRefused
from forged.kernel.messages import Gap, Record
from forged.log import Log
from forged.worker.daemon.registration import persevere
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.worker_state.job_view import JobView


class FactListener:
    """Keeps the standing of one worker up to date; `heard` is told of each thing that was heard."""

    def __init__(
        self,
        client: ForgedClient,
        job: str,
        standing: JobView,
        *,
        ask: Callable[[], Awaitable[object]],
        heard: Callable[[Record | Gap], None],
        wake: Callable[[], None],
        tasks: TaskGroup,
        source: Random,
        log: Log,
    ) -> None:
        self._client = client
        self._job = job
        self._standing = standing
        self._ask = ask
        self._heard = heard
        self._wake = wake
        self._tasks = tasks
        self._random = source
        self._log = log
        self._may_ask = False
        self._is_asking = False
        self._gaps = 0

    async def listen(self, facts: FactStream) -> None:
        """Hear what happens to the job, for ever."""
        try:
            async for item in facts:
                self.hear(item)
        except ForgedError as error:
            # Training cannot go on here.
            self._standing.end = error
            self._wake()
        finally:
            facts.close()

    def hear(self, item: Record | Gap) -> None:
        """Take one thing."""
        if isinstance(item, Gap):
            self._standing.miss(item)
            self._gaps += 1
        else:
            self._standing.hear(item)
        self._ask_if_outdated()
        self._heard(item)
        self._wake()

    def begin_to_ask(self) -> None:
        """The daemon knows this worker: what is missed can be asked for from now on, and what was missed already."""
        self._may_ask = True
        self._ask_if_outdated()

    def _ask_if_outdated(self) -> None:
        if self._standing.outdated and self._may_ask and not self._is_asking:
            self._is_asking = True
            self._tasks.start_soon(self._catch_up)

    async def _catch_up(self) -> None:
        """Learn what was missed; training goes on meanwhile."""
        try:
            while self._standing.outdated:
                gaps = self._gaps
                await self._ask_again()
                # The answer may be older than what was missed meanwhile.
                self._standing.outdated |= self._gaps > gaps and self._standing.end is None
        except ForgedError as error:
            self._standing.end = error
        finally:
            self._is_asking = False
        self._wake()

    async def _ask_again(self) -> None:
        try:
            await self._ask()
        except RequestRefused as error:
            self._standing.outdated = False
            await self._learn_the_end(error)

    async def _learn_the_end(self, error: RequestRefused) -> None:
        """Find out why the daemon does not want this worker any more."""
        standing = self._standing
        if error.code == "job_over":
            shown = await persevere(lambda: self._client.request(ShowCluster(self._job)), self._random, self._log)
            if shown.phase is Phase.COMPLETED:
                standing.completed = shown.state.current_step
            else:
                see = f"see `forgectl events --job {self._job}`"
                standing.end = JobEnded("job_aborted", f"the job was aborted: {shown.reason}", see)
        elif error.code == "worker_gone":
            standing.end = WorkerEvicted(error.message)
        else:
            standing.end = error
