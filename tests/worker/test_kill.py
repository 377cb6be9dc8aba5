"""Workers that are killed with -9 in the middle of what they do together."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest

from forged.elastic.model import ClusterTopology
from forged.errors import Unavailable
from forged.retry import RetryPolicy
from forged.worker.collectives.world import World
from forged.worker.errors import CollectiveAborted
from forged.worker.state_transfer import transfer
from tests.worker.meshes import PATIENCE_S, Meshes, buffers, each, failures, open_meshes, random_parts, until
from tests.worker.peer_process import ACTS, STATE_SIZES, PeerProcess


async def world_with(peer: PeerProcess, made: Meshes, *, peer_is_hub: bool) -> list[World]:
    """The worlds of the survivors."""
    own = made.workers
    topology = ClusterTopology((peer.worker, *own) if peer_is_hub else (*own, peer.worker))
    await peer.enter(1, topology)
    worlds = await each(made.meshes, lambda mesh: mesh.enter(1, topology, PATIENCE_S))
    assert await peer.answer() == "entered"
    return worlds


@pytest.mark.parametrize("peer_is_hub", [False, True], ids=["member", "hub"])
@pytest.mark.parametrize("act", ACTS)
async def test_kill_during_a_collective_is_reported_to_all_with_the_name(act: str, peer_is_hub: bool) -> None:
    """Once while its peers wait for it, and once while it waits for a peer."""
    async with open_meshes(3) as made, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(PeerProcess(f"v{number}")) for number in range(2)]
        for has_called, peer in enumerate(peers):
            for mesh in made.meshes:
                mesh._generation = -1
            worlds = await world_with(peer, made, peer_is_hub=peer_is_hub)
            calling = worlds[:-1] if has_called else worlds
            waiting = asyncio.ensure_future(failures(*(ACTS[act](world) for world in calling)))
            if has_called:
                await peer.order(call=act)
            await asyncio.sleep(0)
            peer.kill()
            for error in await waiting:
                assert isinstance(error, CollectiveAborted), error
                assert error.peer == peer.worker_id
            for error in await failures(*(world.barrier() for world in worlds)):
                assert isinstance(error, CollectiveAborted)


async def test_source_killed_during_a_transfer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FETCHING", RetryPolicy(attempts=2, delay_s=0.0))
    async with open_meshes(1) as made, PeerProcess("v") as peer:
        await peer.order(offer=1)
        assert await peer.answer() == "offering"
        arriving = made.meshes[0].state_fetch
        task = asyncio.ensure_future(arriving.fetch(peer.worker, 1, lambda _: buffers(*STATE_SIZES)))
        await until(lambda: bool(arriving.descriptors()))
        peer.kill()
        with pytest.raises(Unavailable):
            await task
        assert arriving.descriptors() == []


async def test_killed_fetcher_disturbs_no_other_fetcher() -> None:
    parts = random_parts(*STATE_SIZES)
    got = buffers(*STATE_SIZES)
    async with open_meshes(2) as made, PeerProcess("v") as peer:
        source, worker = made.meshes[0], made.workers[0]
        with source.state_server.offering(1, b"", parts):
            await peer.order(fetch=[worker.id, worker.hostname, worker.port], attempt=1)
            assert source.state_server._offer is not None
            channels = source.state_server._offer.channels
            await until(lambda: bool(channels))
            peer.kill()
            await made.meshes[1].state_fetch.fetch(worker, 1, lambda _: got)
            await until(lambda: not channels)
    assert got == parts


async def test_stopped_peer_is_not_lost_and_is_awaited_until_the_timeout() -> None:
    async with open_meshes(2) as made, PeerProcess("v") as peer:
        worlds = await world_with(peer, made, peer_is_hub=False)
        peer.stop()
        errors = await failures(*(world.barrier(timeout_s=0.2) for world in worlds))
        peer.resume()
        assert all(isinstance(error, CollectiveAborted) and error.peer == "" for error in errors)


def test_ending_process_is_not_kept_alive_by_threads() -> None:
    code = "import asyncio, tests.worker.peer_process as p; asyncio.run(p.main('v'))"
    done = subprocess.run([sys.executable, "-c", code], input=b"", capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
