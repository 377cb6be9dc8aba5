from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from forged.data.store.memory import MemoryShardStore
from forged.data.store.port import Stamp
from forged.elastic.model import WorkerId
from forged.errors import ForgedError, PeerError, Unavailable
from forged.worker.data import shard_connections
from forged.worker.mesh import Mesh
from forged.worker.transport.peer_messages import Accepted, Purpose, ShardComing, ShardsReady, ShardWanted
from tests.data.transfer_cluster import content_of, open_cluster
from tests.worker.data.test_shard_protocol import FlowControl
from tests.worker.meshes import JOB, KEY, incarnation, open_meshes, until
from tests.worker.test_mesh import RawPeer, answer, proven, raw_peer

DATA = content_of(7, 100_000)


async def authenticate(visitor: RawPeer) -> None:
    """Authenticate for shards."""
    challenge = await visitor.challenge()
    visitor.say(proven(answer(0, purpose=Purpose.SHARDS), challenge))
    assert isinstance(await visitor.hear(), Accepted)


async def test_one_connection_serves_many_shards() -> None:
    async with open_cluster(2) as cluster:
        for number in range(30):
            cluster.stores[1].put(number, [content_of(number, 1000 * number)])
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        for number in range(30):
            flow = FlowControl()
            await connection.fetch(number, cluster.store, flow)
            assert flow.count == 1000 * number
        assert cluster.meshes[1].counts.accepted == 1
        connection.close()
        connection.close()
        assert cluster.store.held() == cluster.stores[1].held()


async def test_refused_shard_keeps_the_connection_open() -> None:
    async with open_cluster(2) as cluster:
        cluster.stores[1].put(7, [DATA])
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        with pytest.raises(ForgedError, match="shard 8 "):
            await connection.fetch(8, cluster.store, FlowControl())
        assert await connection.fetch(7, cluster.store, FlowControl()) == Stamp.of(DATA)
        connection.close()


async def test_has_given_is_true_only_after_recent_requests() -> None:
    async with open_cluster(2) as cluster:
        cluster.stores[1].put(7, [DATA])
        giver = cluster.meshes[1]
        assert not giver.has_given()
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        await connection.fetch(7, cluster.store, FlowControl())
        assert giver.has_given()
        await until(lambda: not giver.has_given())
        assert not giver.has_given(), "an idle connection is not counted"
        assert not cluster.meshes[0].has_given()
        connection.close()


async def test_idle_shard_connections_hold_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connections, "SERVED_AT_ONCE_MAX", 1)
    async with open_cluster(2) as cluster:
        cluster.stores[1].put(7, [DATA])
        connections = [await cluster.meshes[0].connect_for_shards(cluster.workers[1]) for _ in range(10)]
        for connection in connections:
            assert await connection.fetch(7, cluster.store, FlowControl()) == Stamp.of(DATA)
            cluster.store.drop(7)
        for connection in connections:
            connection.close()
        await until(lambda: len(cluster.meshes[1].descriptors()) == 1)


async def test_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connections, "IDLE_MAX_S", 0.01)
    async with open_cluster(2) as cluster:
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        await until(lambda: len(cluster.meshes[1].descriptors()) == 1)
        with pytest.raises(Unavailable):
            await connection.fetch(7, cluster.store, FlowControl())
        connection.close()


async def test_connections_beyond_the_limit_are_refused_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connections, "CONNECTIONS_MAX", 1)
    async with open_cluster(2) as cluster:
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        with pytest.raises(Unavailable) as raised:
            await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        assert raised.value.code == "shards_busy"
        connection.close()
        await until(lambda: len(cluster.meshes[1].descriptors()) == 1)
        (await cluster.meshes[0].connect_for_shards(cluster.workers[1])).close()


async def test_descriptors_of_both_ends_are_listed() -> None:
    async with open_cluster(2) as cluster:
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        await until(lambda: [len(mesh.descriptors()) for mesh in cluster.meshes] == [2, 2])
        assert connection.descriptor() in cluster.meshes[0].descriptors()
        connection.close()
        await until(lambda: [len(mesh.descriptors()) for mesh in cluster.meshes] == [1, 1])


async def test_new_connection_uses_the_replaced_store() -> None:
    async with open_cluster(2) as cluster:
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        with pytest.raises(ForgedError):
            await connection.fetch(7, cluster.store, FlowControl())
        other = MemoryShardStore()
        other.put(7, [DATA])
        cluster.meshes[1].serve_shards(other)
        connection.close()
        connection = await cluster.meshes[0].connect_for_shards(cluster.workers[1])
        assert await connection.fetch(7, cluster.store, FlowControl()) == Stamp.of(DATA)
        connection.close()


async def test_connection_without_the_job_key_is_closed() -> None:
    async with open_cluster(1) as cluster, raw_peer(cluster.fetcher) as visitor:
        cluster.store.put(7, [DATA])
        challenge = await visitor.challenge()
        visitor.say(proven(answer(0, purpose=Purpose.SHARDS), challenge, b"another key"))
        assert await visitor.is_cut_off()


async def test_authenticated_connection_receives_the_shard_bytes() -> None:
    async with open_cluster(1) as cluster, raw_peer(cluster.fetcher) as visitor:
        cluster.store.put(7, [b"bytes"])
        await authenticate(visitor)
        assert await visitor.hear() == ShardsReady()
        visitor.say(ShardWanted(7))
        assert await visitor.hear() == ShardComing(7, *Stamp.of(b"bytes"))
        assert await visitor.reader.readexactly(5) == b"bytes"


@pytest.mark.parametrize("garbage", [b"\xff" * 8, bytes(4), b"GET / HTTP/1.1\r\n\r\n"])
async def test_garbage_closes_only_its_own_connection(garbage: bytes) -> None:
    async with open_cluster(2) as cluster:
        cluster.store.put(7, [DATA])
        async with raw_peer(cluster.fetcher) as visitor:
            await authenticate(visitor)
            assert await visitor.hear() == ShardsReady()
            visitor.writer.write(garbage)
            assert await visitor.is_cut_off()
        connection = await cluster.meshes[1].connect_for_shards(cluster.fetcher)
        await connection.fetch(7, cluster.stores[1], FlowControl())
        connection.close()


async def test_connection_that_sends_out_of_turn_is_closed() -> None:
    async with open_cluster(1) as cluster, raw_peer(cluster.fetcher) as visitor:
        challenge = await visitor.challenge()
        visitor.say(proven(answer(0, purpose=Purpose.SHARDS), challenge))
        visitor.writer.write(b"\xff" * 100)
        heard = []
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heard.append(await visitor.hear())
        assert not any(isinstance(word, ShardComing) for word in heard)
        await until(lambda: len(cluster.meshes[0].descriptors()) == 1)


async def test_connecting_to_a_server_without_shards_fails() -> None:
    async with open_meshes(1) as made:
        mesh = made.meshes[0]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((Unavailable, PeerError)):
            await mesh.connect_for_shards(WorkerId("w1", "127.0.0.1", port))
        server.close()
        assert len(mesh.descriptors()) == 1


async def test_closing_mesh_closes_all_shard_connections() -> None:
    async with open_cluster(2) as cluster:
        third = Mesh("w2", incarnation(2), JOB, key=KEY)
        async with third.open():
            connection = await third.connect_for_shards(cluster.workers[1])
        with pytest.raises(ForgedError):
            await connection.fetch(7, cluster.store, FlowControl())
        connection.close()
        await until(lambda: len(cluster.meshes[1].descriptors()) == 1)
