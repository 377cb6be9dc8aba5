"""Keeps a worker's view of its job current, and acts at once on what cannot wait for the next step boundary.

Invariants:
- Facts are taken in their order for as long as the worker is registered.
- Missed facts are made up for by joining again, one request at a time; training continues meanwhile.
- A worker that the daemon no longer accepts learns the reason.
"""

from __future__ import annotations

from anyio.abc import TaskGroup

from forged.client.stream import FactStream
from forged.elastic.messages import GroupBroken, JoinReply
from forged.elastic.phases import Phase
from forged.errors import ForgedError, RequestRefused
from forged.jobs.model import JobChanged
from forged.kernel.messages import Fact, Gap, Record, UnknownFact
from forged.worker.catalog.worker_catalog import WorkerCatalog
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.drain import Drain
from forged.worker.errors import WorkerEvicted, job_aborted
from forged.worker.mesh import Mesh
from forged.worker.registration import HeartbeatSender, Registration
from forged.worker.worker_state.session_state import SessionState, WorkerSpec


class FactListener:
    """Takes the facts of one worker's job."""

    def __init__(
        self,
        spec: WorkerSpec,
        state: SessionState,
        registration: Registration,
        heartbeat: HeartbeatSender,
        drain: Drain,
        mesh: Mesh,
        catalog: WorkerCatalog,
        tasks: TaskGroup,
    ) -> None:
        self.shards: ShardHolder | None = None
        """Set once the worker has been taken in, if it has training data."""
        self._spec = spec
        self._state = state
        self._view = state.view
        self._registration = registration
        self._heartbeat = heartbeat
        self._drain = drain
        self._mesh = mesh
        self._catalog = catalog
        self._tasks = tasks
        self._may_ask = False
        self._is_asking = False
        self._gaps = 0

    # Facts.

    async def listen(self, facts: FactStream) -> None:
        """Take facts for as long as the stream lasts."""
        try:
            async for item in facts:
                self.hear(item)
        except ForgedError as error:
            self._state.fail(error)
        finally:
            facts.close()

    def hear(self, item: Record | Gap) -> None:
        if isinstance(item, Gap):
            self._view.miss(item)
            self._gaps += 1
        else:
            self._view.hear(item)
        self._ask_if_outdated()
        self._act_on(item if isinstance(item, Gap) else item.fact)
        self._state.wake()

    def _act_on(self, news: Fact | UnknownFact | Gap) -> None:
        if isinstance(news, JobChanged):
            self._state.follow_settings(news.settings)
            self._heartbeat.follow_settings()
        if isinstance(news, GroupBroken) and self._state.worker.id in news.waiting:
            lost = news.worker_id
            self._spec.log.warning("this worker's group is broken, and waits until it is whole", lost=lost)
        self._drain.begin_if_told()
        self._drain.hear(news)
        self._catalog.hear(news)
        if self.shards is not None:
            if not isinstance(news, Gap):
                self.shards.on_fact(news)
            self.shards.obtain_in_background(self._view.background_attempt)
        world = self._state.current_world.world
        if self._view.lost and world is not None:
            world.abort(f"{self._view.lost} failed or left")

    # The daemon's answer to a join, which is newer than a gap in the facts.

    def learn(self, joined: JoinReply) -> None:
        """Take over what the daemon has told of the job."""
        self._mesh.trust(joined.peer_key)
        self._view.catch_up(joined)
        self._state.follow_settings(self._view.settings)
        self._heartbeat.follow_settings()
        self._drain.begin_if_told()
        if self.shards is not None:
            self.shards.obtain_in_background(self._view.background_attempt)

    def begin_to_ask(self) -> None:
        """The daemon knows this worker: make up for missed facts from now on."""
        self._may_ask = True
        self._ask_if_outdated()

    def _ask_if_outdated(self) -> None:
        if self._view.outdated and self._may_ask and not self._is_asking:
            self._is_asking = True
            self._tasks.start_soon(self._catch_up)

    async def _catch_up(self) -> None:
        try:
            while self._view.outdated:
                gaps = self._gaps
                await self._join_again()
                # The answer may be older than a gap that came meanwhile.
                self._view.outdated |= self._gaps > gaps and self._view.end is None
        except ForgedError as error:
            self._view.end = error
        finally:
            self._is_asking = False
        self._state.wake()

    async def _join_again(self) -> None:
        try:
            self.learn(await self._registration.join(self._spec, again=True))
        except RequestRefused as error:
            self._view.outdated = False
            await self._learn_the_end(error)
        else:
            if self._state.drain.is_leaving:
                # A restarted daemon does not know that the worker is leaving, and would count on it.
                self._heartbeat.beat_now()

    async def _learn_the_end(self, error: RequestRefused) -> None:
        """Find out why the daemon no longer accepts this worker."""
        job = self._registration.job
        if error.code == "job_over":
            shown = await self._registration.show_cluster()
            if shown.phase is Phase.COMPLETED:
                self._view.completed = shown.state.current_step
            else:
                self._view.end = job_aborted(job, shown.reason)
        elif error.code == "worker_gone":
            self._view.end = WorkerEvicted(error.message)
        else:
            self._view.end = error
