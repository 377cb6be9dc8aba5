"""A data service on a bus without network, with workers that offer shards and fetch at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np

from forged.daemon import inline
from forged.data.audit.service import AuditService
from forged.data.messages import REQUESTS as DATA_REQUESTS
from forged.data.messages import (
    DatasetSpec,
    OfferShards,
    OfferTaken,
    ReadTransfers,
    ReportCorruptShard,
    ReportShards,
    TransferPart,
)
from forged.data.ownership.records import PREFIX
from forged.data.service import DataService
from forged.elastic.messages import REQUESTS, AttemptProgress, RescaleCompleted
from forged.jobs.model import REQUESTS as JOB_REQUESTS
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Nothing
from forged.kernel.store.port import Store
from tests.elastic.coordinator_playbook import JOB
from tests.elastic.service_fixture import ServiceFixture
from tests.kernel_fixture import OPERATOR, Kernel, running

DATASET = DatasetSpec(1_000, 10)
AT_ONCE: dict[str, Any] = {"stability_window_ms": 0, "failure_window_ms": 0, "redistribution_type": "incremental"}
"""Settings without waits."""

NUMBERS_BEFORE_MAX = 1_000
"""Above the number of requests that a worker has made before its daemon was killed."""


class DataFixture(ServiceFixture):
    """A kernel with the elastic, data and audit services."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.data = DataService(kernel.bus, kernel.clock, inline)
        self.audit = AuditService(kernel.bus)
        kernel.ledger.register(self.data)
        kernel.ledger.register(self.audit)
        self.held: dict[str, set[int]] = {}
        """The shards that each worker holds."""

    @property
    def attempt(self) -> int:
        """The number of the current attempt; 0 without one."""
        attempt = self.service.coordinators[JOB].attempt
        return 0 if attempt is None else attempt.number

    async def come(self, name: str, *held: int, job: str = JOB, life: int = 1, **settings: Any) -> None:
        """A worker joins that holds these shards."""
        self.held[name] = set(held)
        is_first = job not in self.service.coordinators
        await self.worker(name, life, job).join({**AT_ONCE, **settings} if is_first else None, with_data=True)
        await self.wait(0.1)

    async def come_again(self, *names: str) -> None:
        """The workers reconnect."""
        for name in names:
            worker = self.worker(name)
            # A reused request number would get the remembered reply.
            worker._number = NUMBERS_BEFORE_MAX
            worker.come_back()
        await self.wait(0.1)

    async def offer(
        self, name: str, attempt: int | None = None, dataset: DatasetSpec = DATASET, **more: Any
    ) -> OfferTaken:
        """A worker offers what it holds."""
        worker = self.workers[name]
        held = more.pop("held", np.array(sorted(self.held[name]), "<i8").tobytes())
        number = self.attempt if attempt is None else attempt
        size = 100 * len(self.held[name])
        return await worker.ask(OfferShards(worker.job, name, worker.incarnation, number, dataset, held, size, **more))

    async def part(self, name: str, attempt: int | None = None) -> TransferPart:
        """Read a worker's part of the plan."""
        number = self.attempt if attempt is None else attempt
        worker = self.workers[name]
        return await worker.ask(ReadTransfers(worker.job, name, worker.incarnation, number))

    async def report_corrupt(self, name: str, source: str, shard: int) -> Nothing:
        """A worker reports that another worker's copy of a shard is bad."""
        worker = self.workers[name]
        return await worker.ask(ReportCorruptShard(worker.job, name, worker.incarnation, source, shard))

    async def stop(self, step: int = 0) -> None:
        """All members of the attempt stop."""
        attempt = self.service.coordinators[JOB].attempt
        assert attempt is not None
        for name in attempt.target:
            await self.workers[name].stop(attempt.number, step, holds_state=name not in attempt.added)
        await self.kernel.settle()

    async def offer_all(self, dataset: DatasetSpec = DATASET) -> None:
        """All members of the attempt stop and offer."""
        await self.stop()
        attempt = self.service.coordinators[JOB].attempt
        assert attempt is not None
        for name in attempt.target:
            await self.offer(name, dataset=dataset)

    async def fetch(self, *names: str) -> None:
        """Workers fetch their shards and report it."""
        for name in names:
            part, worker = await self.part(name), self.workers[name]
            shards = np.frombuffer(part.shards, "<i8").tolist()
            self.held[name] |= set(shards)
            said = ReportShards(JOB, name, worker.incarnation, self.attempt, len(shards), 100 * len(shards))
            await worker.ask(said)

    async def commit(self, *names: str) -> RescaleCompleted:
        """The workers report ready, and drop the shards that moved away."""
        kept = {name: set(np.frombuffer((await self.part(name)).keep, "<i8").tolist()) for name in names}
        attempt = self.attempt
        for name in names:
            await self.workers[name].ready(attempt)
        await self.kernel.settle()
        for name in names:
            self.held[name] &= kept[name]
        return self.facts(RescaleCompleted)[-1]

    async def rescale(self, *names: str, dataset: DatasetSpec = DATASET) -> RescaleCompleted:
        """The attempt that is under way goes well."""
        await self.offer_all(dataset)
        await self.fetch(*names)
        return await self.commit(*names)

    def says_it_waits(self, *names: str) -> None:
        for name in names:
            worker = self.workers[name]
            said = AttemptProgress(JOB, name, worker.incarnation, self.attempt, 0, is_waiting=True)
            self.kernel.bus.signal(said, Call(OPERATOR, "a test", client=worker.client))

    def owners(self) -> dict[str, set[int]]:
        """The shards that each worker owns in the committed world."""
        assignment = self.data.jobs[JOB].assignment
        return {
            worker.id: set(np.flatnonzero(assignment.owners == place).tolist())
            for place, worker in enumerate(assignment.workers)
        }


@asynccontextmanager
async def data_fixture(store: Store | None = None) -> AsyncIterator[DataFixture]:
    """A stage that is set inside the block, and gone at its end as after a crash."""
    made: list[DataFixture] = []
    async with running(
        store, lambda kernel: made.append(DataFixture(kernel)), requests=(*JOB_REQUESTS, *REQUESTS, *DATA_REQUESTS)
    ):
        (stage,) = made
        async with anyio.create_task_group() as tasks:
            await tasks.start(stage.service.run)
            yield stage
            assert not tasks.cancel_scope.cancel_called
            tasks.cancel_scope.cancel()


async def keys_in(store: Store) -> list[str]:
    """What is kept of training data, without what it is about."""
    return [entry.key.removeprefix(PREFIX) for entry in await read_all(store, PREFIX)]


def union(held: Iterable[set[int]]) -> set[int]:
    return set().union(*held)
