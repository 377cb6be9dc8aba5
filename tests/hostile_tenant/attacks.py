"""What a worker's token of one job can do to harm other tenants; each attack repeats until it is cancelled, and counts.

Run as `python -m tests.hostile_tenant.attacks ENDPOINT JOB`, with the token in FORGED_TOKEN; it prints the counts as
JSON when it is terminated.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from contextlib import AsyncExitStack

from tests.hostile_tenant.memory_attacks import MEMORY_ATTACKS
from tests.hostile_tenant.tenant import NOTE, PAUSE_S, Attack, Tenant
from tests.net.manual_daemon import SUBSCRIBE
from tests.net.raw_client import RawClient

FRAME_BYTES = (4 << 20) - 16
HELD_MAX = 400
"""How many connections an attack holds before it starts again."""
STREAMS = 64
SETTINGS = {"worker_heartbeat_timeout_ms": 600_000, "reconnect_grace_ms": 600_000}
"""The attacker's workers send no heartbeats, and keep their devices."""
LARGE_NOTE = "x" * 4000
SHARDS = 10**8
TAGS = 1000


async def many_clients_with_one_note_each(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(HELD_MAX):
            await tenant.note(await tenant.greeted(stack), 1)


async def endless_notes(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        client = await tenant.greeted(stack)
        for number in range(1, 5000):
            await tenant.note(client, number, NOTE if number % 10 else LARGE_NOTE)


async def unfinished_frames(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(HELD_MAX):
            client = await tenant.greeted(stack)
            client.write(struct.pack(">I", FRAME_BYTES) + bytes(FRAME_BYTES // 2))
            tenant.counts["unfinished frames"] += 1
            await asyncio.sleep(PAUSE_S)


async def silent_connections(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(HELD_MAX):
            await stack.enter_async_context(RawClient.connected(tenant.endpoint))
            tenant.counts["silent connections"] += 1
        await asyncio.sleep(1.0)


async def unread_streams(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(HELD_MAX // 4):
            client = await tenant.greeted(stack)
            client.stop_reading()
            for stream in range(1, STREAMS + 1):
                await client.send(SUBSCRIBE, stream, -1, "", [], [], 65_536)
                tenant.counts["streams"] += 1


async def enormous_offers(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        client = await tenant.greeted(stack)
        spec = {"name": "d", "samples": SHARDS, "shards": SHARDS}
        for number in range(1, 200):
            worker = f"w{number}"
            incarnation = os.urandom(16)
            who = {"id": worker, "hostname": "192.0.2.1", "port": 22}
            await client.request(2 * number - 1, "JoinJob", job=tenant.job, worker=who, incarnation=incarnation)
            offer = {"job": tenant.job, "worker_id": worker, "incarnation": incarnation, "attempt": 1, "dataset": spec}
            await client.request(2 * number, "OfferShards", **offer)
            tenant.counts["offers"] += 1


async def endless_models(tenant: Tenant) -> None:
    async with AsyncExitStack() as stack:
        client = await tenant.greeted(stack)
        for number in range(1, 2000):
            tags = {f"{number}-{tag}": "x" for tag in range(TAGS)}
            metadata = {
                "model_id": f"{tenant.job}/{os.urandom(8).hex()}",
                "name": "",
                "version": [0, 0, 1],
                "framework": "",
                "input_shape": [],
                "output_shape": [],
                "size_bytes": 0,
                "checksum": "x",
                "tags": tags,
            }
            code = await client.request(number, "RegisterModel", metadata=metadata)
            tenant.counts["models" if isinstance(code, dict) else f"refused: {code}"] += 1


async def guessed_tokens(tenant: Tenant) -> None:
    async with RawClient.connected(tenant.endpoint) as client:
        await client.hello("forged_" + os.urandom(16).hex())
        await client.final_error_code()
        tenant.counts["guessed tokens"] += 1


ATTACKS: tuple[Attack, ...] = (
    many_clients_with_one_note_each,
    endless_notes,
    unfinished_frames,
    silent_connections,
    unread_streams,
    enormous_offers,
    endless_models,
    guessed_tokens,
    *MEMORY_ATTACKS,
)


async def main() -> None:
    endpoint, job = sys.argv[1:]
    tenant = Tenant(endpoint, os.environ["FORGED_TOKEN"], job)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with RawClient.greeted(endpoint, tenant.token) as client:
        await client.request(1, "CreateJob", job=job, settings=SETTINGS)
    tasks = [asyncio.create_task(tenant.repeat(attack)) for attack in ATTACKS]
    print("attacking", flush=True)
    await ended.wait()
    for task in tasks:
        task.cancel()
    ended_by = await asyncio.gather(*tasks, return_exceptions=True)
    if faults := [error for error in ended_by if isinstance(error, Exception)]:
        # An attack that cannot be made proves nothing.
        raise ExceptionGroup("attacks that failed by themselves", faults)
    print(json.dumps(dict(sorted(tenant.counts.items()))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
