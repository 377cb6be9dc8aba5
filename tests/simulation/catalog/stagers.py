"""The workers of a simulated job that stage their states into slots, and die in the middle of it.

Invariants:
- All ranks stage together: a rank begins a copy after all have ended the last one.
- The slot that all ranks have last staged alike is not overwritten.
- A worker that counts as failed stages no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from forged.catalog.messages import (
    CompleteCheckpoint,
    FailCheckpoint,
    FindRestorePoints,
    ReportRestore,
    StartCheckpoint,
)
from forged.client import ForgedClient
from forged.elastic.messages import WorkerFailed, WorkerLeft
from forged.errors import RequestRefused, Unavailable
from forged.host.messages import FindStagedSlots, OpenSlots, SaveSlots
from tests.simulation.catalog.oracle import Writer
from tests.simulation.catalog.slots import SIZE_BYTES, Slot, StagedPart
from tests.simulation.catalog.storage import SaveName
from tests.simulation.catalog.workers import ASK_FOR_S, NOTICED_AFTER_S, PATIENCE_S, JobPlan, ask

if TYPE_CHECKING:
    from tests.simulation.catalog.simulation import CatalogSimulation

RANKS = 2
COPY_S = 0.3
ROUNDS_MAX = 8
SAVED = 0.5
"""How often a staged state is saved, and not only kept in memory."""
LEAVES = 0.2
PERSIST_FOR_S = 8.0


@dataclass(eq=False)
class StagingRank:
    """One worker process."""

    job: str
    rank: int
    incarnation: bytes
    slots: list[Slot] = field(default_factory=list)
    in_use: set[Slot] = field(default_factory=set)
    """Those with a save that is not durable yet."""
    agreed: Slot | None = None
    sequence: int = 0
    is_alive: bool = True

    @property
    def me(self) -> tuple[str, str, bytes]:
        return self.job, f"s{self.rank}", self.incarnation

    def take(self) -> Slot | None:
        """The slot for the next copy; never the one that all have staged alike."""
        free = (slot for slot in self.slots if slot not in self.in_use and slot is not self.agreed)
        return next((slot for slot in free if slot.begin()), None)


class StagingWorld:
    """The workers of one job, all of which save together."""

    def __init__(self, simulation: CatalogSimulation, plan: JobPlan) -> None:
        self.plan = plan
        self._simulation = simulation
        self._oracle = simulation.oracle
        self._memory = simulation.memory
        self._random = Random(f"stagers of {plan.name} {simulation.seed}")
        self._ranks: list[StagingRank] = []
        self._step = 0
        self._generation = 0
        self._left: list[StagingRank] = []
        self._telling = [anyio.Lock() for _ in range(RANKS)]
        """By rank: the end of a process is recorded before that of the next one with its name."""
        self._tasks: TaskGroup | None = None
        self._training: anyio.CancelScope | None = None

    async def run(self) -> None:
        """Live until the faults end, and until the daemon knows of all deaths."""
        async with (
            self._simulation.client(f"{self.plan.name}-0", self.plan.name) as client,
            anyio.create_task_group() as self._tasks,
        ):
            while self._simulation.faults_active:
                await self._begin_world(client)
                with anyio.CancelScope() as self._training:
                    await self._train(client)
                self._training = None
                await anyio.sleep(self._random.uniform(0.0, 1.0))
            self._end(self._ranks, "the faults are over")

    def kill(self) -> None:
        """All of them die at this moment."""
        if self._training is not None:
            self._end(self._ranks, "it was killed")
            self._training.cancel()

    # Worlds.

    async def _begin_world(self, client: ForgedClient) -> None:
        """Replace the dead workers; a world without any survivor restores a state."""
        self._generation += 1
        survivors = [rank for rank in self._ranks if rank.is_alive]
        self._ranks = [
            self._ranks[number] if self._is_alive(number) else self._new_rank(number) for number in range(RANKS)
        ]
        if not survivors:
            await self._restore(client)
        for rank in self._ranks:
            if not rank.slots:
                await self._open(client, rank)

    def _is_alive(self, number: int) -> bool:
        return number < len(self._ranks) and self._ranks[number].is_alive

    def _new_rank(self, number: int) -> StagingRank:
        rank = StagingRank(self.plan.name, number, self._random.randbytes(16))
        self._oracle.writers[rank.me] = Writer()
        return rank

    async def _open(self, client: ForgedClient, rank: StagingRank) -> None:
        """Open slots; a worker whose daemon does not answer stages into its own memory, which is not simulated."""
        try:
            opened = await client.request(OpenSlots(*rank.me, SIZE_BYTES, self.plan.folder), timeout_s=ASK_FOR_S)
        except (RequestRefused, Unavailable) as error:
            self._simulation.note(f"{rank.me[1]} has no slots: {error.code}")
            return
        found = [self._memory.slots.get(path) for path in opened.paths]
        rank.slots = [slot for slot in found if slot is not None]
        self._oracle.slots.used[rank.me] = [slot.slot_id for slot in rank.slots]

    async def _restore(self, client: ForgedClient) -> None:
        """From the slots of the workers before, if they are newer than what is on disk."""
        step = await self._staged_step(client)
        checkpoint_id = ""
        if step is None:
            points = await self._points(client)
            if points is None:
                return
            step, checkpoint_id = (points[0].meta.step, points[0].meta.checkpoint_id) if points else (0, "")
        else:
            self._simulation.meet("workers resume from slots")
        self._step = step
        known = [one.id for one in self._oracle.live(self.plan.name)]
        request = ReportRestore(*self._ranks[0].me, checkpoint_id, step, 1.0, SIZE_BYTES)
        if await ask(self._simulation, client, request) is not None:
            self._oracle.restored(request, known)

    async def _points(self, client: ForgedClient) -> Any:
        asked_at = self._simulation.loop.time()
        try:
            found = await client.request(FindRestorePoints(self.plan.name), timeout_s=ASK_FOR_S)
        except (RequestRefused, Unavailable):
            return None
        self._oracle.found(self.plan.name, found, asked_at)
        return found.points

    async def _staged_step(self, client: ForgedClient) -> int | None:
        try:
            found = await client.request(FindStagedSlots(self.plan.name, self.plan.folder), timeout_s=ASK_FOR_S)
        except (RequestRefused, Unavailable):
            return None
        slots = [slot for path in found.paths if (slot := self._memory.slots.get(path)) is not None]
        parts = [slot.part for slot in slots if slot.part is not None]
        if not parts or len(parts) < len(found.paths):
            # They were freed, or the host has lost its power.
            return None
        self._oracle.slots.check_one_save("a worker resumes from", parts)
        return parts[0].step

    # Staging.

    async def _train(self, client: ForgedClient) -> None:
        """Stage some times, and then lose one worker, or all."""
        for _ in range(self._random.randint(0, ROUNDS_MAX)):
            await anyio.sleep(self._random.uniform(0.05, 0.6))
            await self._stage(client, dying=[])
        if self._random.random() < LEAVES:
            self._leave()
            return
        victims = [self._random.choice(self._ranks)] if self._random.random() < 0.6 else list(self._ranks)
        await anyio.sleep(self._random.uniform(0.0, 0.5))
        if self._random.random() < 0.7:
            self._simulation.meet("a worker dies in the middle of a copy")
            await self._stage(client, dying=victims)
        self._end(victims, "its process has ended")

    async def _stage(self, client: ForgedClient, dying: list[StagingRank]) -> None:
        """All ranks copy their parts; those that die do not end."""
        self._step += self._random.randint(1, 4)
        save, staged = self._new_save(), dict[StagingRank, Slot]()
        is_saved = self._random.random() < SAVED
        async with anyio.create_task_group() as copies:
            for rank in self._ranks:
                copies.start_soon(self._copy, rank, save, staged, rank in dying)
        if len(staged) < RANKS:
            return
        for rank, slot in staged.items():
            rank.agreed = slot
        self._oracle.slots.staged(self.plan.name)
        if is_saved and self._tasks is not None:
            for rank, slot in staged.items():
                rank.in_use.add(slot)
            self._tasks.start_soon(self._save, client, dict(staged), save, self._step)

    async def _copy(self, rank: StagingRank, save: SaveName, staged: dict[StagingRank, Slot], dies: bool) -> None:
        slot = rank.take()
        if slot is None:
            return
        rank.sequence += 1
        part = None
        try:
            await anyio.sleep(self._random.uniform(0.01, COPY_S))
            if not dies:
                part = StagedPart(
                    self.plan.name, save, rank.rank, RANKS, self._step, self._generation, rank.sequence, rank.me
                )
        finally:
            slot.end(part)
        if part is not None:
            staged[rank] = slot

    def _new_save(self) -> SaveName:
        path, number = f"{self.plan.folder}/step-{self._step:08d}", 0
        while not self._simulation.storage.is_free(path):
            number += 1
            path = f"{self.plan.folder}/step-{self._step:08d}-{number}"
        return SaveName(path, self._random.randbytes(8).hex())

    # Saves.

    async def _save(self, client: ForgedClient, staged: dict[StagingRank, Slot], save: SaveName, step: int) -> None:
        """Report the save, and have the daemon write it, also after the workers have left."""
        root = next(rank for rank in staged if rank.rank == 0)
        try:
            start = StartCheckpoint(*root.me, 0, step, save.path, save.save_id)
            meta = await ask(self._simulation, client, start)
            if meta is not None and root.is_alive:
                await self._persist(client, root, save, meta.checkpoint_id)
        finally:
            for rank, slot in staged.items():
                rank.in_use.discard(slot)

    async def _persist(self, client: ForgedClient, root: StagingRank, save: SaveName, checkpoint_id: str) -> None:
        ends_at = self._simulation.loop.time() + PERSIST_FOR_S
        while self._simulation.loop.time() < ends_at and not self._is_killed(root):
            try:
                reply = await client.request(SaveSlots(*root.me, save.save_id), timeout_s=ASK_FOR_S)
            except Unavailable:
                await anyio.sleep(PATIENCE_S)
                continue
            except RequestRefused as error:
                # The daemon may have saved it before, and have freed the slots.
                known = self._simulation.storage.manifest(save)
                if known is None:
                    self._oracle.failure_reported.add(checkpoint_id)
                    await ask(self._simulation, client, FailCheckpoint(*root.me, checkpoint_id, error.message))
                    return
                is_saved, size_bytes = True, known.size_bytes
            else:
                is_saved, size_bytes = reply.is_saved, reply.size_bytes
                if is_saved:
                    self._oracle.slots.acknowledged(save)
                    self._simulation.meet("the daemon saves what workers have staged")
            if is_saved:
                ended = CompleteCheckpoint(*root.me, checkpoint_id, size_bytes, 1.0, "")
                await ask(self._simulation, client, ended)
                return

    def _is_killed(self, rank: StagingRank) -> bool:
        return not rank.is_alive and rank not in self._left

    # Ends of workers.

    def _leave(self) -> None:
        """All workers leave in good order."""
        assert self._tasks is not None
        for rank in self._ranks:
            rank.is_alive = False
            self._left.append(rank)
            now = self._oracle.slots.left_at[rank.me] = self._simulation.loop.time()
            self._oracle.writers[rank.me].gone_at = now
            self._tasks.start_soon(self._tell, rank, now, WorkerLeft(rank.me[1], "it is done"))

    def _end(self, ranks: list[StagingRank], reason: str) -> None:
        """Processes die; the daemon notices a while later."""
        assert self._tasks is not None
        for rank in ranks:
            if rank.is_alive:
                rank.is_alive = False
                noticed_at = self._simulation.loop.time() + self._random.uniform(0.0, NOTICED_AFTER_S)
                self._oracle.writers[rank.me].gone_at = noticed_at
                self._tasks.start_soon(self._tell, rank, noticed_at, WorkerFailed(rank.me[1], rank.rank, reason))

    async def _tell(self, rank: StagingRank, noticed_at: float, fact: WorkerFailed | WorkerLeft) -> None:
        """Have the daemon record the end of a worker, durably."""
        async with self._telling[rank.rank]:
            await anyio.sleep(max(0.0, noticed_at - self._simulation.loop.time()))
            while not await self._simulation.recorded(self.plan.name, fact):
                await anyio.sleep(PATIENCE_S)
        self._simulation.note(f"{fact} is durable")
