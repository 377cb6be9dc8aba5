from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.net.protocol import frames
from forged.worker import mesh as mesh_module
from forged.worker.collectives.endpoints import HubEndpoint
from forged.worker.errors import CollectiveAborted, WorldIncomplete
from forged.worker.mesh import Mesh
from forged.worker.transport import peer_messages
from forged.worker.transport.peer_link import PEER_LIMITS, AcceptedLink
from forged.worker.transport.peer_messages import (
    Accepted,
    Answer,
    Challenge,
    PeerHello,
    Purpose,
    Refused,
    Started,
    answered,
    decode,
    digest_of,
    encode,
    mesh_key,
    nonces_of,
)
from tests.worker.meshes import JOB, KEY, PATIENCE_S, Meshes, each, failures, incarnation, open_meshes, until

HELLO = PeerHello(b"n" * 32)
MESH_KEY = mesh_key(KEY, JOB)


def proven(answer: Answer, challenge: Challenge, key: bytes = MESH_KEY) -> Answer:
    """The answer to this challenge, with its proof."""
    return answered(answer, key, nonces_of(HELLO, challenge))


class RawPeer:
    """A peer that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def challenge(self) -> Challenge:
        self.say(HELLO)
        message = await self.hear()
        assert isinstance(message, Challenge)
        return message

    async def hear(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            return decode(await self.reader.readexactly(length))

    def say(self, message: Any) -> None:
        self.writer.write(frames.encode(encode(message)))

    async def is_cut_off(self) -> bool:
        """Whether the other end closes, without another byte."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


@asynccontextmanager
async def raw_peer(worker: WorkerId) -> AsyncIterator[RawPeer]:
    reader, writer = await asyncio.open_connection(worker.hostname, worker.port)
    try:
        yield RawPeer(reader, writer)
    finally:
        writer.close()


def answer(number: int = 1, **changes: Any) -> Answer:
    """That of w1 to w0."""
    proper = Answer(2, JOB, "w0", "w1", incarnation(1), Purpose.MEMBER, number, 1)
    return msgspec.structs.replace(proper, **changes)


async def code_of(made: Meshes, number: int, topology: ClusterTopology, generation: int = 1) -> str:
    with pytest.raises(ForgedError) as raised:
        await made.meshes[number].enter(generation, topology, 0.2)
    return raised.value.code


# Worlds.


async def test_all_members_enter_the_world_with_their_ranks() -> None:
    async with open_meshes(3) as made:
        worlds = await made.enter(7, 2, 0, 1)
        assert [(world.rank, world.size, world.generation) for world in worlds] == [(0, 3, 7), (1, 3, 7), (2, 3, 7)]
        assert worlds[1].names == ("w2", "w0", "w1")


async def test_world_of_one_needs_no_peer() -> None:
    async with open_meshes(1) as made:
        (world,) = await made.enter(1)
        assert await world.all_gather(b"me") == [b"me"]


async def test_member_that_connects_before_the_hub_knows_the_world_waits() -> None:
    async with open_meshes(3) as made:
        coming = [asyncio.ensure_future(mesh.enter(5, made.topology, PATIENCE_S)) for mesh in made.meshes[1:]]
        await until(lambda: len(made.meshes[0]._early) == 2)
        world = await made.meshes[0].enter(5, made.topology, PATIENCE_S)
        await each([world, *[await one for one in coming]], lambda world: world.barrier())


async def test_fetcher_that_connects_too_early_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "EARLY_WAIT_S", 0.0)
    monkeypatch.setattr(mesh_module, "SWEEP_INTERVAL_S", 0.01)
    async with open_meshes(2) as made:
        assert await code_of(made, 1, made.topology) == "world_incomplete"
        assert made.meshes[0].counts.refused >= 1


async def test_an_older_generation_is_refused() -> None:
    async with open_meshes(2) as made:
        (alone,) = await made.enter(5, 0)
        assert await code_of(made, 1, made.topology, generation=4) == "generation_over"
        await alone.barrier()


async def test_no_generation_is_entered_twice_nor_an_older_one_after_it() -> None:
    async with open_meshes(1) as made:
        await made.enter(5)
        for generation in (4, 5):
            with pytest.raises(RequestRefused) as raised:
                await made.enter(generation)
            assert raised.value.code == "generation_over"


async def test_generation_that_no_other_worker_entered_can_be_tried_again() -> None:
    async with open_meshes(2) as made:
        assert await code_of(made, 0, made.topology) == "world_incomplete"
        await each(await made.enter(1), lambda world: world.barrier())


async def test_member_that_did_not_connect_is_named() -> None:
    async with open_meshes(3) as made:
        outcomes = await failures(
            made.meshes[0].enter(1, made.topology, 0.2), made.meshes[1].enter(1, made.topology, PATIENCE_S)
        )
        assert all(isinstance(error, Unavailable) and "w2 (rank 2)" in error.message for error in outcomes), outcomes
        assert [getattr(error, "peer", "") for error in outcomes] == ["w2", "w2"]


async def test_hub_names_missing_members_when_a_member_gives_up_waiting() -> None:
    async with open_meshes(3) as made:
        hub, impatient = await failures(
            made.meshes[0].enter(1, made.topology, PATIENCE_S), made.meshes[1].enter(1, made.topology, 0.2)
        )
        assert isinstance(hub, CollectiveAborted)
        assert isinstance(impatient, WorldIncomplete)
        # An accepted member knows that the hub is not to blame, and not which member is.
        assert (hub.peer, impatient.peer) == ("w2", "")


async def test_unreached_hub_is_named_and_a_slow_one_is_not() -> None:
    async with open_meshes(2) as made:
        with socket.create_server(("127.0.0.1", 0)) as free:
            nowhere = WorkerId("w0", *free.getsockname())
        unreached = ClusterTopology((nowhere, made.workers[1]))
        for topology, peer in ((unreached, "w0"), (made.topology, "")):
            (error,) = await failures(made.meshes[1].enter(1, topology, 0.2))
            assert isinstance(error, WorldIncomplete)
            assert error.peer == peer
            assert pickle.loads(pickle.dumps(error)).peer == peer


async def test_the_next_world_ends_the_one_before() -> None:
    async with open_meshes(3) as made:
        old = await made.enter(1)
        waiting = asyncio.ensure_future(failures(*(world.barrier() for world in old[:2])))
        new = await made.enter(2)
        assert all(isinstance(error, CollectiveAborted) for error in await waiting)
        await each(new, lambda world: world.barrier())


async def test_another_hub_may_hold_the_next_world() -> None:
    async with open_meshes(3) as made:
        for generation, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2), (0, 1, 2)]):
            worlds = await made.enter(generation, *order)
            assert await each(worlds, lambda world: world.all_reduce(1)) == [len(order)] * len(order)


async def test_a_newer_enter_ends_one_that_still_waits() -> None:
    async with open_meshes(2) as made:
        stuck = asyncio.ensure_future(failures(made.meshes[0].enter(1, made.topology, PATIENCE_S)))
        await until(lambda: made.meshes[0]._generation == 1)
        await each(await made.enter(2), lambda world: world.barrier())
        (error,) = await stuck
        assert isinstance(error, CollectiveAborted)


async def test_a_cancelled_enter_leaves_a_mesh_that_can_enter_again() -> None:
    async with open_meshes(2) as made:
        for mesh in made.meshes:
            task = asyncio.ensure_future(mesh.enter(1, made.topology))
            await until(lambda mesh=mesh: mesh._generation == 1)  # type: ignore[misc]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await each(await made.enter(2), lambda world: world.barrier())


async def test_members_with_different_topologies_do_not_form_a_world() -> None:
    async with open_meshes(3) as made:
        hub = asyncio.ensure_future(failures(made.meshes[0].enter(1, made.of(0, 1), 0.3)))
        assert await code_of(made, 1, made.of(0, 1, 2)) == "topology_differs"
        assert await code_of(made, 2, made.of(0, 2)) == "topology_differs"
        await hub


async def test_worker_cannot_enter_a_world_without_it() -> None:
    async with open_meshes(2) as made:
        assert await code_of(made, 1, made.of(0)) == "not_a_member"


async def test_mesh_without_a_key_enters_no_world_and_accepts_no_peer() -> None:
    async with open_meshes(2) as made:
        made.meshes[0].trust(b"")
        assert await code_of(made, 0, made.topology) == "mesh_not_ready"
        assert await code_of(made, 1, made.topology) == "world_incomplete"
        made.meshes[0].trust(KEY)
        await made.enter(2)


def hub_links(mesh: Mesh) -> list[AcceptedLink]:
    """The members that are connected to the hub of this mesh."""
    endpoint = mesh._endpoint
    return list(endpoint._links.values()) if isinstance(endpoint, HubEndpoint) else []


async def test_second_process_with_the_same_id_is_refused() -> None:
    async with open_meshes(3) as made:
        hub = asyncio.ensure_future(made.meshes[0].enter(1, made.topology, PATIENCE_S))
        first = asyncio.ensure_future(made.meshes[1].enter(1, made.topology, PATIENCE_S))
        await until(lambda: bool(hub_links(made.meshes[0])))
        twin = Mesh("w1", b"another process!", JOB, key=KEY)
        async with twin.open():
            with pytest.raises(RequestRefused) as raised:
                await twin.enter(1, made.topology, PATIENCE_S)
            assert raised.value.code == "session_differs"
        third = asyncio.ensure_future(made.meshes[2].enter(1, made.topology, PATIENCE_S))
        await each([await hub, await first, await third], lambda world: world.barrier())


async def test_member_reconnects_after_a_break_before_the_start() -> None:
    async with open_meshes(3) as made:
        coming = [asyncio.ensure_future(mesh.enter(1, made.topology, PATIENCE_S)) for mesh in made.meshes[:2]]
        hub = made.meshes[0]
        await until(lambda: bool(hub_links(hub)))
        (link,) = hub_links(hub)
        link.abort()
        coming.append(asyncio.ensure_future(made.meshes[2].enter(1, made.topology, PATIENCE_S)))
        await each([await one for one in coming], lambda world: world.barrier())


async def test_closing_a_mesh_ends_its_world_cleanly() -> None:
    async with open_meshes(2) as made:
        third = Mesh("w2", incarnation(2), JOB, key=KEY)
        async with third.open() as address:
            topology = ClusterTopology((*made.workers, WorkerId("w2", address.host, address.port)))
            worlds = await each([*made.meshes, third], lambda mesh: mesh.enter(1, topology, PATIENCE_S))
        (error,) = await failures(worlds[0].barrier())
        assert "w2 (rank 2) left the world in good order" in str(error)


async def test_error_raised_in_the_block_is_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Mesh("w0", incarnation(0), JOB, key=KEY).open():
            raise ZeroDivisionError


async def test_address_that_cannot_be_bound_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ForgedError) as raised:
        async with Mesh("w0", incarnation(0), JOB, key=KEY).open(port=taken.getsockname()[1]):
            pass
    assert raised.value.kind == "config"


async def test_descriptors_are_the_listener_and_all_connections() -> None:
    async with open_meshes(3) as made:
        await made.enter(1)
        assert [len(mesh.descriptors()) for mesh in made.meshes] == [3, 2, 2]


# Malicious and mistaken peers.


@pytest.mark.parametrize(
    "proper",
    [
        answered(answer(), b"another key", b"c" * 64),
        answer(),
        answered(answer(), KEY, b"c" * 64),
        answered(answer(), MESH_KEY, b"c" * 64),
    ],
)
async def test_peer_without_a_proof_is_disconnected_without_a_message(proper: Answer) -> None:
    async with open_meshes(1) as made, raw_peer(made.workers[0]) as one:
        await one.challenge()
        one.say(proper)
        assert await one.is_cut_off()
        await until(lambda: made.meshes[0].counts.unproven == 1)


@pytest.mark.parametrize("changes", [{"job": "walk"}, {"target": "w9"}])
async def test_peer_for_another_worker_or_job_is_disconnected_without_a_message(changes: dict[str, Any]) -> None:
    async with open_meshes(1) as made, raw_peer(made.workers[0]) as one:
        challenge = await one.challenge()
        one.say(proven(answer(**changes), challenge))
        assert await one.is_cut_off()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        struct.pack(">I", PEER_LIMITS.hello_bytes_max + 1),
        frames.encode(b"\xc1"),
        frames.encode(encode(Started(1))),
        frames.encode(encode(Refused("refused", "no", "no"))),
    ],
)
async def test_garbage_is_disconnected_without_a_message(garbage: bytes) -> None:
    async with open_meshes(1) as made, raw_peer(made.workers[0]) as one:
        await one.challenge()
        one.writer.write(garbage)
        assert await one.is_cut_off()
        await until(lambda: made.meshes[0].counts.unproven == 1)


async def test_dialler_that_answers_before_the_challenge_is_disconnected_without_a_message() -> None:
    async with open_meshes(1) as made, raw_peer(made.workers[0]) as one:
        one.say(answered(answer(), MESH_KEY, b""))
        assert await one.is_cut_off()


async def test_challenges_are_unique() -> None:
    async with open_meshes(1) as made, raw_peer(made.workers[0]) as one, raw_peer(made.workers[0]) as other:
        first, second = await one.challenge(), await other.challenge()
        assert first.nonce != second.nonce
        other.say(proven(answer(), first))
        assert await other.is_cut_off()


async def test_peer_with_a_slow_proof_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "SWEEP_INTERVAL_S", 0.01)
    async with open_meshes(1) as made, raw_peer(made.workers[0]) as one:
        await one.challenge()
        for link in made.meshes[0]._unauthenticated:
            link._opened_at -= PEER_LIMITS.hello_timeout_s
        assert await one.is_cut_off()


async def test_many_unauthenticated_connections_do_not_block_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "UNAUTHENTICATED_MAX", 4)
    async with open_meshes(2) as made:
        crowd = [await asyncio.open_connection(made.workers[0].hostname, made.workers[0].port) for _ in range(20)]
        await each(await made.enter(1), lambda world: world.barrier())
        assert len(made.meshes[0]._unauthenticated) <= 4
        for _, writer in crowd:
            writer.close()


async def test_protocol_violation_of_a_member_ends_only_its_world() -> None:
    async with open_meshes(1) as made:
        topology = ClusterTopology((made.workers[0], WorkerId("w1", "127.0.0.1", 1)))
        hub = asyncio.ensure_future(made.meshes[0].enter(1, topology, PATIENCE_S))
        async with raw_peer(made.workers[0]) as one:
            challenge = await one.challenge()
            one.say(proven(answer(world=digest_of(topology.workers)), challenge))
            assert isinstance(await one.hear(), Accepted)
            assert isinstance(await one.hear(), Started)
            world = await hub
            one.writer.write(struct.pack(">I", peer_messages.MESSAGE_BYTES_MAX + 1))
            (error,) = await failures(world.barrier())
            assert isinstance(error, CollectiveAborted)
            assert error.peer == "w1"
        (alone,) = await made.enter(2)
        await alone.barrier()


async def test_member_that_connects_for_an_ended_generation_is_refused() -> None:
    async with open_meshes(1) as made:
        await made.enter(3)
        async with raw_peer(made.workers[0]) as one:
            challenge = await one.challenge()
            one.say(proven(answer(2), challenge))
            assert isinstance(await one.hear(), Accepted)
            refusal = await one.hear()
            assert isinstance(refusal, Refused)
            assert refusal.code == "generation_over"
        assert made.meshes[0].counts.refused == 1


@asynccontextmanager
async def impostor(*messages: Any) -> AsyncIterator[WorkerId]:
    """Listen in a worker's place, send this, and wait."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for message in messages:
            writer.write(frames.encode(encode(message)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield WorkerId("w0", "127.0.0.1", server.sockets[0].getsockname()[1])


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ((Challenge(2, 2, b"c" * 32, b"p" * 32), Accepted(b"p" * 32)), "peer_unproven"),
        ((Challenge(1, 1, b"c" * 32),), "version_mismatch"),
        ((Challenge(3, 4, b"c" * 32, b"p" * 32),), "version_mismatch"),
        ((Started(1),), "message_unexpected"),
        ((Accepted(b"p" * 32),), "message_unexpected"),
    ],
)
async def test_unauthenticated_hub_is_rejected(messages: tuple[Any, ...], code: str) -> None:
    async with open_meshes(2) as made, impostor(*messages) as hub:
        with pytest.raises(PeerError) as raised:
            await made.meshes[1].enter(1, ClusterTopology((hub, made.workers[1])), PATIENCE_S)
        assert raised.value.code == code


async def test_listener_without_a_proof_learns_neither_job_nor_worker_nor_session() -> None:
    heard = bytearray()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode(encode(Challenge(2, 2, b"c" * 32, b"p" * 32))))
        heard.extend(await reader.read())
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, open_meshes(2) as made:
        hub = WorkerId("w0", "127.0.0.1", server.sockets[0].getsockname()[1])
        assert await code_of(made, 1, ClusterTopology((hub, made.workers[1]))) == "peer_unproven"
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
    assert isinstance(decode(bytes(heard[4:])), PeerHello)


async def test_proof_of_another_listener_of_the_job_is_rejected() -> None:
    """A challenge that was made for another worker is passed on."""
    async with open_meshes(3) as made:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other, out = await asyncio.open_connection(made.workers[2].hostname, made.workers[2].port)
            out.write(await reader.read(1 << 16))
            writer.write(await other.read(1 << 16))
            await reader.read()
            writer.close()
            out.close()

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with server:
            hub = WorkerId("w0", "127.0.0.1", server.sockets[0].getsockname()[1])
            assert await code_of(made, 1, ClusterTopology((hub, made.workers[1]))) == "peer_unproven"


async def test_silent_listener_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = WorkerId("w0", "127.0.0.1", silent.getsockname()[1])
        async with open_meshes(2) as made:
            assert await code_of(made, 1, ClusterTopology((hub, made.workers[1]))) == "world_incomplete"
