"""Callers that do not save: an operator, readers, and a hostile tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from forged.catalog.messages import (
    AdoptCheckpoints,
    AdoptedCheckpoint,
    CollectCheckpoints,
    CompactCheckpoint,
    CompleteCheckpoint,
    ConfirmDeleted,
    DeleteCheckpoint,
    FailCheckpoint,
    HoldCheckpoint,
    ListCheckpoints,
    PinCheckpoint,
    ReadRetention,
    ReinstateCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    ShowCheckpoint,
    StartCheckpoint,
    UnpinCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.client import ForgedClient
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import SettingValue
from forged.kernel.messages import Request
from forged.registry.messages import Artifact, RegisterModel
from tests.registry.registry_fixture import metadata
from tests.simulation.catalog.oracle import HOSTILE, Promise, Writer
from tests.simulation.catalog.storage import MANIFEST, SaveName
from tests.simulation.catalog.workers import EXPECTED_REFUSALS, WORKER, JobPlan, Reading

if TYPE_CHECKING:
    from tests.simulation.catalog.simulation import CatalogSimulation

READER_DIES = 0.15
WITHOUT_RULES = 0.2
HOSTILE_FOLDER = f"/roots/{HOSTILE}"


def drawn_settings(random: Random) -> dict[str, SettingValue]:
    """The retention settings of a job; without any rule, what its script keeps counts."""
    settings: dict[str, SettingValue] = {}
    if random.random() < 0.5:
        settings["checkpoint_chain_max"] = random.randint(1, 3)
    if random.random() < WITHOUT_RULES:
        return settings
    settings["checkpoint_keep"] = random.randint(1, 3)
    if random.random() < 0.3:
        settings["checkpoint_max_age_s"] = random.uniform(3.0, 12.0)
    if random.random() < 0.5:
        settings["checkpoint_keep_best"] = random.randint(1, 2)
        settings["checkpoint_metric_ascending"] = random.random() < 0.5
    if random.random() < 0.3:
        settings["checkpoint_keep_every_steps"] = random.randint(5, 15)
    return settings


class ReaderActor:
    """Somebody who copies checkpoints of jobs elsewhere."""

    def __init__(self, simulation: CatalogSimulation) -> None:
        self._simulation = simulation
        self._random = Random(f"reader {simulation.seed}")

    async def run(self) -> None:
        async with self._simulation.client("reader") as client:
            number = 0
            while self._simulation.faults_active:
                number += 1
                await anyio.sleep(self._random.uniform(0.0, 2.0))
                job = self._random.choice(self._simulation.plans).name
                file_s = self._random.choice((0.0, 0.2, 1.0))
                reading = Reading(self._simulation, client, job, f"reader {number}", file_s)
                points = await reading.points()
                if points:
                    point = self._random.choice(points[:3])
                    await reading.read(point, dies=self._random.random() < READER_DIES)


class OperatorActor:
    """An operator who pins, deletes, collects, adopts, and changes and removes jobs."""

    def __init__(self, simulation: CatalogSimulation) -> None:
        self._simulation = simulation
        self._oracle = simulation.oracle
        self._random = Random(f"operator {simulation.seed}")
        self._removes_job = self._random.random() < 0.25

    async def run(self) -> None:
        operations: tuple[Callable[[ForgedClient, JobPlan], Awaitable[Any]], ...] = (
            self._pin,
            self._unpin,
            self._delete,
            self._collect,
            self._adopt,
            self._change,
            self._suspect,
            self._reinstate,
            self._compact,
            self._look,
        )
        async with self._simulation.client("operator") as client:
            while self._simulation.faults_active:
                await anyio.sleep(self._random.uniform(0.1, 1.5))
                try:
                    await self._random.choice(operations)(client, self._random.choice(self._simulation.plans))
                    if self._removes_job and self._random.random() < 0.05:
                        await self._remove(client)
                except RequestRefused as error:
                    self._simulation.note(f"the operator was refused: {error.code}")
                    if error.code not in EXPECTED_REFUSALS:
                        raise
                except Unavailable as error:
                    self._simulation.note(f"the operator got error {error.code}")

    async def _any(self, client: ForgedClient, plan: JobPlan, *states: CheckpointState) -> str | None:
        page = await client.request(ListCheckpoints(plan.name))
        ids = [one.checkpoint_id for one in page.checkpoints if not states or one.state in states]
        return self._random.choice(ids) if ids else None

    async def _pin(self, client: ForgedClient, plan: JobPlan) -> None:
        if checkpoint_id := await self._any(client, plan, CheckpointState.COMPLETE):
            await client.request(PinCheckpoint(plan.name, checkpoint_id))
            if checkpoint_id not in self._oracle.unpinned:
                self._oracle.pinned.add(checkpoint_id)

    async def _unpin(self, client: ForgedClient, plan: JobPlan) -> None:
        pinned = [one.id for one in self._oracle.live(plan.name) if one.meta.pinned]
        if pinned:
            checkpoint_id = self._random.choice(pinned)
            self._oracle.pinned.discard(checkpoint_id)
            self._oracle.unpinned.add(checkpoint_id)
            await client.request(UnpinCheckpoint(plan.name, checkpoint_id))
            self._oracle.unpinned.discard(checkpoint_id)

    async def _delete(self, client: ForgedClient, plan: JobPlan) -> None:
        checkpoint_id = await self._any(client, plan)
        busy = [one.id for one in self._oracle.live(plan.name) if one.is_to_compact or one.is_being_written]
        if busy and self._random.random() < 0.5:
            checkpoint_id = self._random.choice(busy)
        if checkpoint_id is not None:
            await self._delete_one(client, plan, checkpoint_id)

    async def _delete_one(self, client: ForgedClient, plan: JobPlan, checkpoint_id: str) -> None:
        self._oracle.deletion_wanted.add(checkpoint_id)
        await client.request(DeleteCheckpoint(plan.name, checkpoint_id))
        self._simulation.meet("an operator deletes a checkpoint")

    async def _collect(self, client: ForgedClient, plan: JobPlan) -> None:
        await client.request(CollectCheckpoints(plan.name))

    async def _adopt(self, client: ForgedClient, plan: JobPlan) -> None:
        """Add what is in the job's folder, as `forgectl ckpt adopt` does."""
        storage = self._simulation.storage
        found = [file for name, file in storage.files.items() if name.endswith(MANIFEST) and file.job == plan.name]
        adopted = [
            AdoptedCheckpoint(
                file.save.path,
                file.save.save_id,
                0,
                int(file.save.path.rpartition("/step-")[2].partition("-")[0]),
                file.size_bytes,
                self._simulation.clock.wall(),
                "" if file.parent is None else file.parent.path,
                job=file.job,
            )
            for file in found
            if file.save.path.startswith(f"{plan.folder}/")
        ]
        reply = await client.request(AdoptCheckpoints(plan.name, plan.folder, adopted))
        if reply.adopted:
            self._simulation.meet("checkpoints are adopted")

    async def _change(self, client: ForgedClient, plan: JobPlan) -> None:
        job = await client.job(plan.name)
        await client.change_job(plan.name, drawn_settings(self._random), job.version)

    async def _suspect(self, client: ForgedClient, plan: JobPlan) -> None:
        """Say of a checkpoint that it is corrupt; the daemon verifies it where it may."""
        if plan.is_managed and (checkpoint_id := await self._any(client, plan, CheckpointState.COMPLETE)):
            await client.request(ReportCorruptCheckpoint(plan.name, checkpoint_id, "a suspicion"))

    async def _reinstate(self, client: ForgedClient, plan: JobPlan) -> None:
        """Have an abandoned checkpoint offered again."""
        abandoned = [one.id for one in self._oracle.live(plan.name) if one.meta.abandoned]
        if abandoned:
            await client.request(ReinstateCheckpoint(plan.name, self._random.choice(abandoned), "it was evaluated"))

    async def _compact(self, client: ForgedClient, plan: JobPlan) -> None:
        incremental = [one.id for one in self._oracle.live(plan.name) if one.meta.is_incremental]
        if incremental:
            checkpoint_id = self._random.choice(incremental)
            await client.request(CompactCheckpoint(plan.name, checkpoint_id))
            if self._random.random() < 0.5:
                await anyio.sleep(self._random.uniform(0.0, 0.3))
                await self._delete_one(client, plan, checkpoint_id)

    async def _look(self, client: ForgedClient, plan: JobPlan) -> None:
        await client.request(ReadRetention(plan.name))
        if checkpoint_id := await self._any(client, plan):
            await client.request(ShowCheckpoint(plan.name, checkpoint_id))

    async def _remove(self, client: ForgedClient) -> None:
        """Remove the last job."""
        self._removes_job = False
        await client.remove_job(self._simulation.plans[-1].name)
        self._simulation.meet("a job is removed")


class ModelMaker:
    """An operator who registers models that refer to checkpoints."""

    def __init__(self, simulation: CatalogSimulation) -> None:
        self._simulation = simulation
        self._oracle = simulation.oracle
        self._random = Random(f"models {simulation.seed}")

    async def run(self) -> None:
        async with self._simulation.client("models") as client:
            while self._simulation.faults_active:
                await anyio.sleep(self._random.uniform(0.2, 3.0))
                with suppress(RequestRefused, Unavailable):
                    await self._register(client, self._random.choice(self._simulation.plans).name)

    async def _register(self, client: ForgedClient, job: str) -> None:
        complete = [one for one in self._oracle.live(job) if one.meta.state is CheckpointState.COMPLETE]
        if not complete:
            return
        record = self._random.choice(complete)
        request = RegisterModel(
            metadata(model_id=f"{job}/net"), "minor", Artifact(record.path, record.save_id, job=record.job)
        )
        await client.request(request)
        self._oracle.referenced.add(record.id)
        self._simulation.meet("a model refers to a checkpoint")


class HostileTenant:
    """A worker with a token for its own job that wants to damage the checkpoints of others."""

    def __init__(self, simulation: CatalogSimulation) -> None:
        self._simulation = simulation
        self._oracle = simulation.oracle
        self._random = Random(f"hostile tenant {simulation.seed}")
        self._me = (HOSTILE, WORKER, self._random.randbytes(16))
        self._step = 0

    async def run(self) -> None:
        """Try everything until the faults end."""
        self._oracle.writers[self._me] = writer = Writer()
        async with self._simulation.client(HOSTILE) as client:
            while self._simulation.faults_active:
                await anyio.sleep(self._random.uniform(0.1, 1.0))
                attempt = self._random.choice((self._claim, self._claim, self._name_others, self._lie))
                try:
                    await attempt(client)
                except Unavailable as error:
                    self._simulation.note(f"the hostile tenant got error {error.code}")
                except RequestRefused as error:
                    self._simulation.meet("a hostile tenant is refused")
                    self._simulation.note(f"the hostile tenant was refused: {error.code}")
        writer.gone_at = self._simulation.loop.time()

    async def _claim(self, client: ForgedClient) -> None:
        """Register what another job has saved, as a save of its own, and have it collected."""
        saves = sorted({file.save for file in self._simulation.storage.files.values()}, key=lambda one: one.save_id)
        own = SaveName(f"{HOSTILE_FOLDER}/step-{self._step:08d}", self._random.randbytes(8).hex())
        save = self._random.choice([*saves, own, *self._next_saves()])
        save_id = self._random.choice((save.save_id, self._random.randbytes(8).hex()))
        self._step += 1
        meta: CheckpointMeta = await client.request(StartCheckpoint(*self._me, 0, self._step, save.path, save_id))
        if meta.training_run_id != HOSTILE:
            self._oracle.broken(Promise.REFUSED, f"a tenant of {HOSTILE} is given {meta}")
        self._simulation.meet("a hostile tenant claims a path")
        await client.request(CompleteCheckpoint(*self._me, meta.checkpoint_id, 100, 1.0))

    def _next_saves(self) -> list[SaveName]:
        """What the other jobs are likely to save next."""
        steps = ((one.plan.folder, one.step + self._random.randint(1, 4)) for one in self._simulation.trainers)
        return [SaveName(f"{folder}/step-{step:08d}", self._random.randbytes(8).hex()) for folder, step in steps]

    async def _lie(self, client: ForgedClient) -> None:
        """Say of all checkpoints that their files are deleted: this counts for what is this job's to delete."""
        ids = sorted(self._oracle.records)
        self._oracle.lied_about.update(ids)
        await client.request(ConfirmDeleted(*self._me, ids))
        self._simulation.meet("a hostile tenant lies about deletions")

    async def _name_others(self, client: ForgedClient) -> None:
        """Name the checkpoint of another job in every request that a worker may send."""
        others = [one for one in self._oracle.records.values() if one.job != HOSTILE]
        if not others:
            return
        other = self._random.choice(others)
        job = self._random.choice((HOSTILE, other.job))
        requests: tuple[Request[Any], ...] = (
            HoldCheckpoint(job, other.id, "hostile"),
            ReportCorruptCheckpoint(job, other.id, "I say so"),
            FailCheckpoint(job, WORKER, self._me[2], other.id, "I say so"),
            CompleteCheckpoint(job, WORKER, self._me[2], other.id, 1, 1.0),
            ReportRestore(job, WORKER, self._me[2], other.id, 0, 1.0, 1),
            DeleteCheckpoint(job, other.id),
            PinCheckpoint(job, other.id),
        )
        request = self._random.choice(requests)
        await client.request(request)
        self._oracle.broken(Promise.REFUSED, f"a tenant of {HOSTILE} may send {request}")
