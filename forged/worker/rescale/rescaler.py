"""How a worker comes from one world into the next.

Law: one thing is done at a time, and for as long as it makes sense: what is heard meanwhile may end it. Where all stop,
each says where it has stopped and takes the state that was settled; where nobody does, they agree on whose holds when
they meet. What does not work now may work a moment later, and the daemon is told; what never will ends the training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import anyio

from forged.clock import Clock
from forged.elastic.messages import RescaleSynchronising
from forged.elastic.model import GlobalTrainingState, RescalingEvent, WorkerId, WorkerStatus
from forged.errors import ForgedError, Unavailable
from forged.log import Log
from forged.net.transport.tls import TLS_FAILED
from forged.worker.collectives.world import CollectiveAborted, World
from forged.worker.daemon.registration import Registration
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.drain.drain import Drain
from forged.worker.errors import BLAMELESS, passes
from forged.worker.mesh import Mesh, WorldIncomplete
from forged.worker.rescale.agreement import Agreement, agree
from forged.worker.state_transfer.exchange import StateExchange
from forged.worker.worker_state.current_world import CurrentWorld, Trouble, peer_of
from forged.worker.worker_state.job_view import Commit, JobView
from forged.worker.worker_state.progress import TrainingProgress

TROUBLE_PAUSE_S = 0.2
"""How long a worker rests before it tries again to follow an attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What a worker goes from world to world with."""

    line: Registration
    mesh: Mesh
    exchange: StateExchange
    shards: ShardHolder | None
    """The shards of this worker; None without training data."""
    departure: Drain
    rescale_timeout_s: Callable[[], float]
    arrive: Callable[[RescalingEvent, GlobalTrainingState], Awaitable[None]]
    """Told when this worker is in another world, and where the training is there."""
    clock: Clock
    log: Log


class Rescaler:
    """Takes one worker along, from what it hears and where it is."""

    def __init__(self, standing: JobView, presence: CurrentWorld, place: TrainingProgress, means: Means) -> None:
        self._standing = standing
        self._presence = presence
        self._place = place
        self._with = means
        self._settled = 0
        """The attempt that this worker has answered last."""
        self._answered = 0
        """The last one that has taken its answer."""
        self._news = asyncio.Event()
        self._undertaking: tuple[anyio.CancelScope, Callable[[], bool]] | None = None

    def wake(self) -> None:
        """Something has changed."""
        self._news.set()
        if self._undertaking is not None:
            scope, makes_sense = self._undertaking
            if not makes_sense():
                scope.cancel()

    async def rest(self) -> None:
        """Wait for news."""
        self._news.clear()
        await self._news.wait()

    async def come_along(self, *, takes: bool = True) -> None:
        """Do the next thing that leads to a world, or wait for news. Unless it `takes`, its state stays what it is."""
        self._news.clear()
        standing, presence = self._standing, self._presence
        if presence.world is not None and presence.world.ending is not None:
            self._see_the_end(presence.world.ending.error())
        elif standing.outdated:
            await self._news.wait()
        elif standing.committed is not None:
            if takes or self._takes_nothing_from(standing.committed):
                await self._cross(standing.committed)
            else:
                await self._news.wait()
        elif presence.trouble is not None:
            await self._undertake(partial(self._complain, presence.trouble))
        elif standing.synchronising is not None and standing.synchronising.attempt == self._settled:
            if takes or not self._is_taker(standing.synchronising):
                await self._synchronise(standing.synchronising)
            else:
                await self._news.wait()
        elif standing.rescaling and standing.attempt > self._settled:
            await self._report(standing.attempt)
        else:
            await self._news.wait()

    def _see_the_end(self, error: ForgedError) -> None:
        """The world has ended between two steps."""
        self._presence.lose(error)
        if not isinstance(error, CollectiveAborted):
            # The ranks do not do the same, which is the script's mistake.
            raise error

    async def _undertake(self, act: Callable[[], Awaitable[object]], still: Callable[[], bool] = lambda: True) -> None:
        """Do something that takes its time, for as long as it makes sense."""
        standing, departure = self._standing, self._with.departure

        def makes_sense() -> bool:
            return standing.end is None and standing.completed is None and not departure.is_due and still()

        if not makes_sense():
            # What was heard a moment ago wakes nobody any more.
            return
        with anyio.CancelScope() as scope:
            self._undertaking = scope, makes_sense
            try:
                await act()
            finally:
                self._undertaking = None

    async def _until(self, over: Callable[[], bool]) -> None:
        """Wait for the news with which something is over."""
        while not over():
            await self.rest()

    async def _complain(self, trouble: Trouble) -> None:
        """Say that the world is no more."""
        await self._with.line.complain(*trouble)
        self._presence.trouble = None

    async def _report(self, attempt: int) -> None:
        """Say where this worker has stopped."""
        standing = self._standing
        self._presence.status = WorkerStatus.RESCALING
        await self._presence.leave()
        self._presence.trouble = None
        tell = partial(self._with.line.stopped, attempt, self._place.stop)

        async def report() -> None:
            if await tell():
                self._answered = attempt
            self._settled = attempt

        # A world for which nobody has to stop may be committed before this is heard.
        await self._undertake(report, still=lambda: standing.rescaling and standing.attempt == attempt)

    # The state goes from worker to worker.

    async def _synchronise(self, settled: RescaleSynchronising) -> None:
        """Do this worker's part of what was settled; what does not work now may work a moment later."""
        still = partial(self._is_synchronising, settled.attempt)
        try:
            await self._give_or_take(settled, still)
        except ForgedError as error:
            if not passes(error) or error.code == TLS_FAILED:
                raise
            self._with.log.warning("the attempt could not be followed", attempt=settled.attempt, why=str(error))
            await self._undertake(partial(anyio.sleep, TROUBLE_PAUSE_S), still)

    async def _give_or_take(self, settled: RescaleSynchronising, still: Callable[[], bool]) -> None:
        """Give the state to others, or take it from the source, as it was settled; then see to the training data."""
        shards, departure, attempt = self._with.shards, self._with.departure, settled.attempt
        with self._offering(attempt) if self._is_source(settled) else nullcontext():
            if self._is_taker(settled):
                await self._undertake(partial(self._take, settled), still)
            if shards is not None and still():
                await self._undertake(partial(shards.obtain, attempt), still)
            await self._until(lambda: not still() or departure.is_due)

    async def _take(self, settled: RescaleSynchronising) -> None:
        """Become what the source is."""
        await self._with.exchange.take(settled)
        self._place.become(settled.step)
        if self._with.shards is None:
            await self._with.line.ready(settled.attempt)

    def _is_source(self, settled: RescaleSynchronising) -> bool:
        return settled.source.id == self._with.line.worker.id

    def _is_taker(self, settled: RescaleSynchronising) -> bool:
        return not (self._is_source(settled) or self._standing.goes or self._is_at(settled.step))

    def _takes_nothing_from(self, commit: Commit) -> bool:
        """Whether the others of a world cannot have another state than this worker, or it does not enter that one."""
        if self._standing.rescaling or self._standing.lost:
            return True
        return self._with.line.worker not in commit.topology or self._is_at(commit.step)

    def _is_at(self, step: int | None) -> bool:
        """Whether its state is the one behind so many steps."""
        return self._place.holds_state and self._place.stop.position == step

    def _offering(self, attempt: int) -> AbstractContextManager[None]:
        offering = self._with.exchange.offering(attempt)
        self._place.holds_state = True
        return offering

    def _is_synchronising(self, attempt: int) -> bool:
        standing, settled = self._standing, self._standing.synchronising
        is_over = standing.end is not None or standing.completed is not None or standing.committed is not None
        return not is_over and settled is not None and settled.attempt == attempt

    # Into the next world.

    async def _cross(self, commit: Commit) -> None:
        """Go over into a world that was committed, unless it is known already that it does not hold."""
        standing = self._standing

        def holds() -> bool:
            return standing.committed is commit and not (standing.rescaling or standing.lost)

        is_member = self._with.line.worker in commit.topology
        if commit.attempt and commit.attempt == self._answered:
            # Another world may be told of under this attempt, if its own was missed.
            self._answered = 0
            if is_member or self._is_at(commit.step):
                self._place.adopt(commit)
        await self._presence.leave()
        self._presence.trouble = None
        if holds() and is_member:
            await self._undertake(partial(self._enter, commit), holds)
        if standing.committed is commit and not self._with.departure.is_due:
            # Who is due and has to stay after all goes over still.
            standing.committed = None

    async def _enter(self, commit: Commit) -> None:
        """Meet the others of the new world, and be where they are."""
        topology = commit.topology
        try:
            world, agreement = await self._meet(commit)
        except ForgedError as error:
            if not passes(error):
                raise
            hub = topology.workers[0].id if error.code == TLS_FAILED else ""
            self._presence.trouble = Trouble(topology.epoch, peer_of(error) or hub, error.message)
            return
        state = self._state_of(agreement, commit)
        self._place.take_up(state)
        if self._standing.committed is commit:
            # Where nobody has to stop, the next one may have been committed meanwhile.
            self._standing.committed = None
        self._presence.enter(world)
        if self._place.consumption is not None:
            self._place.consumption.enter(topology.epoch, self._place.step)
        event = RescalingEvent.between(commit.before, topology, self._with.clock.wall(), commit.reason)
        await self._with.arrive(event, state)

    async def _meet(self, commit: Commit) -> tuple[World, Agreement]:
        """Enter the world, with the state that holds there and the training data."""
        topology, shards = commit.topology, self._with.shards
        # Who waits here for others has come further than they have.
        self._presence.come_to(topology)
        world = await self._with.mesh.enter(topology.epoch, topology, self._with.rescale_timeout_s() or None)
        try:
            agreement = await self._agree(world, commit)
            if shards is not None:
                await shards.adopt(commit)
        except BaseException:
            world.abort(f"{self._with.line.worker.id} does not go on with it")
            raise
        return world, agreement

    async def _agree(self, world: World, commit: Commit) -> Agreement:
        """Have the state that holds in the new world, or give it to who has not."""
        agreement = await agree(world, self._place.stop)
        if not agreement.behind:
            return agreement
        # Who has learnt of this world from the daemon's answer does not know under which attempt the others have it.
        attempt = await world.broadcast(commit.attempt, agreement.source)
        if agreement.source == world.rank:
            with self._offering(attempt):
                await world.barrier()
        else:
            if world.rank in agreement.behind:
                await self._fetch_agreed(commit.topology.workers[agreement.source], attempt)
                self._place.become(agreement.step)
            await world.barrier()
        return agreement

    async def _fetch_agreed(self, source: WorkerId, attempt: int) -> None:
        """Take the state that the world has agreed on; whose fault it is if that fails, only the daemon can tell."""
        try:
            await self._with.exchange.fetch(source, attempt)
        except Unavailable as error:
            blamed = "" if error.code in BLAMELESS else source.id
            raise WorldIncomplete(f"the state of {source} could not be had: {error.message}", blamed) from error

    def _state_of(self, agreement: Agreement, commit: Commit) -> GlobalTrainingState:
        stop = agreement.stop
        return GlobalTrainingState(
            stop.epoch,
            agreement.step,
            commit.learning_rate or stop.learning_rate,
            commit.global_batch_size or stop.global_batch_size,
            commit.topology.world_size,
            self._with.clock.wall(),
        )
