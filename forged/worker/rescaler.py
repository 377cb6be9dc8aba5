"""The worker's side of a rescale: how it comes from one world into the next.

`advance` does the one thing that is due, in this order: see that the world has ended, cross into a committed world,
report a broken world, take part in a state transfer, send the stop report; else it waits for a change.

Invariants:
- One thing is done at a time, and only for as long as it is wanted: a fact that arrives meanwhile may end it.
- In a synchronous rescale each worker sends a stop report and takes the state that was settled. In a background rescale
  the members agree on the state when they meet: all from the same stop reports, by the daemon's rule.
- A temporary error is reported to the daemon and tried again; a permanent one ends training here.
- A world's training state is applied when the world is entered, before its hooks are called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import anyio
import msgspec

from forged.clock import Clock
from forged.elastic.messages import RescaleSynchronising
from forged.elastic.model import GlobalTrainingState, RescalingEvent, WorkerId, WorkerStatus
from forged.elastic.rescale.attempt import StopReport, choose_sources, without_state
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.log import Log
from forged.net.transport.tls import TLS_FAILED
from forged.worker.collectives.world import World
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.errors import BLAMELESS, CollectiveAborted, WorldIncomplete, is_temporary
from forged.worker.events import RescaleHooks
from forged.worker.mesh import Mesh
from forged.worker.registration import HeartbeatSender, Registration
from forged.worker.state_transfer.transfer import StateExchange
from forged.worker.worker_state.job_view import Commit
from forged.worker.worker_state.session_state import PeerReport, SessionState

RETRY_PAUSE_S = 0.2
"""The pause before an attempt is followed again after an error."""


class Rescaler:
    """Brings one worker from world to world. `shards` is None for a worker without training data."""

    def __init__(
        self,
        state: SessionState,
        registration: Registration,
        mesh: Mesh,
        exchange: StateExchange,
        shards: ShardHolder | None,
        heartbeat: HeartbeatSender,
        hooks: RescaleHooks,
        clock: Clock,
        log: Log,
        *,
        group_rank: int = 0,
        group_size: int = 1,
    ) -> None:
        self._state = state
        self._view = state.view
        self._current_world = state.current_world
        self._progress = state.progress
        self._registration = registration
        self._mesh = mesh
        self._exchange = exchange
        self._shards = shards
        self._heartbeat = heartbeat
        self._hooks = hooks
        self._clock = clock
        self._log = log
        self._group_rank = group_rank
        self._group_size = group_size
        self._reported = 0
        """The newest attempt for which a stop report was sent."""
        self._accepted = 0
        """The newest attempt whose stop report the daemon has accepted."""
        self._crossed = 0
        """The generation of the newest world that the worker has crossed into, or that it was left out of."""

    async def advance(self, *, takes_state: bool = True) -> None:
        """Do the next thing that leads to a world, or wait for a change.

        Without `takes_state` the worker takes no other state: its script is saving the one that it has.
        """
        view, world = self._view, self._current_world.world
        if world is not None and world.ending is not None:
            self._see_the_end(world.ending.error())
        elif view.outdated:
            await self._state.wait_for_change()
        elif view.committed is not None:
            if takes_state or self._keeps_its_state_in(view.committed):
                await self._cross(view.committed)
            else:
                await self._state.wait_for_change()
        elif self._current_world.peer_report is not None:
            await self._run(partial(self._report_peer, self._current_world.peer_report))
        elif view.synchronising is not None and view.synchronising.attempt == self._reported:
            if takes_state or not self._is_taker(view.synchronising):
                await self._synchronise(view.synchronising)
            else:
                await self._state.wait_for_change()
        elif view.rescaling and view.attempt > self._reported:
            await self._report(view.attempt)
        else:
            await self._state.wait_for_change()

    async def _run(self, act: Callable[[], Awaitable[object]], still: Callable[[], bool] | None = None) -> None:
        """Do something for as long as training continues, the worker does not leave, and `still` holds."""
        # A change that came before this call wakes nothing any more.
        if self._state.is_wanted(still):
            with self._state.acting(still):
                await act()

    # The old world.

    def _see_the_end(self, error: ForgedError) -> None:
        """The world has ended between two steps."""
        self._current_world.lose(error)
        if not isinstance(error, CollectiveAborted):
            # The ranks have called different collectives, which is an error in the script.
            raise error

    async def _report_peer(self, peer_report: PeerReport) -> None:
        await self._registration.report_unreachable_peer(*peer_report)
        self._current_world.peer_report = None

    async def _report(self, attempt: int) -> None:
        """Leave the old world, and send the stop report."""
        self._current_world.status = WorkerStatus.RESCALING
        await self._current_world.leave()
        self._current_world.peer_report = None
        stop = self._progress.stop_report

        async def report() -> None:
            if await self._registration.stopped(attempt, stop):
                self._accepted = attempt
            self._reported = attempt

        # A background rescale may be committed before this is heard.
        await self._run(report, partial(self._view.is_stopping_for, attempt))

    # The state transfer of a synchronous rescale.

    async def _synchronise(self, settled: RescaleSynchronising) -> None:
        """Do this worker's part of what was settled; after a temporary error, again."""
        still = partial(self._view.is_synchronising_for, settled.attempt)
        try:
            await self._give_or_take(settled, still)
        except ForgedError as error:
            if not is_temporary(error) or error.code == TLS_FAILED:
                raise
            self._log.warning("the rescale attempt failed; retrying", attempt=settled.attempt, reason=str(error))
            await self._run(partial(anyio.sleep, RETRY_PAUSE_S), still)

    async def _give_or_take(self, settled: RescaleSynchronising, still: Callable[[], bool]) -> None:
        """Offer the state or take the source's; then fetch the shards, and wait for the commit."""
        attempt, is_source = settled.attempt, self._is_source(settled)
        if is_source:
            self._require_whole_state()
        with self._offering(attempt) if is_source else nullcontext():
            if self._is_taker(settled):
                await self._run(partial(self._take, settled), still)
            if self._shards is not None and still():
                await self._run(partial(self._shards.obtain, attempt), still)
            while still() and not self._state.is_leave_due:
                await self._state.wait_for_change()

    async def _take(self, settled: RescaleSynchronising) -> None:
        await self._exchange.take(settled)
        self._progress.receive_state(settled.step)
        if self._shards is None:
            await self._registration.ready(settled.attempt)

    def _offering(self, attempt: int) -> AbstractContextManager[None]:
        offering = self._exchange.offering(attempt)
        self._progress.holds_state = True
        return offering

    def _require_whole_state(self) -> None:
        """Refuse to train on, or to give others, a state that is half changed."""
        if self._progress.is_half_changed:
            raise RequestRefused(
                "state_half_changed",
                f"the script of {self._registration.worker.id} has left a step after its commit, and no other worker"
                " has a state to give",
                "restore the state and call `update_training_state` before the next step, or start again from a"
                " checkpoint",
            )

    def _is_source(self, settled: RescaleSynchronising) -> bool:
        return settled.source_for(self._group_rank).id == self._registration.worker.id

    def _is_taker(self, settled: RescaleSynchronising) -> bool:
        return not (self._is_source(settled) or self._view.leaves or self._has_state_of(settled.step))

    def _has_state_of(self, step: int | None) -> bool:
        """Whether so many steps are applied to this worker's state."""
        return self._progress.holds_state and self._progress.stop_report.position == step

    # Into the new world.

    def _keeps_its_state_in(self, commit: Commit) -> bool:
        """Whether crossing into this world takes no state: the members have the same, or the world is not entered."""
        if self._view.rescaling or self._view.lost:
            return True
        return self._registration.worker not in commit.topology or self._has_state_of(commit.step)

    async def _cross(self, commit: Commit) -> None:
        """Leave the old world for a committed one; enter that unless it is known to be broken already."""
        view, still = self._view, partial(self._view.is_crossing_into, commit)
        is_member = self._registration.worker in commit.topology
        if commit.attempt and commit.attempt == self._accepted:
            # A worker that has missed this attempt's world may learn of another one under the same attempt.
            self._accepted = 0
            if is_member or self._has_state_of(commit.step):
                self._progress.apply_commit(commit)
        if self._group_size > 1 and not is_member and view.draining is None:
            # The rest trains on. As long as it has not, this worker's state may make up a whole one with theirs.
            is_next = commit.before.generation == self._crossed
            if self._progress.holds_state and not (is_next and self._has_state_of(commit.step)):
                self._progress.distrust_state()
        self._crossed = commit.topology.generation
        await self._current_world.leave()
        self._current_world.peer_report = None
        if still() and is_member:
            await self._run(partial(self._enter, commit), still)
        if view.committed is commit and not self._state.is_leave_due:
            # A worker that is due to leave and is kept after all crosses still.
            view.committed = None
            self._state.wake()

    async def _enter(self, commit: Commit) -> None:
        """Meet the members, apply the training state, and call the hooks, which tell the subscribers."""
        topology = commit.topology
        try:
            world, agreement = await self._meet(commit)
        except ForgedError as error:
            if not is_temporary(error):
                raise
            hub = topology.workers[0].id if error.code == TLS_FAILED else ""
            self._current_world.fail_to_enter(topology.generation, error, hub)
            return
        stop, progress = agreement.stop, self._progress
        rate = stop.learning_rate if commit.learning_rate is None else commit.learning_rate
        state = GlobalTrainingState(
            stop.epoch,
            agreement.step,
            rate or 0.0,
            commit.global_batch_size or stop.global_batch_size,
            topology.world_size,
            self._clock.wall(),
        )
        progress.apply(state)
        if self._view.committed is commit:
            # In a background rescale the next world may be committed by now.
            self._view.committed = None
        if progress.usage is not None:
            progress.usage.enter(topology.generation, progress.step)
        self._current_world.enter(world)
        event = RescalingEvent.between(commit.before, topology, self._clock.wall(), commit.reason)
        await self._hooks.on_rescaling_event(event)
        await self._hooks.synchronize_state(state)
        # The first mark of a world: all members have met and have the state.
        self._current_world.mark()
        if not self._state.config.use_synchronous_rescaling:
            # After a background rescale the daemon learns of that from the heartbeats alone.
            self._heartbeat.beat_now()

    async def _meet(self, commit: Commit) -> tuple[World, StateAgreement]:
        """Connect to the other members, and have the state and the shards that the world starts with."""
        topology = commit.topology
        # A member that waits here has come further than the members that are missing.
        self._current_world.come_to(topology)
        world = await self._mesh.enter(topology.generation, topology, self._state.config.rescale_silence_s or None)
        try:
            agreement = await self._agree(world, commit)
            if self._shards is not None:
                await self._shards.adopt(commit)
        except BaseException:
            world.abort(f"{self._registration.worker.id} cannot enter this world")
            raise
        return world, agreement

    async def _agree(self, world: World, commit: Commit) -> StateAgreement:
        """Agree on the state; the source gives it to the members that have another one."""
        agreement = await agree(world, self._progress.stop_report, self._group_size)
        if world.rank in agreement.sources:
            self._require_whole_state()
        if not agreement.behind:
            return agreement
        # A member that learnt of this world from the daemon's answer may know another attempt.
        attempt = await world.broadcast(commit.attempt, agreement.sources[0])
        if world.rank in agreement.sources:
            with self._offering(attempt):
                await world.barrier()
        else:
            if world.rank in agreement.behind:
                source = agreement.sources[world.rank % self._group_size]
                await self._fetch_agreed(commit.topology.workers[source], attempt)
                self._progress.receive_state(agreement.step)
            await world.barrier()
        return agreement

    async def _fetch_agreed(self, source: WorkerId, attempt: int) -> None:
        try:
            await self._exchange.fetch(source, attempt)
        except Unavailable as error:
            blamed = "" if error.code in BLAMELESS else source.id
            raise WorldIncomplete(f"the state could not be fetched from {source}: {error.message}", blamed) from error


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StopReport).decode


@dataclass(frozen=True, slots=True)
class StateAgreement:
    """The state sources of a world, and the ranks that need their state."""

    sources: tuple[int, ...]
    """The ranks of the state sources, by group rank; one without groups."""
    stop: StopReport
    """The stop report of the first source."""
    behind: frozenset[int]
    """The ranks that have another state."""

    @property
    def step(self) -> int:
        """Steps applied to the world's state."""
        return self.stop.position


async def agree(world: World, own: StopReport, group_size: int = 1) -> StateAgreement:
    """Exchange stop reports with all members of a world."""
    return settle(world.names, [_read(told) for told in await world.all_gather(_encode(own))], group_size)


def settle(names: tuple[str, ...], stops: list[StopReport], group_size: int = 1) -> StateAgreement:
    """What follows from the members' stop reports, in rank order."""
    by_name = dict(zip(names, stops, strict=True))
    group_ranks = {name: rank % group_size for rank, name in enumerate(names)}
    found = choose_sources(names, by_name, group_ranks=group_ranks, group_size=group_size)
    if not found:
        raise WorldIncomplete("no step is one whose state the members have for all group ranks", "")
    behind = frozenset(names.index(name) for name in without_state(by_name, found))
    return StateAgreement(tuple(map(names.index, found)), by_name[found[0]], behind)


def _read(told: bytes) -> StopReport:
    try:
        return _decode(told)
    except (msgspec.MsgspecError, TypeError) as error:
        raise PeerError("stop_invalid", f"a worker sent no valid stop report: {error}") from error
