"""The workers of simulated jobs: they restore, save and report, and die in the middle.

Invariants:
- A save does not wait for its reports; they are sent in order, and lost when the process dies.
- A save publishes its manifest within the time that the daemon leaves a writer that is gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from math import nan
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from forged.catalog.messages import (
    CollectedFiles,
    CompleteCheckpoint,
    ConfirmDeleted,
    FailCheckpoint,
    FindRestorePoints,
    HoldCheckpoint,
    ReleaseCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    RestorePoint,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointType
from forged.client import ForgedClient
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import Request
from tests.simulation.catalog.oracle import Promise, Writer
from tests.simulation.catalog.storage import MANIFEST, SaveName, StoredFile

if TYPE_CHECKING:
    from tests.simulation.catalog.simulation import CatalogSimulation

R = TypeVar("R")

WORKER = "w"
LIFE_S = (2.0, 14.0)
HOLD_S = 4.0
NOTICED_AFTER_S = 2.0
"""Within this time a dead worker is no longer registered."""
ASK_FOR_S = 4.0
STEPS_PER_EPOCH = 20
PATIENCE_S = 0.3
EXPECTED_REFUSALS = frozenset(
    {
        "worker_gone",
        "job_unknown",
        "checkpoint_unknown",
        "checkpoint_transition_refused",
        "checkpoint_not_abandoned",
        "checkpoint_not_managed",
        "checkpoint_pinned",
        "checkpoint_held",
        "checkpoint_parent_needed",
        "job_changed",
    }
)
"""Refusals that a correct caller may get at any time."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, where it saves, and as whom its workers connect."""

    name: str
    folder: str
    is_trusted: bool
    """Whether its workers have an operator's token, so that the daemon may touch any path they name."""
    is_managed: bool = True
    """Whether the daemon may touch its files."""
    has_slots: bool = False
    """Whether its workers stage into slots and have the daemon save."""


async def ask(simulation: CatalogSimulation, client: ForgedClient, request: Request[R]) -> R | None:
    """Send a request until it is answered; None if it was refused for an expected reason."""
    while True:
        try:
            return await client.request(request)
        except RequestRefused as error:
            if error.code == "checkpoint_path_taken":
                simulation.oracle.broken(Promise.NAMED, f"{request} is refused: {error.message}")
            if error.code not in EXPECTED_REFUSALS:
                raise
            simulation.note(f"{type(request).__name__} was refused: {error.code}")
            return None
        except Unavailable as error:
            simulation.note(f"{type(request).__name__} got error {error.code}")
            await anyio.sleep(PATIENCE_S)


class Reading:
    """Reads checkpoints as `Checkpoints.resume` does: holds one, reads all of its chain, releases it."""

    def __init__(
        self, simulation: CatalogSimulation, client: ForgedClient, job: str, holder: str, file_s: float = 0.0
    ) -> None:
        """`file_s` is how long it takes to read a file."""
        self._file_s = file_s
        self._simulation = simulation
        self._oracle = simulation.oracle
        self._client = client
        self._job = job
        self._holder = holder

    async def points(self) -> list[RestorePoint] | None:
        """What is offered; None if the daemon does not answer."""
        asked_at = self._simulation.loop.time()
        try:
            found = await self._client.request(FindRestorePoints(self._job), timeout_s=ASK_FOR_S)
        except Unavailable:
            return None
        except RequestRefused as error:
            if error.code != "job_unknown":
                raise
            return None
        self._oracle.found(self._job, found, asked_at)
        return found.points

    async def read(self, point: RestorePoint, *, dies: bool = False) -> bool:
        """Read all files of a checkpoint; returns whether that succeeded. With `dies` the hold is not released."""
        checkpoint_id = point.meta.checkpoint_id
        if not await self._hold(checkpoint_id):
            return False
        try:
            problem = await self._read_chain(point)
        except Unavailable:
            return False
        if problem:
            await ask(self._simulation, self._client, ReportCorruptCheckpoint(self._job, checkpoint_id, problem))
        if not dies:
            self._oracle.held.pop((checkpoint_id, self._holder), None)
            await ask(self._simulation, self._client, ReleaseCheckpoint(self._job, checkpoint_id, self._holder))
        self._simulation.meet("a reader finds damage" if problem else "a reader reads a checkpoint as a whole")
        return not problem

    async def _hold(self, checkpoint_id: str) -> bool:
        """Hold it, or hold it for longer."""
        asked_at = self._simulation.loop.time()
        request = HoldCheckpoint(self._job, checkpoint_id, self._holder, HOLD_S)
        try:
            await self._client.request(request, timeout_s=ASK_FOR_S)
        except (Unavailable, RequestRefused) as error:
            self._simulation.note(f"{checkpoint_id} is not held: {error.code}")
            return False
        self._oracle.held[checkpoint_id, self._holder] = asked_at + HOLD_S
        return True

    async def _read_chain(self, point: RestorePoint) -> str:
        """Read every file, of the checkpoint and of those that its manifest names; returns what is damaged."""
        checkpoint_id, storage = point.meta.checkpoint_id, self._simulation.storage
        save: SaveName | None = self._oracle.saves.get(checkpoint_id)
        # What the catalogue did not know of a chain, it could not keep.
        known = {self._oracle.saves.get(link) for link in point.chain}
        while save is not None:
            await storage.reach(save.path)
            manifest = storage.manifest(save)
            if manifest is None:
                return self._missing(checkpoint_id, f"the manifest of {save}", save, known)
            for name in manifest.parts:
                await self._hold_on(checkpoint_id)
                await anyio.sleep(self._file_s)
                await storage.reach(save.path)
                if name not in storage.files:
                    return self._missing(checkpoint_id, name, save, known)
                if name in storage.damaged:
                    return f"{name} is damaged"
            save = manifest.parent
        return ""

    async def _hold_on(self, checkpoint_id: str) -> None:
        until = self._oracle.held.get((checkpoint_id, self._holder), 0.0)
        if until - self._simulation.loop.time() < HOLD_S / 2:
            await self._hold(checkpoint_id)

    def _missing(self, checkpoint_id: str, what: str, save: SaveName, known: Collection[SaveName | None]) -> str:
        until = self._oracle.held.get((checkpoint_id, self._holder), 0.0)
        is_held = self._simulation.loop.time() < until
        if is_held and save in known and not self._oracle.is_excused(save):
            self._oracle.broken(Promise.KEPT, f"{self._holder} holds {checkpoint_id}, and {what} is gone")
        return f"{what} is gone"


class Trainer:
    """The workers of one job, one after the other: each restores, and then saves until it dies."""

    def __init__(self, simulation: CatalogSimulation, plan: JobPlan) -> None:
        self.plan = plan
        self._simulation = simulation
        self._oracle = simulation.oracle
        self._random = Random(f"trainer of {plan.name} {simulation.seed}")
        self.step = 0
        """The step that the job has reached."""
        self._lives = 0
        self._keep = self._random.randint(1, 3)
        self._last: SaveName | None = None
        """The last complete save, on which an incremental one builds."""

    async def run(self) -> None:
        """Live until the faults end."""
        while self._simulation.faults_active:
            await self.live(self._random.uniform(*LIFE_S))
            await anyio.sleep(self._random.uniform(0.0, NOTICED_AFTER_S))

    async def live(self, life_s: float) -> None:
        """One worker process."""
        self._lives += 1
        incarnation = self._random.randbytes(16)
        now = self._simulation.loop.time()
        writer = self._oracle.writers[self.plan.name, WORKER, incarnation] = Writer()
        if self._random.random() < 0.2:
            self._simulation.meet("a worker that counts as failed goes on")
            writer.gone_at = now + self._random.uniform(0.0, life_s)
        with anyio.move_on_after(life_s):
            async with self._simulation.client(f"{self.plan.name}-{self._lives % 2}", self.plan.name) as client:
                process = _Process(self, client, incarnation)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(process.report)
                    await process.train()
                    tasks.cancel_scope.cancel()
        noticed_at = self._simulation.loop.time() + self._random.uniform(0.0, NOTICED_AFTER_S)
        writer.gone_at = min(writer.gone_at, noticed_at)

    async def clean(self) -> bool:
        """After the faults: one more worker deletes what the daemon may not; returns whether all that is gone."""
        incarnation = self._random.randbytes(16)
        # The daemon deletes what an operator has adopted in the folder.
        collected = [
            one.id
            for one in self._oracle.records.values()
            if one.job == self.plan.name and one.is_deleted and not self._simulation.is_managed(one)
        ]
        self._oracle.writers[self.plan.name, WORKER, incarnation] = writer = Writer()
        async with self._simulation.client(f"{self.plan.name}-c", self.plan.name) as client:
            await _Process(self, client, incarnation).save_and_report()
        writer.gone_at = self._simulation.loop.time()
        left = (self._oracle.records[one] for one in collected if one in self._oracle.records)
        return not any(
            one.is_deleted
            and not self._oracle.is_managed(one)
            and not self._simulation.storage.is_needed(SaveName(one.path, one.save_id))
            for one in left
        )


@dataclass(slots=True)
class _Save:
    name: SaveName
    step: int
    base: SaveName | None
    """The checkpoint whose files it may use."""
    began_at: float
    parent: SaveName | None = None
    """That whose files it uses."""
    checkpoint_id: str = ""
    """Empty until the catalogue knows it."""


class _Process:
    """One worker process of a job."""

    def __init__(self, trainer: Trainer, client: ForgedClient, incarnation: bytes) -> None:
        self._trainer = trainer
        self._simulation = trainer._simulation
        self._oracle = trainer._oracle
        self._storage = trainer._simulation.storage
        self._random = trainer._random
        self._plan = trainer.plan
        self._client = client
        self._me = (trainer.plan.name, WORKER, incarnation)
        self._reports: list[Callable[[], Awaitable[Any]]] = []
        self._more = anyio.Event()

    async def train(self) -> None:
        """Restore, then save until the process ends."""
        await self._restore()
        while self._simulation.faults_active:
            await anyio.sleep(self._random.uniform(0.1, 1.5))
            await self._save()
            if self._random.random() < 0.1:
                self._go_back()

    async def report(self) -> None:
        """Send the reports, in order."""
        while True:
            while self._reports:
                await self._reports.pop(0)()
            self._more = anyio.Event()
            await self._more.wait()

    async def save_and_report(self) -> None:
        """Save once, and send the reports."""
        await self._save()
        for send in self._reports:
            await send()

    # Restoring.

    async def _restore(self) -> None:
        reading = Reading(self._simulation, self._client, self._plan.name, f"resume {self._me[2].hex()}")
        points = await reading.points()
        if points is None:
            return
        first = 0 if self._random.random() < 0.7 else self._random.randrange(3)
        for point in points[first : first + 3]:
            if await reading.read(point):
                record = self._oracle.records.get(point.meta.checkpoint_id)
                self._trainer._last = None if record is None else SaveName(record.path, record.save_id)
                await self._continue_from(point.meta.step, point.meta.checkpoint_id)
                return
        if self._random.random() < 0.3:
            self._trainer._last = None
            await self._continue_from(self._random.randint(0, self._trainer.step), "")

    async def _continue_from(self, step: int, checkpoint_id: str) -> None:
        self._trainer.step = step
        known = [one.id for one in self._oracle.live(self._plan.name)]
        request = ReportRestore(*self._me, checkpoint_id, step, 1.0, 1000)
        if await self._ask(request) is not None:
            self._oracle.restored(request, known)
            self._simulation.meet("a job continues from a checkpoint")

    def _go_back(self) -> None:
        """The job's next world starts after an earlier step."""
        step = max(0, self._trainer.step - self._random.randint(0, 6))
        if self._simulation.lose_progress(self._plan.name, self._trainer.step - step, step):
            self._trainer.step = step
            self._trainer._last = None

    # Saving.

    async def _save(self) -> None:
        self._trainer.step += self._random.randint(1, 4)
        save = self._new_save()
        self._tell(lambda: self._report_start(save))
        try:
            size_bytes = await self._write(save)
        except Unavailable as error:
            if self._random.random() < 0.7:
                reason = error.message
                self._tell(lambda: self._report_failure(save, reason))
            return
        self._trainer._last = save.name
        self._tell(lambda: self._report_completion(save, size_bytes))

    def _new_save(self) -> _Save:
        step, last = self._trainer.step, self._trainer._last
        path, number = f"{self._plan.folder}/step-{step:08d}", 0
        while not self._storage.is_free(path):
            number += 1
            path = f"{self._plan.folder}/step-{step:08d}-{number}"
        is_incremental = last is not None and self._storage.is_whole(last) and self._random.random() < 0.5
        save_id = self._random.randbytes(8).hex()
        return _Save(SaveName(path, save_id), step, last if is_incremental else None, self._simulation.loop.time())

    async def _write(self, save: _Save) -> int:
        """Write the parts, then the manifest."""
        parts = tuple(f"{save.name.path}/{save.name.save_id}.{rank}" for rank in range(self._random.randint(1, 2)))
        for part in parts:
            await anyio.sleep(self._random.uniform(0.0, 0.3))
            await self._storage.reach(part)
            self._storage.files[part] = StoredFile(self._plan.name, save.name)
        if self._random.random() < 0.2:
            # Another rank is slow.
            await anyio.sleep(self._random.uniform(0.0, 1.5))
        await self._storage.reach(save.name.path)
        size_bytes = self._random.randrange(1, 1 << 30)
        if not self._storage.is_free(save.name.path):
            raise Unavailable("checkpoint_exists", f"{save.name.path} is taken", "")
        if save.base is not None and not self._storage.is_whole(save.base):
            raise Unavailable("checkpoint_base_deleted", f"{save.base.path} was deleted during the save", "")
        # All of the state may have changed since.
        save.parent = save.base if self._random.random() < 0.8 else None
        manifest = StoredFile(self._plan.name, save.name, size_bytes, parts, save.parent)
        self._storage.files[save.name.path + MANIFEST] = manifest
        return size_bytes

    # Reporting.

    def _tell(self, send: Callable[[], Awaitable[Any]]) -> None:
        self._reports.append(send)
        self._more.set()

    async def _ask(self, request: Request[R]) -> R | None:
        """Send a report, sometimes twice."""
        reply = await ask(self._simulation, self._client, request)
        if self._random.random() < 0.15:
            self._simulation.meet("a report is repeated")
            return await ask(self._simulation, self._client, request)
        return reply

    async def _report_start(self, save: _Save) -> None:
        if self._random.random() < 0.1:
            # The save may be over before its start is told.
            await anyio.sleep(self._random.uniform(0.0, 3.0))
        age_s = self._simulation.loop.time() - save.began_at
        kind = CheckpointType.FULL if save.base is None else CheckpointType.INCREMENTAL
        loss = nan if self._random.random() < 0.2 else self._random.uniform(0.0, 5.0)
        request = StartCheckpoint(
            *self._me,
            save.step // STEPS_PER_EPOCH,
            save.step,
            save.name.path,
            save.name.save_id,
            kind,
            "" if save.base is None else save.base.path,
            {"loss": loss} if self._random.random() < 0.9 else {},
            age_s=age_s,
            keep=self._trainer._keep,
        )
        meta = await self._ask(request)
        save.checkpoint_id = "" if meta is None else meta.checkpoint_id

    async def _report_failure(self, save: _Save, reason: str) -> None:
        if save.checkpoint_id:
            self._oracle.failure_reported.add(save.checkpoint_id)
            await self._ask(FailCheckpoint(*self._me, save.checkpoint_id, reason))

    async def _report_completion(self, save: _Save, size_bytes: int) -> None:
        if self._random.random() < 0.2:
            self._simulation.meet("a completion is reported late")
            await anyio.sleep(self._random.uniform(0.0, 6.0))
        if not save.checkpoint_id:
            return
        parent_path = "" if save.parent is None else save.parent.path
        reply = await self._ask(CompleteCheckpoint(*self._me, save.checkpoint_id, size_bytes, 1.0, parent_path))
        deleted = [one for one in (reply.delete if reply else ()) if await self._delete(one)]
        if deleted:
            self._simulation.meet("a worker deletes what the daemon may not")
            await self._ask(ConfirmDeleted(*self._me, [one.checkpoint_id for one in deleted]))

    async def _delete(self, collected: CollectedFiles) -> bool:
        """Delete the files of a collected checkpoint that the daemon may not touch."""
        save = SaveName(collected.storage_path, collected.save_id)
        if not save.path.startswith(f"{self._plan.folder}/"):
            self._oracle.broken(Promise.OWN_FILES, f"{self._plan.name} is to delete {save}")
        if self._storage.is_needed(save):
            return False
        try:
            for name in self._storage.of_save(save):
                await self._storage.reach(save.path)
                self._storage.files.pop(name, None)
        except ForgedError:
            return False
        return True
