"""One worker's session with a daemon: its connections, its registration, and its leaving.

Invariants:
- The parts are made once for a session and end with it. What the script sees of the worker outlives them.
- The fact stream is open before the worker joins, so that no fact is missed between the two.
- A worker that was interrupted while it joined leaves all the same: the daemon may have registered it.
- A worker whose script raised an exception reports a failure, with that exception. A script that is interrupted, exits
  or breaks out of its loop has not failed, and neither has the worker of a job that is over.
- The first reason counts. A leave report that is cancelled is sent again, for a short time only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from forged.client.client import CONNECT_TIMEOUT_S, ForgedClient
from forged.client.connector import START_HINT
from forged.data.messages import CorruptShardFound
from forged.elastic.messages import JoinReply
from forged.elastic.model import WorkerId, WorkerStatus
from forged.errors import ForgedError, Unavailable, describe
from forged.log import Log
from forged.net.transport.port import Address
from forged.retry import REJOINING
from forged.worker.catalog.worker_catalog import WorkerCatalog
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.data.usage_report import UsageReport
from forged.worker.drain import Drain
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.events import RescaleHooks
from forged.worker.fact_listener import FactListener
from forged.worker.mesh import Mesh
from forged.worker.metrics_report import LoggedValues, MetricsReporter
from forged.worker.process.worker_process import WorkerProcess
from forged.worker.registration import LEAVE_TIMEOUT_S, HeartbeatSender, Registration, WaitReporter
from forged.worker.rescaler import Rescaler
from forged.worker.standstill import StandstillReporter
from forged.worker.state_transfer.encoding import pack
from forged.worker.state_transfer.transfer import StateExchange
from forged.worker.transport.bulk_channel import LoopBulkTransport
from forged.worker.transport.peer_messages import session_id_of
from forged.worker.worker_state.job_view import FOLLOWED
from forged.worker.worker_state.session_state import SessionState, WorkerSpec

LOOPBACK = "127.0.0.1"
ABSENCE_LOGGED_AFTER_S = 1.0
"""How long the first connection to the daemon may take before that is logged."""


class WorkerSession:
    """The parts of one worker while it is connected."""

    def __init__(
        self,
        spec: WorkerSpec,
        state: SessionState,
        hooks: RescaleHooks,
        incarnation: bytes,
        client: ForgedClient,
        mesh: Mesh,
        catalog: WorkerCatalog,
        logged: LoggedValues,
        tasks: TaskGroup,
    ) -> None:
        self.state = state
        self.log = spec.log
        self._spec = spec
        self.hooks = hooks
        self._client = client
        self._mesh = mesh
        self._tasks = tasks
        log, clock = spec.log, spec.clock
        self._registration = Registration(client, spec.job, state.worker, incarnation, spec.random, log)
        self._heartbeat = HeartbeatSender(state, self._registration, clock)
        self._usage = UsageReport(state, self._registration, clock, log)
        self.drain = Drain(
            state, self._registration, mesh, self._heartbeat, self._usage, tasks, spec.random.random, log
        )
        self._catalog = catalog
        catalog.begin_session(self._registration, state, tasks)
        self.listener = FactListener(spec, state, self._registration, self._heartbeat, self.drain, mesh, catalog, tasks)
        self.wait_reporter = WaitReporter(self._registration, tasks, log)
        self._standstill = StandstillReporter(state, self._registration, hooks, tasks, clock, log)
        self.metrics = MetricsReporter(state, self._registration, logged, log)
        client.connection_listeners.append(state.wake)
        self._leave_report = LeaveReport(state, self._registration, self._usage, catalog, spec.process)
        self.rescaler: Rescaler | None = None
        """None before the daemon has taken the worker in."""
        self.shards: ShardHolder | None = None
        """None before that, and for a worker without training data."""
        self._is_registered = False
        self._may_be_known = False
        """Whether the daemon may have registered a worker that does not know so."""
        self._leaving_early = anyio.Lock()

    @property
    def is_active(self) -> bool:
        """Whether the world waits for this worker."""
        return self._is_registered and not self._leave_report.is_begun

    @property
    def is_over(self) -> bool:
        """Whether the worker has begun to report its leave."""
        return self._leave_report.is_begun

    @property
    def endpoint(self) -> str:
        """The daemon that the worker is connected to."""
        return self._client.endpoint or ""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a daemon."""
        return self._registration.is_connected

    def descriptors(self) -> list[int]:
        """The file descriptors of all connections, which a forked child must not keep."""
        return self._client.descriptors() + self._mesh.descriptors()

    # Joining.

    async def register(self) -> Rescaler:
        """Become a worker of the job: from now on the world waits for this worker. No effect the second time."""
        if self.rescaler is not None and self._is_registered:
            return self.rescaler
        # A state that cannot be transferred is refused now, and not when another worker needs it.
        pack(self.state.progress.transferable_state)
        facts = await self._client.facts(*FOLLOWED, CorruptShardFound, jobs=[self._spec.job]).__aenter__()
        try:
            self._tasks.start_soon(self.listener.listen, facts)
            self.listener.learn(await self._join())
            rescaler = self.rescaler = self.rescaler or self._make_rescaler()
            self._begin_pulse()
        except BaseException as error:
            facts.close()
            await self._leave_early(error.message if isinstance(error, ForgedError) else reason_of(error).reason)
            raise
        self.state.current_world.joined_at = self._spec.clock.wall()
        self._is_registered, self._may_be_known = True, False
        self._tasks.start_soon(self._heartbeat.run)
        self._tasks.start_soon(self._standstill.run)
        self._tasks.start_soon(self._catalog.run)
        self._tasks.start_soon(self._usage.run)
        self._tasks.start_soon(self.metrics.run)
        self._tasks.start_soon(self.metrics.run_urgent)
        self.listener.begin_to_ask()
        return rescaler

    async def _join(self) -> JoinReply:
        self._may_be_known = True
        try:
            return await self._registration.join(self._spec)
        except ForgedError:
            self._may_be_known = False
            raise

    def _make_rescaler(self) -> Rescaler:
        spec, state = self._spec, self.state
        shards = self.shards = self.listener.shards = self._make_shard_holder()
        if shards is not None:
            shards.obtain_in_background(state.view.background_attempt)
        return Rescaler(
            state,
            self._registration,
            self._mesh,
            self._make_exchange(),
            shards,
            self._heartbeat,
            self.hooks,
            spec.clock,
            spec.log,
            group_rank=spec.group_rank,
            group_size=spec.group_size,
        )

    def _make_exchange(self) -> StateExchange:
        mesh, log = self._mesh, self._spec.log
        progress, rank = self.state.progress, self._spec.group_rank
        return StateExchange(
            mesh.state_server, mesh.state_fetch, self._registration, progress, self._tasks, log, group_rank=rank
        )

    def _make_shard_holder(self) -> ShardHolder | None:
        spec = self._spec
        if spec.data is None:
            return None
        return ShardHolder(
            spec.data,
            self.state.config,
            spec.sampler,
            self._registration,
            self._client.signal,
            self._mesh,
            self._tasks,
            self.state.fail,
            spec.clock,
            spec.random.random,
            uses_threads=not isinstance(spec.carrier, LoopBulkTransport),
            log=spec.log,
        )

    def _begin_pulse(self) -> None:
        registration, client = self._registration, self._client
        endpoints = [str(address) for address in client.endpoints]
        self._spec.process.begin_pulse(
            endpoints, registration.job, registration.worker.id, registration.incarnation, client.token
        )

    # Leaving.

    def tell_done(self, is_done: bool) -> None:
        """Tell the daemon whether the script wants no further step."""
        if self.state.is_done != is_done:
            self.state.is_done = is_done
            self._heartbeat.beat_now()

    def drain_because(self, reason: str) -> None:
        """Drain the worker, unless it drains already."""
        self.state.view.draining = self.state.view.draining or reason
        self.drain.begin_if_told()
        self.state.wake()

    async def leave(self, reason: str, *, done: bool = False, failed: bool = False) -> None:
        """Tell the daemon that this worker leaves, if it answers in time."""
        if self._spec.process.is_forked:
            return
        if self._is_registered:
            self.metrics.report()
            await self._leave_report.send(LeaveReason(reason, failed, done))
        else:
            # The script may have been interrupted while it registered, and that may be leaving at this moment.
            await self._leave_early(reason)

    async def close_catalog(self) -> None:
        """Deliver what was reported to the catalogue after the leave, if the daemon answers in time."""
        if not self._spec.process.is_forked and self._registration.is_connected:
            with anyio.move_on_after(LEAVE_TIMEOUT_S):
                await self._catalog.deliver()
        self._catalog.end_session()

    async def _leave_early(self, reason: str) -> None:
        """Leave for a worker that has not registered, if the daemon may know it. It may register again."""
        with anyio.CancelScope(shield=True):
            async with self._leaving_early:
                if self._may_be_known:
                    step = self.state.progress.step
                    await self._registration.leave(reason, step, LEAVE_TIMEOUT_S, done=False, failed=False)
                self._may_be_known = False


@asynccontextmanager
async def open_session(
    spec: WorkerSpec,
    state: SessionState,
    hooks: RescaleHooks,
    incarnation: bytes,
    wanted: WorkerId,
    endpoints: tuple[str, ...],
    catalog: WorkerCatalog,
    logged: LoggedValues,
) -> AsyncIterator[WorkerSession]:
    """Connect to the daemon and listen for peers inside the block; the worker leaves at its end."""
    client = ForgedClient(
        *endpoints,
        token=spec.token,
        reconnect=REJOINING,
        network=spec.network,
        clock=spec.clock,
        source=spec.random,
    )
    failure: Exception | None = None
    async with (
        _connected(client, spec.log),
        _open_mesh(spec, state, incarnation, wanted, client) as mesh,
        anyio.create_task_group() as tasks,
    ):
        session = WorkerSession(spec, state, hooks, incarnation, client, mesh, catalog, logged, tasks)
        try:
            yield session
        except Exception as error:  # noqa: BLE001 - raised below: a task group would wrap it in an exception group
            failure = error
        except BaseException:
            # A script in another task than the session's must not take this for the end of the training.
            state.fail(
                Unavailable(
                    "session_ended",
                    "the worker's session has ended with an error",
                    "close the worker, which raises that error",
                )
            )
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await session.leave("it was disconnected")
                await session.close_catalog()
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@asynccontextmanager
async def _connected(client: ForgedClient, log: Log) -> AsyncIterator[None]:
    """Be connected to the daemon inside the block; a first connection that takes long is logged."""

    def report() -> None:
        log.warning(
            "no connection to a daemon yet",
            endpoints=", ".join(map(str, client.endpoints)),
            reason=client.last_failures or "no answer",
            gives_up_in_s=CONNECT_TIMEOUT_S - ABSENCE_LOGGED_AFTER_S,
            fix=START_HINT,
        )

    timer = asyncio.get_running_loop().call_later(ABSENCE_LOGGED_AFTER_S, report)
    try:
        async with client:
            timer.cancel()
            yield
    finally:
        timer.cancel()


@asynccontextmanager
async def _open_mesh(
    spec: WorkerSpec, state: SessionState, incarnation: bytes, wanted: WorkerId, client: ForgedClient
) -> AsyncIterator[Mesh]:
    mesh = Mesh(
        wanted.id,
        session_id_of(incarnation),
        spec.job,
        spec.network if spec.peer_tls is None else spec.peer_tls.network(),
        spec.clock,
        spec.log,
        source=spec.random,
        carrier=spec.carrier,
        scheme="tcp" if spec.peer_tls is None else "tls",
    )
    host = wanted.hostname or own_host(client.endpoint)
    async with mesh.open(host, wanted.port) as address:
        state.worker = WorkerId(wanted.id, host, address.port)
        yield mesh


def own_host(endpoint: str | None) -> str:
    """The address of this host that the daemon's host would use; loopback for a daemon on a Unix socket."""
    address = Address.parse(endpoint) if endpoint else Address("unix", path="")
    if address.scheme == "unix":
        return LOOPBACK
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel only chooses the source address.
            probe.connect((address.host, address.port))
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


class LeaveReason(NamedTuple):
    """Why a worker leaves."""

    reason: str
    failed: bool = False
    done: bool = False
    """The training is complete."""


class LeaveReport:
    """One registered worker's leave, which is reported once."""

    def __init__(
        self,
        state: SessionState,
        registration: Registration,
        usage: UsageReport,
        catalog: WorkerCatalog,
        process: WorkerProcess,
    ) -> None:
        self._state = state
        self._registration = registration
        self._usage = usage
        self._catalog = catalog
        self._process = process
        self._reason: LeaveReason | None = None
        self._was_tried = self._is_sent = False
        self._turn = anyio.Lock()

    @property
    def is_begun(self) -> bool:
        return self._reason is not None

    async def send(self, reason: LeaveReason) -> None:
        """Leave for this reason, or for the one that was given first. No effect once the leave is reported."""
        reason = self._reason = self._reason or reason
        async with self._turn:
            if not self._is_sent:
                is_again, self._was_tried = self._was_tried, True
                await self._leave(reason, is_again=is_again)
                self._is_sent = True

    async def _leave(self, leave: LeaveReason, *, is_again: bool) -> None:
        self._state.current_world.status = WorkerStatus.LEAVING
        # This worker may be the only one to know that the training is complete, so it tries for as long as the daemon
        # waits for it; a script that has cancelled the first try does not want to wait for that.
        grace_s = self._state.config.reconnect_grace_s if leave.done and not is_again else 0.0
        moment_s = LEAVE_TIMEOUT_S / 2 if is_again else LEAVE_TIMEOUT_S
        ends_at = anyio.current_time() + max(LEAVE_TIMEOUT_S, grace_s)
        try:
            # A cancelled worker does this all the same, for a moment.
            with anyio.move_on_after(moment_s, shield=True) as moment:
                await self._state.current_world.leave()
                await self._usage.tell()
                await self._catalog.deliver()
            if moment.cancelled_caught:
                with anyio.move_on_after(ends_at - anyio.current_time() - moment_s):
                    await self._usage.tell()
        finally:
            left_s = max(moment_s, ends_at - anyio.current_time())
            is_acknowledged = False
            try:
                is_acknowledged = await self._registration.leave(
                    leave.reason, self._state.progress.step, left_s, done=leave.done, failed=leave.failed
                )
            finally:
                if not is_acknowledged:
                    self._process.leave_through_pulse({**leave._asdict(), "step": self._state.progress.step})


def reason_of(error: BaseException | None) -> LeaveReason:
    """Why a worker leaves whose script has ended with this exception, or with none."""
    match error:
        case None:
            return LeaveReason("its script left the step loop")
        case JobEnded(code="job_removed"):
            return LeaveReason("the job was removed")
        case JobEnded():
            return LeaveReason("the job was aborted")
        case WorkerEvicted():
            return LeaveReason("the daemon declared it failed")
        case SystemExit():
            return LeaveReason(f"its script exited with {_exit_code(error)}")
        case Exception():
            return LeaveReason(f"its script failed: {_in_one_line(error)}", failed=True)
        case _:
            return LeaveReason("its script was interrupted")


def _exit_code(error: SystemExit) -> str:
    """The exit code of the process: Python prints a value that is no number, and exits with 1."""
    if error.code is None:
        return "0"
    said = _in_one_line(error).removeprefix(f"{type(error).__name__}: ")
    return said if isinstance(error.code, int) else f"1: {said}"


def _in_one_line(error: BaseException) -> str:
    return " ".join(describe(error).split())
