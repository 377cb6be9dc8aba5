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
from forged.worker.transport.peer_messages import Accepted, Purpose, ShardComing, ShardsReady, ShardWanted, answered
from tests.data.wards import filling, open_ward
from tests.worker.data.test_shard_protocol import FlowControl
from tests.worker.meshes import JOB, KEY, incarnation, open_meshes, until
from tests.worker.test_mesh import Stranger, answer, stranger

DATA = filling(7, 100_000)


async def come(one: Stranger) -> None:
    """Prove who one is, for shards."""
    challenge = await one.challenge()
    one.say(answered(answer(0, purpose=Purpose.SHARDS), KEY, challenge.nonce))
    assert isinstance(await one.hear(), Accepted)


async def test_one_visit_is_good_for_many_shards() -> None:
    async with open_ward(2) as ward:
        for number in range(30):
            ward.stores[1].put(number, [filling(number, 1000 * number)])
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        for number in range(30):
            flow = FlowControl()
            await connection.fetch(number, ward.store, flow)
            assert flow.count == 1000 * number
        assert ward.meshes[1].counts.accepted == 1
        connection.close()
        connection.close()
        assert ward.store.held() == ward.stores[1].held()


async def test_a_refused_shard_ends_no_visit() -> None:
    async with open_ward(2) as ward:
        ward.stores[1].put(7, [DATA])
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        with pytest.raises(ForgedError, match="shard 8 "):
            await connection.fetch(8, ward.store, FlowControl())
        assert await connection.fetch(7, ward.store, FlowControl()) == Stamp.of(DATA)
        connection.close()


async def test_a_worker_knows_whether_anybody_has_come_lately() -> None:
    async with open_ward(2) as ward:
        ward.stores[1].put(7, [DATA])
        giver = ward.meshes[1]
        assert not giver.has_given()
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        await connection.fetch(7, ward.store, FlowControl())
        assert giver.has_given()
        await until(lambda: not giver.has_given())
        assert not giver.has_given(), "who stays on the line and wants nothing does not come"
        assert not ward.meshes[0].has_given()
        connection.close()


async def test_idle_shard_connections_hold_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connections, "SERVED_AT_ONCE_MAX", 1)
    async with open_ward(2) as ward:
        ward.stores[1].put(7, [DATA])
        connections = [await ward.meshes[0].connect_for_shards(ward.workers[1]) for _ in range(10)]
        for connection in connections:
            assert await connection.fetch(7, ward.store, FlowControl()) == Stamp.of(DATA)
            ward.store.drop(7)
        for connection in connections:
            connection.close()
        await until(lambda: len(ward.meshes[1].descriptors()) == 1)


async def test_who_stays_idle_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connections, "IDLE_MAX_S", 0.01)
    async with open_ward(2) as ward:
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        await until(lambda: len(ward.meshes[1].descriptors()) == 1)
        with pytest.raises(Unavailable):
            await connection.fetch(7, ward.store, FlowControl())
        connection.close()


async def test_too_many_visitors_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connections, "CONNECTIONS_MAX", 1)
    async with open_ward(2) as ward:
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        with pytest.raises(Unavailable) as raised:
            await ward.meshes[0].connect_for_shards(ward.workers[1])
        assert raised.value.code == "shards_busy"
        connection.close()
        await until(lambda: len(ward.meshes[1].descriptors()) == 1)
        (await ward.meshes[0].connect_for_shards(ward.workers[1])).close()


async def test_the_descriptors_of_both_ends_are_known() -> None:
    async with open_ward(2) as ward:
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        await until(lambda: [len(mesh.descriptors()) for mesh in ward.meshes] == [2, 2])
        assert connection.descriptor() in ward.meshes[0].descriptors()
        connection.close()
        await until(lambda: [len(mesh.descriptors()) for mesh in ward.meshes] == [1, 1])


async def test_the_store_may_be_changed_at_any_time() -> None:
    async with open_ward(2) as ward:
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        with pytest.raises(ForgedError):
            await connection.fetch(7, ward.store, FlowControl())
        other = MemoryShardStore()
        other.put(7, [DATA])
        ward.meshes[1].serve_shards(other)
        connection.close()
        connection = await ward.meshes[0].connect_for_shards(ward.workers[1])
        assert await connection.fetch(7, ward.store, FlowControl()) == Stamp.of(DATA)
        connection.close()


async def test_nobody_gets_a_shard_without_the_jobs_key() -> None:
    async with open_ward(1) as ward, stranger(ward.me) as one:
        ward.store.put(7, [DATA])
        await one.challenge()
        one.say(answered(answer(0, purpose=Purpose.SHARDS), b"another key", bytes(32)))
        assert await one.is_cut_off()


async def test_shards_are_given_byte_by_byte_to_who_has_the_key() -> None:
    async with open_ward(1) as ward, stranger(ward.me) as one:
        ward.store.put(7, [b"bytes"])
        await come(one)
        assert await one.hear() == ShardsReady()
        one.say(ShardWanted(7))
        assert await one.hear() == ShardComing(7, *Stamp.of(b"bytes"))
        assert await one.reader.readexactly(5) == b"bytes"


@pytest.mark.parametrize("garbage", [b"\xff" * 8, bytes(4), b"GET / HTTP/1.1\r\n\r\n"])
async def test_garbage_ends_the_visit_and_nothing_else(garbage: bytes) -> None:
    async with open_ward(2) as ward:
        ward.store.put(7, [DATA])
        async with stranger(ward.me) as one:
            await come(one)
            assert await one.hear() == ShardsReady()
            one.writer.write(garbage)
            assert await one.is_cut_off()
        connection = await ward.meshes[1].connect_for_shards(ward.me)
        await connection.fetch(7, ward.stores[1], FlowControl())
        connection.close()


async def test_who_speaks_before_it_is_its_turn_is_cut_off() -> None:
    async with open_ward(1) as ward, stranger(ward.me) as one:
        challenge = await one.challenge()
        one.say(answered(answer(0, purpose=Purpose.SHARDS), KEY, challenge.nonce))
        one.writer.write(b"\xff" * 100)
        heard = []
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heard.append(await one.hear())
        assert not any(isinstance(word, ShardComing) for word in heard)
        await until(lambda: len(ward.meshes[0].descriptors()) == 1)


async def test_a_visit_to_somebody_who_gives_no_shards_is_an_error() -> None:
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


async def test_a_mesh_that_closes_ends_all_shard_connections() -> None:
    async with open_ward(2) as ward:
        third = Mesh("w2", incarnation(2), JOB, key=KEY)
        async with third.open():
            connection = await third.connect_for_shards(ward.workers[1])
        with pytest.raises(ForgedError):
            await connection.fetch(7, ward.store, FlowControl())
        connection.close()
        await until(lambda: len(ward.meshes[1].descriptors()) == 1)
