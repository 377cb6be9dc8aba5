"""Workers that stage at their steps, and what a test asks of the daemon and the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from forged.catalog.messages import EmergencyCheckpointSaved
from forged.checkpoint import DistributedCheckpoint, SaveOptions, ShardedArray
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.saving.background import SaveHandle
from forged.checkpoint.storage.local import LocalStorage
from forged.client import ForgedClient
from forged.errors import RequestRefused
from forged.host.messages import ListSlots, SlotPage
from forged.kernel.messages import Fact, Request
from forged.worker.errors import StepAborted
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.worker.trainers import PATIENCE_S, Trainer, TrainerGroup, past

F = TypeVar("F", bound=Fact)

NAMES = ("a", "b")
ROWS = 600_000
"""More than one block for each rank."""


def rows(rank: int, size: int, step: int) -> ShardedArray:
    start, end = ROWS * rank // size, ROWS * (rank + 1) // size
    return ShardedArray(whole(step)[start:end], (ROWS, 8), (start, 0))


def whole(step: int) -> np.ndarray[Any, Any]:
    return np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8) + np.float32(step)


class Staging:
    """Has trainers stage at their steps, and remembers the outcomes."""

    def __init__(self, group: TrainerGroup, storage: LocalStorage, trainers: list[Trainer]) -> None:
        self.wanted: list[str] = []
        """What is to be done at the next steps: `save`, `save increment`, `keep` or nothing."""
        self.unchanged: dict[str, Any] = {}
        """What every state has, and incremental saves do not write."""
        self.handles: list[SaveHandle] = []
        self.kept: list[int] = []
        self.checkpoints: dict[str, DistributedCheckpoint] = {}
        self._group = group
        self._storage = storage
        self._at: dict[int, str] = {}
        for trainer in trainers:
            self.checkpoints[trainer.name] = DistributedCheckpoint(trainer.worker, storage)
            trainer.before_exchange = self._hook(trainer)

    def _hook(self, trainer: Trainer) -> Callable[[int], Any]:
        async def before_exchange(step: int) -> None:
            # All ranks do the same at a step.
            if step not in self._at:
                self._at[step] = self.wanted.pop(0) if self.wanted else ""
            act = self._at[step]
            if act:
                await self._stage(trainer, act, step)

        return before_exchange

    async def _stage(self, trainer: Trainer, act: str, step: int) -> None:
        worker, checkpoint = trainer.worker, self.checkpoints[trainer.name]
        state = {"rows": rows(worker.rank, worker.world_size, step), "step": step, **self.unchanged}
        base = self.handles[0].prefix if act == "save increment" else None
        options = SaveOptions(f"step-{step:06d}", step=step, include_rng_state=False, base=base)
        try:
            if act.startswith("save"):
                self.handles.append(await checkpoint.save_async(state, options=options))
            elif await checkpoint.keep_in_memory(state, options=options):
                self.kept.append(step)
        except CheckpointException as error:
            raise StepAborted(error.message) from error

    async def do(self, *acts: str) -> None:
        """Have all ranks do this at the next steps."""
        count = len(self.handles) + len(self.kept) + len(acts) * len(NAMES)
        self.wanted = list(acts)
        await self._group.until(lambda: len(self.handles) + len(self.kept) >= count)

    async def commit(self, act: str) -> None:
        """Have all ranks save at the next step, and wait for the checkpoint."""
        count = len(self.handles)
        await self.do(act)
        for handle in self.handles[count:]:
            await handle.committed()

    async def check_committed(self) -> None:
        """Wait for the checkpoints of all saves, and compare them with what was saved."""
        for handle in self.handles:
            await handle.committed()
            check(self._storage, int(handle.prefix.removeprefix("step-")))


async def start(group: TrainerGroup, storage: LocalStorage, *acts: str) -> Staging:
    """Two trainers, which do this at their first steps."""
    staging = Staging(group, storage, group.start(*NAMES))
    await group.world_of(*NAMES)
    await staging.do(*acts)
    return staging


async def slots(client: ForgedClient) -> SlotPage:
    return await client.request(ListSlots())


async def until(client: ForgedClient, true: Callable[[SlotPage], bool]) -> SlotPage:
    async with asyncio.timeout(PATIENCE_S):
        while not true(page := await slots(client)):
            await asyncio.sleep(0.02)
    return page


async def facts(client: ForgedClient, kind: type[F], count: int) -> list[F]:
    """The facts of a kind, when there are so many."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await past(client, kind)) < count:
            await asyncio.sleep(0.02)
    return found


async def emergencies(client: ForgedClient, count: int) -> list[EmergencyCheckpointSaved]:
    return await facts(client, EmergencyCheckpointSaved, count)


def slot_files(directory: Path) -> list[Path]:
    return list(directory.glob("slots/*/*.slot"))


def check(storage: LocalStorage, step: int) -> None:
    state = state_of(storage, f"step-{step:06d}")["model"]
    assert state["step"] == step
    assert same(state["rows"], whole(step))


async def refused(client: ForgedClient, request: Request[Any]) -> str:
    with pytest.raises(RequestRefused) as error:
        await client.request(request)
    return error.value.code
