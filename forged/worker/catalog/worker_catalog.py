"""The checkpoint catalogue of a job, as one worker uses it; a `forged.checkpoint.ports.CheckpointCatalog`.

Invariants:
- The methods are called from threads, and not from the session's event loop, for which some of them wait.
- No call waits longer than `ANSWER_S` and a moment. Without an answer the worker goes by what it knows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from forged.catalog.cadence import Measured
from forged.catalog.messages import (
    CheckpointCadence,
    CompleteCheckpoint,
    FailCheckpoint,
    FindRestorePoints,
    HoldCheckpoint,
    ReleaseCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    RestorePoints,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointState, CheckpointType
from forged.clock import Clock
from forged.elastic.messages import WorkerDraining, WorkerFailed, WorkerLeft
from forged.errors import ForgedError, RequestRefused
from forged.kernel.messages import Fact, Gap, UnknownFact
from forged.log import Log
from forged.worker.catalog.deletions import Deletions
from forged.worker.catalog.reports import CheckpointReports, Report
from forged.worker.registration import Registration
from forged.worker.worker_state.session_state import SessionState

if TYPE_CHECKING:
    # Loaded by scripts that use checkpoints.
    from forged.checkpoint.ports import ObservedSave, RestoreAdvice, Restored

T = TypeVar("T")

ANSWER_S = 2.0
"""How long the catalogue may take to answer before the worker goes on without it."""
LOOP_S = 1.0
"""How much longer the worker's event loop may take to pass the answer on."""
ASK_AGAIN_S = 60.0
"""How long the catalogue is not asked what it knows, after it has not answered."""
HOLD_S = 90.0
"""How long a checkpoint that is read is held, from each renewal on."""
KNOWN_MAX = 10_000
_LOCAL_MEMORY = "memory:"


@dataclass(frozen=True, slots=True)
class _Session:
    """What the catalogue uses of the worker's session."""

    registration: Registration
    state: SessionState
    tasks: TaskGroup
    loop: asyncio.AbstractEventLoop


class WorkerCatalog:
    """The catalogue for the checkpoints of one worker."""

    def __init__(self, clock: Clock, log: Log) -> None:
        self._clock = clock
        self._log = log
        self._reports = CheckpointReports(log)
        self._deletions = Deletions(self._reports, log)
        self._session: _Session | None = None
        self._ids: dict[tuple[str, str], str] = {}
        """The catalogue's ids of the saves in progress, by path and save id."""
        self._known: dict[str, None] = {}
        """The paths of the checkpoints that the catalogue knows, the oldest first."""
        self._asked_again_at = -math.inf
        self._restored: Restored | None = None
        """What this worker has resumed from, until its first world is entered."""
        self._has_entered = False
        self._began_at: float | None = None
        self._failures = 0
        self._draining: dict[str, float] = {}
        """Since when each draining worker drains."""

    # The session.

    def begin_session(self, registration: Registration, state: SessionState, tasks: TaskGroup) -> None:
        """There is a connection to the daemon from now on."""
        self._session = _Session(registration, state, tasks, asyncio.get_running_loop())
        self._has_entered = False
        self._draining.clear()
        if self._began_at is None:
            self._began_at = self._clock.monotonic()

    def end_session(self) -> None:
        self._session = None

    async def run(self) -> None:
        """Send the reports of a registered worker as they come."""
        if self._session is not None:
            await self._reports.run(self._session.registration)

    async def deliver(self) -> None:
        """Send the reports that are left."""
        if self._session is not None:
            await self._reports.deliver(self._session.registration)

    def hear(self, news: Fact | UnknownFact | Gap) -> None:
        """Count the failures of workers, and note which ones drain."""
        match news:
            case WorkerFailed():
                self._failures += 1
                self._draining.pop(news.worker_id, None)
            case WorkerLeft():
                self._draining.pop(news.worker_id, None)
            case WorkerDraining():
                self._draining.setdefault(news.worker_id, self._clock.monotonic())

    def enter_world(self, rank: int, step: int) -> None:
        """The worker has entered a world with this committed step. Rank 0 of the first one reports the restore."""
        restored, self._restored = self._restored, None
        is_first, self._has_entered = not self._has_entered, True
        if restored is not None and is_first and rank == 0:
            self._reports.add(Report(f"restore of step {step}", partial(self._send_restore, restored, step)))

    # Saves.

    def save_started(self, save: ObservedSave) -> None:
        self._add("start", save, partial(self._send_start, save, self._clock.monotonic()))

    def save_committed(self, save: ObservedSave, size_bytes: int, seconds: float) -> None:
        began_at = self._clock.monotonic() - seconds
        self._add("end", save, partial(self._send_commit, save, began_at, size_bytes, seconds))

    def save_failed(self, save: ObservedSave, reason: str) -> None:
        self._add("failure", save, partial(self._send_failure, save, self._clock.monotonic(), reason))

    def _add(self, what: str, save: ObservedSave, send: Callable[[Registration], Awaitable[None]]) -> None:
        # What is in the memory of this process cannot be restored from elsewhere.
        if not save.storage_path.startswith(_LOCAL_MEMORY):
            self._reports.add(Report(f"{what} of {save.prefix}", send, save.storage_path))

    async def _send_start(self, save: ObservedSave, began_at: float, registration: Registration) -> None:
        await self._id_of(save, began_at, registration)

    async def _send_commit(
        self, save: ObservedSave, began_at: float, size_bytes: int, seconds: float, registration: Registration
    ) -> None:
        checkpoint = await self._id_of(save, began_at, registration)
        job, worker, incarnation = registration.job, registration.worker.id, registration.incarnation
        completed = await registration.send(
            CompleteCheckpoint(job, worker, incarnation, checkpoint, size_bytes, seconds, save.parent_path)
        )
        self._ids.pop((save.storage_path, save.save_id), None)
        if self._session is not None:
            self._deletions.start(self._session.tasks, save.storage, completed.delete)

    async def _send_failure(self, save: ObservedSave, began_at: float, reason: str, registration: Registration) -> None:
        checkpoint = await self._id_of(save, began_at, registration)
        job, worker, incarnation = registration.job, registration.worker.id, registration.incarnation
        await registration.send(FailCheckpoint(job, worker, incarnation, checkpoint, reason))
        self._ids.pop((save.storage_path, save.save_id), None)

    async def _id_of(self, save: ObservedSave, began_at: float, registration: Registration) -> str:
        """The catalogue's id of a save, which is started there if it was not."""
        key = save.storage_path, save.save_id
        if key not in self._ids:
            meta = await registration.send(
                StartCheckpoint(
                    registration.job,
                    registration.worker.id,
                    registration.incarnation,
                    save.epoch,
                    save.step,
                    save.storage_path,
                    save.save_id,
                    CheckpointType.INCREMENTAL if save.parent else CheckpointType.FULL,
                    save.parent_path,
                    metrics=dict(save.metrics),
                    reason=save.reason,
                    keep=save.keep,
                    age_s=max(0.0, self._clock.monotonic() - began_at),
                )
            )
            self._ids[key] = meta.checkpoint_id
            self._note(save.storage_path)
        return self._ids[key]

    def _note(self, *paths: str) -> None:
        """The catalogue knows these checkpoints."""
        self._known.update(dict.fromkeys(paths))
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _note_all(self, found: RestorePoints) -> None:
        self._note(*(point.meta.storage_path for point in found.points), *(one.storage_path for one in found.excluded))

    # What the script deletes.

    def withdraw(self, storage_path: str, step: int) -> bool:
        """Whether the script may delete a checkpoint of this step, which is not reported any more then.

        One that the catalogue knows is the daemon's to delete: it may be pinned or held. The catalogue may know one
        that this worker has neither saved nor asked for, so it is asked.
        """
        session = self._session

        async def withdraw() -> bool:
            assert session is not None
            if storage_path in self._known:
                return False
            is_withdrawn = self._reports.withdraw(storage_path)
            return await self._is_unknown(session, storage_path, step) if is_withdrawn is None else is_withdrawn

        if session is None:
            has_asked = self._began_at is not None
            return storage_path not in self._known and (not has_asked or bool(self._reports.withdraw(storage_path)))
        return bool(self._on_loop(withdraw))

    async def _is_unknown(self, session: _Session, storage_path: str, step: int) -> bool:
        """Whether the catalogue has no checkpoint at a path; false if it does not answer."""
        now = self._clock.monotonic()
        if now < self._asked_again_at:
            return False
        folder = storage_path.rpartition("/")[0]
        try:
            self._note_all(await _restore_points(session, folder, step))
        except ForgedError:
            # Each question takes its time, and there may be many.
            self._asked_again_at = now + ASK_AGAIN_S
            return False
        return storage_path not in self._known

    # Restoring.

    def find_restore_points(self, folder: str) -> RestoreAdvice | None:
        """What the catalogue says of a folder; None if it does not answer in time."""
        session = self._session
        if session is None:
            self._log.info("resuming without the checkpoint catalogue", reason="the worker is not connected")
            return None

        async def ask() -> RestorePoints | str:
            try:
                return await _restore_points(session, folder)
            except ForgedError as error:
                return error.message

        found = self._on_loop(ask)
        if not isinstance(found, RestorePoints):
            reason = found or f"the daemon did not answer within {ANSWER_S:g} s"
            self._log.warning("resuming without the checkpoint catalogue", reason=reason)
            return None
        return self._advice(found, f"{folder}/")

    def _advice(self, found: RestorePoints, lead: str) -> RestoreAdvice:
        from forged.checkpoint.ports import CataloguedCheckpoint, RestoreAdvice

        self._note_all(found)
        points = [
            CataloguedCheckpoint(
                meta.checkpoint_id, meta.storage_path.removeprefix(lead), meta.step, meta.size_bytes, point.reason
            )
            for point in found.points
            if (meta := point.meta).storage_path.startswith(lead)
        ]
        # A save without a reported end may be whole: its manifest tells. A name may have been used before.
        offered = {point.prefix for point in points}
        excluded = {
            prefix: one.reason
            for one in found.excluded
            if (one.abandoned or one.state is not CheckpointState.CREATING)
            and (prefix := one.storage_path.removeprefix(lead)) not in offered
        }
        return RestoreAdvice(points, excluded)

    @contextmanager
    def hold(self, checkpoint_id: str) -> Iterator[None]:
        """Have the catalogue keep a checkpoint during the block."""
        is_over = asyncio.Event()
        session = self._session

        async def begin() -> bool:
            assert session is not None
            is_held = await self._hold(session.registration, checkpoint_id)
            if is_held:
                session.tasks.start_soon(self._keep_holding, session.registration, checkpoint_id, is_over)
            return is_held

        is_held = session is not None and bool(self._on_loop(begin))
        try:
            yield
        finally:
            if is_held and session is not None:
                self._call(session, is_over.set)

    async def _hold(self, registration: Registration, checkpoint_id: str) -> bool:
        try:
            await registration.ask(
                HoldCheckpoint(registration.job, checkpoint_id, registration.worker.id, HOLD_S), ANSWER_S
            )
        except ForgedError as error:
            self._log.info("a checkpoint is read without a hold", checkpoint=checkpoint_id, reason=str(error))
            return False
        return True

    async def _keep_holding(self, registration: Registration, checkpoint_id: str, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            with anyio.move_on_after(HOLD_S / 3):
                await is_over.wait()
                break
            await self._hold(registration, checkpoint_id)
        self._reports.add(Report(f"release of {checkpoint_id}", partial(self._send_release, checkpoint_id)))

    async def _send_release(self, checkpoint_id: str, registration: Registration) -> None:
        await registration.send(ReleaseCheckpoint(registration.job, checkpoint_id, registration.worker.id))

    def report_corrupt(self, checkpoint_id: str, reason: str) -> None:
        """A checkpoint could not be read, because its bytes are damaged or gone."""

        async def send(registration: Registration) -> None:
            await registration.send(ReportCorruptCheckpoint(registration.job, checkpoint_id, reason))

        self._reports.add(Report(f"corruption of {checkpoint_id}", send))

    def report_restore(self, restored: Restored) -> None:
        """This worker continues from a checkpoint, unless its first world has another state."""
        self._restored = restored

    async def _send_restore(self, restored: Restored, step: int, registration: Registration) -> None:
        report = ReportRestore(
            registration.job,
            registration.worker.id,
            registration.incarnation,
            "" if restored.point is None else restored.point.checkpoint_id,
            step,
            restored.seconds,
            restored.size_bytes,
            list(restored.skipped),
            restored.storage_path,
            restored.save_id,
            restored.repaired_chunks,
        )
        if restored.step != step:
            # The state is that of another worker.
            report = structs.replace(report, checkpoint_id="", storage_path="", save_id="", repaired_chunks=0)
        await registration.send(report)

    # The cadence.

    def measured(self) -> Measured:
        """The failures that this worker has heard of, since when, and when the next worker leaves."""
        if self._began_at is None:
            return Measured()
        now = self._clock.monotonic()
        return Measured(
            failures=self._failures, observed_s=now - self._began_at, drain_notice_s=self._drain_notice_s(now)
        )

    def _drain_notice_s(self, now: float) -> float | None:
        session = self._session
        if session is None or not session.state.has_config:
            return None
        timeout_s = session.state.config.leave_timeout_s
        left = [since + timeout_s - now for since in tuple(self._draining.values())]
        return min((seconds for seconds in left if 0.0 < seconds < math.inf), default=None)

    def tell_cadence(self, text: str) -> None:
        """When the job saves, and why."""
        session = self._session
        if session is not None:
            self._call(session, session.registration.signal, CheckpointCadence(session.registration.job, text))

    # Calls to the session's event loop.

    def _on_loop(self, act: Callable[[], Awaitable[T]]) -> T | None:
        """Await a call on the session's event loop, for a bounded time; None if it does not end within that."""
        session, answer = self._session, Future[T]()
        if session is None or not self._call(session, self._begin, session, act, answer):
            return None
        try:
            return answer.result(ANSWER_S + LOOP_S)
        except (TimeoutError, CancelledError):
            return None

    def _begin(self, session: _Session, act: Callable[[], Awaitable[T]], answer: Future[T]) -> None:
        if self._session is session:
            session.tasks.start_soon(self._answer, act, answer)
        else:
            answer.cancel()

    async def _answer(self, act: Callable[[], Awaitable[T]], answer: Future[T]) -> None:
        try:
            answer.set_result(await act())
        except Exception as error:  # noqa: BLE001 - raised in the calling thread
            answer.set_exception(error)

    def _call(self, session: _Session, act: Callable[..., object], *arguments: object) -> bool:
        """Schedule a call on the session's event loop; false if that is closed."""
        try:
            session.loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:
            return False
        return True


async def _restore_points(session: _Session, folder: str, max_step: int | None = None) -> RestorePoints:
    """The catalogue's answer. A job that no worker has joined yet may not exist: it has no checkpoints."""
    try:
        return await session.registration.ask(
            FindRestorePoints(session.registration.job, folder, max_step=max_step), ANSWER_S
        )
    except RequestRefused as error:
        if error.code != "job_unknown":
            raise
        return RestorePoints([], [])
