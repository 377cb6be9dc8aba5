"""What a worker's token of one job can do to the GPU memory service."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.hostile_tenant.tenant import Tenant
from tests.net.manual_daemon import REQUEST
from tests.net.raw_client import RawClient

SIZE_MAX = (1 << 63) - 1
BATCH = 256
BATCHES = 1200
"""Of blocks on one device: more than a principal may have with those of the other attacks."""
DEVICES = 4000
WAITS = 1000
PLAN_PAGE = 4096
ODD_SIZES = (0, 1, -1, 2**31, 2**53 + 1, SIZE_MAX, SIZE_MAX + 1, 2**64 - 1)
SEED = 5


class MemoryTenant:
    """A connection in the name of a worker of the attacker's job."""

    def __init__(self, tenant: Tenant, client: RawClient) -> None:
        self._tenant = tenant
        self.client = client
        self.worker_id = f"m{os.urandom(4).hex()}"
        self._me = {"job": tenant.job, "worker_id": self.worker_id, "incarnation": os.urandom(16)}
        self._number = 0

    async def ask(self, kind: str, **fields: Any) -> Any:
        """The reply, or the code of the refusal; counted."""
        self._number += 1
        reply = await self.client.request(self._number, kind, **fields)
        self._tenant.counts[f"{kind} refused: {reply}" if isinstance(reply, str) else kind] += 1
        return reply

    async def join(self) -> None:
        who = {"id": self.worker_id, "hostname": "192.0.2.1", "port": 22}
        await self.ask("JoinJob", job=self._tenant.job, worker=who, incarnation=self._me["incarnation"])

    async def act(self, kind: str, **fields: Any) -> Any:
        """Ask in the worker's name."""
        return await self.ask(kind, **self._me, **fields)

    async def look(self, kind: str, **fields: Any) -> Any:
        return await self.ask(kind, job=self._tenant.job, **fields)

    async def wait(self, client: RawClient, number: int, **fields: Any) -> None:
        """Send a request for memory that waits on another connection, and do not read the answer."""
        self._tenant.counts["waits"] += 1
        await client.send(REQUEST, number, 0, "AllocateMemory", {**self._me, **fields})

    async def register(self, device: str, total: int) -> str:
        await self.act("RegisterDevice", device={"device_id": device, "total_memory": total})
        return f"{self.worker_id}/{device}"


@asynccontextmanager
async def _joined(tenant: Tenant) -> AsyncIterator[MemoryTenant]:
    async with RawClient.greeted(tenant.endpoint, tenant.token) as client:
        attacker = MemoryTenant(tenant, client)
        await attacker.join()
        yield attacker


def _wanted(name: str, size: int, alignment: int = 256, **more: Any) -> dict[str, Any]:
    return {"name": name, "request": {"tensor_id": name, "size": size, "alignment": alignment}, **more}


async def many_devices(tenant: Tenant) -> None:
    async with _joined(tenant) as attacker:
        for number in range(DEVICES):
            await attacker.register(f"gpu{number}" * 20, SIZE_MAX)
            if number % 50 == 0:
                await attacker.look("ListDevices")


async def fragmented_devices(tenant: Tenant) -> None:
    """Fill a device with small blocks, free and cache some, and search it in vain again and again."""
    async with _joined(tenant) as attacker:
        device = await attacker.register("gpu0", BATCHES * BATCH * 512)
        for number in range(BATCHES):
            names = [f"{number}-{at}" for at in range(BATCH)]
            wanted = [_wanted(name, 512, cached=at % 2 == 0) for at, name in enumerate(names)]
            reply = await attacker.act("AllocateMemory", device=device, wanted=wanted)
            if isinstance(reply, list) and number == 0:
                pinned = [[name, 1] for name in names[1::32]]
                await attacker.act("ChangeBlocks", device=device, handles=pinned, change="pin")
            if number % 20 == 0:
                await _search_in_vain(attacker, device)
        for number in range(BATCHES):
            freed = [[f"{number}-{at}", 1] for at in range(1, BATCH, 4)]
            await attacker.act("FreeMemory", device=device, handles=freed)
            await _search_in_vain(attacker, device)


async def _search_in_vain(attacker: MemoryTenant, device: str) -> None:
    wanted = [_wanted(f"vain-{at}", 1024 + 512 * at, 512) for at in range(BATCH)]
    await attacker.act("AllocateMemory", device=device, wanted=wanted)
    await attacker.act("AllocateMemory", device=device, wanted=[_wanted("vain", 1 << 20)])
    await attacker.look("FindFit", size=1 << 20)
    await attacker.look("ListDevices")
    await attacker.look("ListBlocks", device=device, start=1 << 24)
    await attacker.look("PlanCompaction", device=device, hole=1 << 20, dry_run=True)


async def endless_waits(tenant: Tenant) -> None:
    async with _joined(tenant) as attacker:
        device = await attacker.register("gpu0", 1 << 20)
        await attacker.act("AllocateMemory", device=device, wanted=[_wanted("all", 1 << 20)])
        async with RawClient.greeted(tenant.endpoint, tenant.token) as waiting:
            for number in range(1, WAITS):
                wanted = [_wanted(f"w{number}-{at}", 1 << 19) for at in range(BATCH)]
                await attacker.wait(waiting, number, device=device, wanted=wanted, wait_s=600.0)
                for change in ("touch", "pin", "unpin"):
                    await attacker.act("ChangeBlocks", device=device, handles=[["all", 1]], change=change)


async def endless_plans(tenant: Tenant) -> None:
    async with _joined(tenant) as attacker:
        device = await attacker.register("gpu0", 1 << 40)
        for page in range(200):
            blocks = [[f"{page}-{at}", 512 * at, 512] for at in range(PLAN_PAGE)]
            await attacker.act("PlanOffsets", device=device, blocks=blocks, start=page * PLAN_PAGE)
            wanted = [_wanted(f"{page}-{at}", 256) for at in range(0, PLAN_PAGE, PLAN_PAGE // BATCH)]
            await attacker.act("AllocateMemory", device=device, wanted=wanted)


async def odd_requests(tenant: Tenant) -> None:
    """Sizes near 2^63, stale and foreign handles, moves that are not planned, and blocks that never were."""
    source = random.Random(SEED)
    async with _joined(tenant) as attacker:
        device = await attacker.register("gpu0", SIZE_MAX)
        await attacker.act("AllocateMemory", device=device, wanted=[_wanted("held", 1 << 20)])
        for _ in range(500):
            size, offset = source.choice(ODD_SIZES), source.choice(ODD_SIZES)
            await attacker.register("odd", size)
            await attacker.act("AllocateMemory", device=device, wanted=[_wanted("odd", size, abs(offset) or 1)])
            handles = [[source.choice(("held", "odd", "none", "m0:held")), source.choice((0, 1, 2, 2**40, -1))]]
            await attacker.act(
                source.choice(("FreeMemory", "ChangeBlocks")),
                device=device,
                handles=handles,
                **({"change": "cache"} if source.random() < 0.5 else {}),
            )
            block = {"block_id": "x", "offset": offset, "size": size, "status": "allocated", "tensor_id": "x"}
            held = {"handle": ["lie", 1], "worker_id": source.choice(("", "w0")), "block": block}
            await attacker.act("AssertBlocks", device=device, blocks=[held] * source.choice((1, BATCH)))
            await attacker.act("CommitMove", device=device, epoch=source.choice(ODD_SIZES[:5]), number=0)
            await attacker.act("PlanOffsets", device=device, blocks=[["odd", offset, size]])
            await attacker.look("FindFit", size=size)


MEMORY_ATTACKS = (many_devices, fragmented_devices, endless_waits, endless_plans, odd_requests)
