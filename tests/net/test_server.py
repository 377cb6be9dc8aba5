from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forged.auth.model import Role
from forged.client import ForgedClient
from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Call, Request
from forged.kernel.pending import Pending
from forged.kernel.store.memory import MemoryStore
from forged.net.admission import OPERATOR_RESERVE, SILENT_MIN_S
from forged.net.server import Server
from forged.net.session import Session
from forged.net.transport.port import Address, Peer
from forged.net.transport.sockets import SystemNetwork
from tests.net.manual_daemon import (
    BYE,
    FACTS,
    FAILURE,
    OPERATOR,
    REPLY,
    REQUEST,
    SUBSCRIBE,
    UNSUBSCRIBE,
    WORKER,
    ManualClient,
    ManualDaemon,
    frame,
    in_one_task,
    manual_daemon,
    until,
)

USER = Peer("unix", "pid 7", uid=1000)


class AskBack(Request[str], frozen=True):
    """The handler sends a request to the caller."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    word: str


class EchoWord(Request[str], frozen=True):
    """A request from the daemon to a client."""

    word: str


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[ManualDaemon]:
    async with manual_daemon(tmp_path) as made:
        yield made


def client_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def session_of(server: Server, client: bytes) -> Session | None:
    """The client's latest session."""
    return server._by_client.get(client)


def subscribe(client: ManualClient, stream: int = 1, since: int | None = -1) -> None:
    client.send(SUBSCRIBE, stream, since, "", [], [], 60_000)


# Connection limits.


async def test_connection_over_the_limit_is_refused_and_existing_clients_are_served(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=2) as here:
        first, second = [await here.greeted(WORKER, client_id(number)) for number in (1, 2)]
        third = here.client(WORKER)
        third.hello(client_id(3))
        assert (await third.next())[1:4] == [0, "unavailable", "too_many_connections"]
        await third.lost()
        assert await here.ask(first, "PingDaemon") == {}
        second.send(BYE, 0)
        await second.lost()
        await here.greeted(WORKER, client_id(3))


async def refused_at_hello(here: ManualDaemon, peer: Peer = OPERATOR, token: str | None = None) -> str:
    """The code of the failure that a new client gets."""
    client = here.client(peer)
    client.hello(client_id(99), token)
    code: str = (await client.next(FAILURE))[3]
    return code


async def test_operators_have_a_few_connections_over_the_limit(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=2) as here:
        for number in range(2 + OPERATOR_RESERVE):
            await here.greeted(client=client_id(number))
        for peer in (WORKER, OPERATOR):
            assert await refused_at_hello(here, peer) == "too_many_connections"


async def test_other_users_of_the_unix_socket_do_not_use_the_reserve_of_operators(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=2, unix_other_role="worker") as here:
        for number in range(2):
            await here.greeted(USER, client_id(number))
        assert await refused_at_hello(here, USER) == "too_many_connections"
        await here.greeted(OPERATOR, client_id(3))


async def test_principal_below_its_share_displaces_the_newest_connections_of_the_largest(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=4, unix_other_role="worker") as here:
        many = [await here.greeted(WORKER, client_id(number)) for number in range(4)]
        for number in (5, 6):
            await here.greeted(USER, client_id(number))
        await until(lambda: [client.transport.gone for client in many] == [False, False, True, True])
        assert (await many[3].next(FAILURE))[3] == "too_many_connections"
        assert await refused_at_hello(here, USER) == "too_many_connections"
        assert await here.ask(many[0], "PingDaemon") == {}


async def test_silent_connections_of_one_address_leave_room_for_another_and_for_operators(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, handshakes_max=4, unix_other_role="worker") as here:
        silent = [here.client(WORKER) for _ in range(4)]
        assert (await here.client(WORKER).next(FAILURE))[3] == "too_many_connections"
        await here.greeted(OPERATOR, client_id(1))
        await here.greeted(USER, client_id(2))
        assert (await silent[0].next(FAILURE))[3] == "too_many_connections"
        assert not silent[1].transport.gone


async def test_old_silent_connection_gives_way_to_a_new_one_of_its_address(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, handshakes_max=2) as here:
        silent = [here.client(WORKER) for _ in range(2)]
        here.clock.now += SILENT_MIN_S
        await here.greeted(WORKER, client_id(1))
        assert (await silent[0].next(FAILURE))[3] == "too_many_connections"
        assert not silent[1].transport.gone


async def test_many_simultaneous_connections_over_the_limit_leave_no_session(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=3) as here:
        for _ in range(200):
            here.client(WORKER)
        here.sweep(5.1)
        await until(lambda: not here.server.sessions)
        await here.serves_new_clients()


async def test_a_handshake_that_never_ends_does_not_take_up_room_for_ever(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=1) as here:
        protocol = here.network.accept()
        assert len(here.server.sessions) == 1
        here.sweep(5.1)
        assert here.server.sessions == {}
        late = ManualClient(protocol)
        assert late.transport.aborted
        await late.lost()
        await here.greeted(WORKER)


async def test_a_handshake_that_has_failed_takes_up_no_room(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=1) as here:
        protocol = here.network.accept()
        protocol.connection_lost(ConnectionResetError())
        assert here.server.sessions == {}
        await here.greeted(WORKER)


async def test_unfinished_handshakes_do_not_block_new_clients(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, connections_max=2) as here:
        for _ in range(100):
            here.network.accept()
        for number in (1, 2):
            await here.greeted(WORKER, client_id(number))
        assert await refused_at_hello(here, WORKER) == "too_many_connections"
        await here.greeted(client=client_id(3))


async def test_ended_session_is_not_referenced(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client)
    await client.next(FACTS)
    client.transport.abort()
    await client.lost()
    server = here.server
    assert not server.sessions
    assert not server._table._holders
    assert not server.streaming
    assert not server._due
    assert session_of(server, client_id(1)) is None


async def test_an_idle_connection_costs_little_memory(here: ManualDaemon) -> None:
    await here.greeted()
    tracemalloc.start()
    try:
        for number in range(200):
            client = await here.greeted(WORKER, client_id(number))
            client.transport.written.clear()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / 200 < 16 << 10, "the hands of the test included"


# Sessions by client id.


async def test_a_session_is_found_by_its_client_s_id(here: ManualDaemon) -> None:
    client = await here.greeted(client=client_id(7))
    session = session_of(here.server, client_id(7))
    assert session is not None
    assert session.client == client_id(7)
    assert session_of(here.server, client_id(8)) is None
    client.send(BYE, 0)
    await client.lost()
    assert session_of(here.server, client_id(7)) is None


async def test_lookup_by_client_id_returns_the_latest_session(here: ManualDaemon) -> None:
    old = await here.greeted(client=client_id(7))
    before = session_of(here.server, client_id(7))
    new = await here.greeted(client=client_id(7))
    after = session_of(here.server, client_id(7))
    assert after is not before
    old.transport.abort()
    await old.lost()
    assert session_of(here.server, client_id(7)) is after
    new.transport.abort()
    await new.lost()
    assert session_of(here.server, client_id(7)) is None


# Streams in turn.


async def test_an_idle_connection_is_not_looked_at_when_facts_come(
    here: ManualDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, reader = await here.greeted(client=client_id(1)), await here.greeted(client=client_id(2))
    subscribe(reader, since=None)
    subscribe(idle, since=None)
    await reader.next(FACTS)
    await idle.next(FACTS)
    idle.send(UNSUBSCRIBE, 1)
    pumped: list[bytes] = []

    def pump(session: Session) -> bool:
        pumped.append(session.client)
        return False

    monkeypatch.setattr(Session, "pump", pump)
    await here.ask(reader, "CreateJob", job="a")
    await until(lambda: bool(pumped))
    assert set(pumped) == {client_id(2)}


async def test_stream_far_behind_does_not_delay_another(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path) as here:
        writer = await here.greeted(client=client_id(1))
        await here.ask(writer, "CreateJob", job="a")
        note = {"job": "a", "text": "x"}
        for first in range(2, 3002, 500):
            notes = [[REQUEST, number, first - 1, "AddNote", note] for number in range(first, first + 500)]
            writer.send_bytes(b"".join(map(frame, notes)))
            answers = [await writer.next(REPLY) for _ in notes]
            assert len(answers) == 500
        slow, fresh = await here.greeted(client=client_id(2)), await here.greeted(client=client_id(3))
        subscribe(slow, since=-1)
        subscribe(fresh, since=here.daemon.journal.last - 1)
        while not (await fresh.next(FACTS))[3]:
            """The first message is the start position."""
        assert sum(len(message[3]) for message in slow.heard() if message[0] == FACTS) < 3000


# Requests in turn.


async def test_waiting_requests_resume_in_order_of_waiting_time(
    here: ManualDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = here.daemon.bus.dispatcher
    clients = [await here.greeted(WORKER, client_id(number)) for number in range(3)]
    served: list[bytes] = []
    submit = desk.submit

    def one_at_a_time(request: Request[Any], call: Call) -> Any:
        served.append(call.client)
        desk.in_flight = 1_000_000
        return submit(request, call)

    monkeypatch.setattr(desk, "submit", one_at_a_time)
    for client in clients:
        client.send_bytes(b"".join(frame([REQUEST, number, 0, "PingDaemon", {}]) for number in (1, 2, 3)))

    def free_again() -> bool:
        desk.in_flight = 0
        return len(served) == 9

    await until(free_again)
    # The first client waited before the later ones came.
    assert served == [client_id(number) for number in (0, 0, 1, 2, 0, 1, 2, 1, 2)]


async def test_requests_in_flight_of_one_principal_leave_room_for_others(tmp_path: Path) -> None:
    async with manual_daemon(tmp_path, unix_other_role="worker") as here:
        here.server.requests.resize(8, 2, 3)
        for number in (1, 2):
            await here.ask(await here.greeted(client=client_id(number)), "CreateJob", job="ab"[number - 1])
        clients = [await here.greeted(peer, client_id(9 + place)) for place, peer in enumerate((WORKER, WORKER, USER))]
        for client in clients:
            notes = [[REQUEST, number, 0, "AddNote", {"job": "a", "text": "x"}] for number in range(1, 11)]
            client.send_bytes(b"".join(map(frame, notes)))
        in_flight = {session.client: session.in_flight for session in here.server.sessions}
        assert [in_flight[client_id(9 + place)] for place in range(3)] == [3, 0, 3]
        for client in clients:
            assert sorted([(await client.next(REPLY))[1] for _ in range(10)]) == list(range(1, 11))
        assert here.server.requests.used == 0


async def test_requests_in_flight_of_a_lost_connection_are_returned(here: ManualDaemon) -> None:
    await here.ask(await here.greeted(), "CreateJob", job="a")
    client = await here.greeted(WORKER, client_id(9))
    client.send_bytes(b"".join(frame([REQUEST, 1 + n, 0, "AddNote", {"job": "a", "text": "x"}]) for n in range(5)))
    assert here.server.requests.used == 5
    client.transport.abort()
    await client.lost()
    await until(lambda: here.server.requests.used == here.server.memory.used == 0)


# Stopping.


async def test_all_clients_get_goodbye_with_a_reason_at_the_stop(here: ManualDaemon) -> None:
    clients = [await here.greeted(client=client_id(number)) for number in range(3)]
    await here.server.close_sessions(1.0)
    for client in clients:
        assert (await client.next(BYE))[1:] == [0, "the daemon is stopping"]
        assert client.transport.gone
    assert not here.server.sessions


async def test_connection_accepted_during_the_stop_is_refused(here: ManualDaemon) -> None:
    await here.server.close_sessions(1.0)
    late = here.client()
    assert (await late.next(FAILURE))[3] == "stopping"
    await late.lost()
    assert not here.server.sessions


async def test_the_last_facts_leave_before_the_goodbye(here: ManualDaemon) -> None:
    client = await here.greeted()
    subscribe(client)
    await here.server.close_sessions(1.0)
    kinds = [message[0] for message in client.heard()]
    assert kinds == [FACTS, FACTS, BYE]


async def test_client_that_does_not_read_the_goodbye_is_disconnected(here: ManualDaemon) -> None:
    client = await here.greeted()
    client.transport.stop_reading()
    client.request(1, "PingDaemon")
    await here.server.close_sessions(0.01)
    assert client.transport.aborted
    await client.lost()


async def test_server_that_stops_admitting_reads_no_more_and_answers_running_requests(
    here: ManualDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await here.greeted()
    begun: list[Pending] = []

    def begin(request: Request[Any], call: Call) -> Pending:
        begun.append(Pending(0))
        return begun[-1]

    monkeypatch.setattr(here.daemon.bus, "submit", begin)
    client.request(1, "PingDaemon")
    here.server.stop_admitting()
    assert not client.transport.reading
    # In the kernel buffer when reading stopped.
    client.protocol.data_received(frame([REQUEST, 2, 0, "PingDaemon", {}]))
    begun[0].resolve()
    assert (await client.next())[:2] == [REPLY, 1]
    assert len(begun) == 1
    assert not client.transport.reading


async def test_client_without_hello_is_not_welcomed_during_the_stop(here: ManualDaemon) -> None:
    client = here.client()
    here.server.stop_admitting()
    assert not client.transport.reading
    await here.server.close_sessions(1.0)
    assert client.transport.gone
    late = here.client()
    assert (await late.next(FAILURE))[3] == "stopping"


# Over real connections.

Answer = Callable[[EchoWord], Any]


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    def extend(made: Daemon) -> None:
        async def ask_back(request: AskBack, call: Call) -> str:
            session = session_of(made.server, call.client)
            if session is None:
                raise Unavailable("client_gone", "the caller is gone")
            return await session.request(EchoWord(request.word), 5.0)

        made.bus.serve(AskBack, ask_back, owner="test")

    async def open_store() -> MemoryStore:
        return MemoryStore("history-1")

    config = Config(data_dir=str(tmp_path), socket=str(tmp_path / "s"), listen=("tcp://127.0.0.1:0",))
    ports = Ports(SystemClock(), SystemNetwork(), 1, 0, open_store)
    async with in_one_task(Daemon.running(config, ports, extend=extend)) as made:
        yield made


async def test_the_daemon_asks_the_client_that_asks_it_over_the_same_connection(daemon: Daemon) -> None:
    async def echo(request: EchoWord) -> str:
        return request.word.upper()

    for endpoint in (f"unix://{daemon.config.socket}", *daemon.listening):
        async with ForgedClient(endpoint) as client:
            client.serve(EchoWord, echo)
            words = [f"word-{number}" for number in range(20)]
            assert await asyncio.gather(*(client.request(AskBack(word)) for word in words)) == [
                word.upper() for word in words
            ]


async def test_a_client_that_serves_nothing_refuses(daemon: Daemon) -> None:
    async with ForgedClient(*daemon.listening) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.request(AskBack("hi"))
        assert caught.value.code == "request_unknown"


async def test_refusal_of_a_client_reaches_the_caller_unchanged(daemon: Daemon) -> None:
    async def refuse(request: EchoWord) -> str:
        raise RequestRefused("not_today", f"no {request.word} today", "come tomorrow")

    async with ForgedClient(*daemon.listening) as client:
        client.serve(EchoWord, refuse)
        with pytest.raises(RequestRefused) as caught:
            await client.request(AskBack("bread"))
        assert (caught.value.code, caught.value.fix) == ("not_today", "come tomorrow")


async def test_listening_addresses_show_the_assigned_port(daemon: Daemon) -> None:
    socket, tcp = daemon.server.addresses
    assert socket == Address("unix", path=daemon.config.socket)
    assert (tcp.scheme, tcp.host) == ("tcp", "127.0.0.1")
    assert tcp.port != 0


async def test_connected_clients_are_served_after_the_listeners_are_closed(daemon: Daemon) -> None:
    (endpoint,) = daemon.listening
    async with ForgedClient(endpoint) as client:
        await daemon.server.stop_listening()
        assert daemon.server.addresses == []
        await client.ping()
        with pytest.raises(Unavailable):
            async with ForgedClient(endpoint, connect_timeout_s=0.05):
                pass
