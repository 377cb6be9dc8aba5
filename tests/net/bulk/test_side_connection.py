"""Side connections with a real daemon: bytes and descriptors in both directions, and failures."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
import trustme

from forged.auth.model import Principal, Role
from forged.client import ForgedClient
from forged.client import bulk as client_bulk
from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.kernel.messages import ANY_JOB, Request, Ticket
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.sqlite import SqliteStore
from forged.net import tickets
from forged.net.bulk import side_connection
from forged.net.bulk.detach import detach
from forged.net.protocol import frames
from forged.net.protocol.messages import Hello, encode
from forged.net.tickets import SIDE_CONNECTIONS_MAX, TicketRegistry
from forged.net.transport.sockets import SystemNetwork
from forged.net.transport.tls import client_context, server_context

SIZE = 3_000_001
"""Many pieces, and not a multiple of a buffer size."""


class AskForTicket(Request[Ticket], frozen=True):
    """Returns a ticket for the prepared transfer."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class TicketDaemon:
    """A daemon on TCP, TLS and Unix sockets that issues a ticket for `transfer`."""

    def __init__(self, directory: Path, side_connections_max: int) -> None:
        self.directory = directory
        self.side_connections_max = side_connections_max
        self.offer: side_connection.BulkTransfer | None = None
        self.endpoints: dict[str, str] = {}
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        certificate = authority.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(directory / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(directory / "certificate.pem")

    def network(self) -> SystemNetwork:
        return SystemNetwork(
            tls_server=server_context(self.directory / "certificate.pem", self.directory / "key.pem"),
            tls_client=client_context(self.directory / "ca.pem"),
        )

    def extend(self, daemon: Daemon) -> None:
        def give(request: Any, call: Any) -> Ticket:
            assert self.offer is not None
            return daemon.tickets.issue(self.offer, call.principal)

        daemon.bus.serve(AskForTicket, give, owner="test")
        daemon.sides.connections_max = self.side_connections_max
        self.daemon = daemon


@asynccontextmanager
async def ticket_daemon(
    tmp_path: Path, side_connections_max: int = SIDE_CONNECTIONS_MAX
) -> AsyncIterator[TicketDaemon]:
    daemon_runner = TicketDaemon(tmp_path, side_connections_max)

    async def open_store() -> MemoryStore:
        return MemoryStore("test")

    config = Config(
        data_dir=str(tmp_path),
        socket=str(tmp_path / "s.sock"),
        listen=("tcp://127.0.0.1:0", "tls://localhost:0"),
        drain_timeout_s=1.0,
    )
    ports = Ports(SystemClock(), daemon_runner.network(), os.getpid(), os.getuid(), open_store)
    async with Daemon.running(config, ports, extend=daemon_runner.extend) as daemon:
        tcp, tls = daemon.listening
        daemon_runner.endpoints = {"tcp": tcp, "tls": tls, "unix": f"unix://{tmp_path}/s.sock"}
        yield daemon_runner


def client_of(daemon_runner: TicketDaemon, scheme: str = "unix") -> ForgedClient:
    return ForgedClient(daemon_runner.endpoints[scheme], network=daemon_runner.network())


def a_file(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
async def test_the_daemon_sends_a_file_and_the_client_stores_it(tmp_path: Path, scheme: str) -> None:
    data = os.urandom(SIZE)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner, scheme) as client:
        daemon_runner.offer = side_connection.file_sender(a_file(tmp_path / "source", data), SIZE)
        fd = a_file(tmp_path / "target", b"")
        await client.fetch_file(await client.request(AskForTicket()), fd)
        os.close(fd)
    assert (tmp_path / "target").read_bytes() == data


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
async def test_the_client_sends_a_file_and_the_daemon_stores_it(tmp_path: Path, scheme: str) -> None:
    data = os.urandom(SIZE)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner, scheme) as client:
        daemon_runner.offer = side_connection.file_receiver(a_file(tmp_path / "target", b""), SIZE)
        fd = a_file(tmp_path / "source", data)
        await client.deliver_file(await client.request(AskForTicket()), fd)
        os.close(fd)
    assert (tmp_path / "target").read_bytes() == data


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
async def test_memory_travels_both_ways(tmp_path: Path, scheme: str) -> None:
    data, room = os.urandom(SIZE), bytearray(SIZE)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner, scheme) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(data))
        assert await client.fetch_bytes(await client.request(AskForTicket())) == data
        daemon_runner.offer = side_connection.buffer_receiver(memoryview(room))
        await client.deliver_bytes(await client.request(AskForTicket()), memoryview(data))
    assert room == data


async def test_nothing_at_all_travels_too(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b""))
        assert await client.fetch_bytes(await client.request(AskForTicket())) == b""


async def test_a_transfer_goes_on_from_an_offset(tmp_path: Path) -> None:
    data = os.urandom(SIZE)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.file_sender(a_file(tmp_path / "source", data), SIZE)
        fd = a_file(tmp_path / "target", data[:1000])
        await client.fetch_file(await client.request(AskForTicket()), fd, offset=1000)
        os.close(fd)
    assert (tmp_path / "target").read_bytes() == data


async def test_descriptors_travel_over_a_unix_socket(tmp_path: Path) -> None:
    fds = [a_file(tmp_path / name, name.encode()) for name in ("one", "two")]
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.descriptor_sender(fds)
        taken = await client.fetch_descriptors(await client.request(AskForTicket()))
    assert [os.pread(fd, 10, 0) for fd in taken] == [b"one", b"two"]
    for fd in (*fds, *taken):
        os.close(fd)


async def test_the_offer_is_closed_when_it_was_used(tmp_path: Path) -> None:
    fd = a_file(tmp_path / "source", b"x" * 10)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.file_sender(fd, 10)
        await client.fetch_bytes(await client.request(AskForTicket()))
        await client.ping()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"secret"))
        ticket = await client.request(AskForTicket())
        assert await client.fetch_bytes(ticket) == b"secret"
        with pytest.raises(PeerError) as refused:
            await client.fetch_bytes(ticket)
        assert refused.value.code == "ticket_unknown"
        await client.ping()


async def test_unknown_ticket_is_refused(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        with pytest.raises(PeerError) as refused:
            await client.fetch_bytes(Ticket(b"0" * 16, 3))
        assert refused.value.code == "ticket_unknown"


async def test_an_offset_outside_the_bytes_is_refused(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"abc"))
        fd = a_file(tmp_path / "target", b"")
        with pytest.raises(ForgedError) as refused:
            await client.fetch_file(await client.request(AskForTicket()), fd, offset=4)
        os.close(fd)
        assert refused.value.code == "offset_invalid"


async def test_a_ticket_for_more_than_there_is_room_for_is_refused_before_a_byte_is_moved(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"abc"))
        ticket = await client.request(AskForTicket())
        with pytest.raises(RequestRefused) as refused:
            await client.fetch_bytes(Ticket(ticket.ticket, 2))
        assert refused.value.code == "size_differs"


async def test_a_sender_whose_file_was_truncated_does_not_hang_the_receiver(tmp_path: Path) -> None:
    fd = a_file(tmp_path / "source", b"x" * 100)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.file_sender(fd, 200)
        with pytest.raises(Unavailable) as truncated:
            await client.fetch_bytes(await client.request(AskForTicket()))
        assert truncated.value.code == "bulk_truncated"
        await client.ping()


async def test_a_peer_that_hangs_up_after_the_welcome_leaves_nothing_behind(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"abc"))
        ticket = await client.request(AskForTicket())
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s.sock"))
        writer.write(frames.encode(encode(Hello(1, 1, b"x" * 16, ticket=ticket.ticket))))
        assert await reader.readexactly(4)
        writer.close()
        await writer.wait_closed()
        await client.ping()
        assert len(daemon_runner.daemon.tickets) == 0


async def refuse_once(offer: side_connection.BulkTransfer, daemon_runner: TicketDaemon) -> None:
    """Let one transfer fail, and check that the daemon still serves."""
    daemon_runner.offer = offer
    async with client_of(daemon_runner) as client:
        with pytest.raises(Unavailable):
            await client.fetch_bytes(await client.request(AskForTicket()))
        await client.ping()


async def test_a_mover_that_is_refused_something_by_the_system_ends_its_side_connection_alone(tmp_path: Path) -> None:
    closed: list[int] = []

    def move(sock: socket.socket, offset: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with ticket_daemon(tmp_path) as daemon_runner:
        await refuse_once(side_connection.BulkTransfer(3, move, lambda: closed.append(1)), daemon_runner)
        assert closed == [1]


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
async def test_a_connection_that_cannot_be_taken_over_for_want_of_descriptors_ends_alone(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.Event()

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def detach_without_descriptors(transport: asyncio.Transport) -> socket.socket:
        with monkeypatch.context() as meanwhile:
            # Only the daemon's end: the client's end is detached in the same process.
            meanwhile.setattr(socket, "socketpair", refuse)
            meanwhile.setattr(os, "dup", refuse)
            return await detach(transport)

    monkeypatch.setattr(tickets, "detach", detach_without_descriptors)
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner, scheme) as client:
        daemon_runner.offer = side_connection.BulkTransfer(3, lambda sock, offset: None, closed.set)
        with pytest.raises(Unavailable):
            await client.fetch_bytes(await client.request(AskForTicket()))
        await closed.wait()
        await client.ping()


@pytest.mark.parametrize("culprit", ["move", "close"])
async def test_exception_in_a_side_connection_is_reported_and_ends_only_that_connection(
    tmp_path: Path, culprit: str
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def move(sock: socket.socket, offset: int) -> None:
        raise Unavailable("not_now", "not now")

    offer = side_connection.BulkTransfer(3, fail) if culprit == "move" else side_connection.BulkTransfer(3, move, fail)
    async with ticket_daemon(tmp_path) as daemon_runner:
        await refuse_once(offer, daemon_runner)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


async def test_one_side_connection_too_many_is_refused_and_its_ticket_stays_good(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path, side_connections_max=1) as daemon_runner, client_of(daemon_runner) as client:
        begun, goes_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def move(sock: socket.socket, offset: int) -> None:
            loop.call_soon_threadsafe(begun.set)
            goes_on.wait()
            raise Unavailable("not_now", "not now")

        daemon_runner.offer = side_connection.BulkTransfer(3, move)
        first = asyncio.create_task(client.fetch_bytes(await client.request(AskForTicket())))
        await begun.wait()
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"abc"))
        ticket = await client.request(AskForTicket())
        with pytest.raises(Unavailable) as refused:
            await client.fetch_bytes(ticket)
        assert refused.value.code == "too_many_connections"
        goes_on.set()
        with pytest.raises(Unavailable):
            await first
        while daemon_runner.daemon.sides.open_count:
            await client.ping()
        assert await client.fetch_bytes(ticket) == b"abc"


async def test_a_backup_is_durable_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bool]] = []
    copied = tmp_path / "copies" / "backup.sqlite3"
    copied.parent.mkdir()
    (tmp_path / "data").mkdir()

    async def open_store() -> SqliteStore:
        return await SqliteStore.open(tmp_path / "data" / "forged.sqlite3")

    monkeypatch.setattr(client_bulk, "sync_directory", lambda path: synced.append((path, copied.exists())))
    config = Config(data_dir=str(tmp_path / "data"), socket=str(tmp_path / "s.sock"), listen=())
    ports = Ports(SystemClock(), SystemNetwork(), os.getpid(), os.getuid(), open_store)
    async with Daemon.running(config, ports), ForgedClient(f"unix://{config.socket}") as client:
        await client.backup(copied)
    assert synced == [(copied.parent, True)]


async def test_a_backup_is_a_data_directory_that_a_daemon_can_be_started_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()

    async def open_store() -> SqliteStore:
        return await SqliteStore.open(tmp_path / "data" / "forged.sqlite3")

    config = Config(data_dir=str(tmp_path / "data"), socket=str(tmp_path / "s.sock"), listen=())
    ports = Ports(SystemClock(), SystemNetwork(), os.getpid(), os.getuid(), open_store)
    copied = tmp_path / "backup.sqlite3"
    async with Daemon.running(config, ports), ForgedClient(f"unix://{config.socket}") as client:
        await client.create_job("kept", {"a": 1})
        size = await client.backup(str(copied))
        await client.create_job("later")
    assert copied.stat().st_size == size
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["forged.sqlite3"]

    async def open_copy() -> SqliteStore:
        return await SqliteStore.open(copied)

    ports = Ports(SystemClock(), SystemNetwork(), os.getpid(), os.getuid(), open_copy)
    async with Daemon.running(config, ports), ForgedClient(f"unix://{config.socket}") as client:
        assert [job.name for job in await client.jobs()] == ["kept"]


async def test_a_store_that_is_no_file_says_that_it_has_no_backup(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        with pytest.raises(RequestRefused) as refused:
            await client.backup(tmp_path / "copy")
    assert refused.value.code == "backup_impossible"


class FakeClock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


OPERATOR = Principal("unix:0", Role.OPERATOR)


async def test_ticket_of_another_principal_is_refused_and_stays_valid(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"abcdef"))
        tokens = [await client.create_token(name, Role.VIEWER) for name in ("asks", "steals")]
        asks, steals = (ForgedClient(daemon_runner.endpoints["tcp"], token=token) for token in tokens)
        async with asks, steals:
            ticket = await asks.request(AskForTicket())
            for thief in (steals, client):
                with pytest.raises(PeerError) as refused:
                    await thief.fetch_bytes(ticket)
                assert refused.value.code == "ticket_unknown"
            assert await asks.fetch_bytes(ticket) == b"abcdef"


def test_unused_ticket_expires_and_closes_its_offer() -> None:
    clock, closed = FakeClock(), []
    tickets = TicketRegistry(clock, os.urandom)
    ticket = tickets.issue(
        side_connection.BulkTransfer(1, lambda sock, offset: None, lambda: closed.append(1)), OPERATOR, ttl_s=5.0
    )
    clock.now += 5.0
    with pytest.raises(PeerError):
        tickets.redeem(ticket.ticket, OPERATOR, 0)
    assert closed == [1]


def test_tickets_are_limited_and_one_too_many_lets_go_of_its_offer() -> None:
    closed: list[int] = []
    tickets = TicketRegistry(FakeClock(), os.urandom, tickets_max=1)
    tickets.issue(side_connection.BulkTransfer(1, lambda sock, offset: None), OPERATOR)
    with pytest.raises(Unavailable) as full:
        tickets.issue(side_connection.BulkTransfer(1, lambda sock, offset: None, lambda: closed.append(1)), OPERATOR)
    assert full.value.code == "tickets_full"
    assert closed == [1]


async def test_a_side_connection_is_as_the_protocol_page_says(tmp_path: Path) -> None:
    async with ticket_daemon(tmp_path) as daemon_runner, client_of(daemon_runner) as client:
        daemon_runner.offer = side_connection.buffer_sender(memoryview(b"abcdef"))
        ticket = await client.request(AskForTicket())
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s.sock"))
        hello = msgpack.packb([0, 1, 1, b"x" * 16, "a test", None, ticket.ticket, 2])
        writer.write(struct.pack(">I", len(hello)) + hello)
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        welcome = msgpack.unpackb(await reader.readexactly(length))
        assert (welcome[0], welcome[3], welcome[10]) == (1, "", 6)
        writer.write(b"\x01")
        assert await reader.readexactly(4) == b"cdef"
        writer.write(struct.pack(">Q", 4))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
