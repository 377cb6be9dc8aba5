"""TLS servers with silent clients."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from forged.net.transport import sockets, tls_server
from forged.net.transport.port import Address, Listener
from forged.net.transport.sockets import SystemNetwork
from tests.net.recording_connections import Certificates, RecordingConnections, RecordingProtocol

LOCALHOST = Address("tls", host="127.0.0.1")
PLAIN = Address("tcp", host="127.0.0.1")
HANDSHAKES_MAX = 2
"""Of one address; the limit is twice that."""
LONG_S = 1000.0


class Exhausted(socket.socket):
    """A listening socket whose first `accept` fails with EMFILE."""

    refusals = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
def network(certificates: Certificates) -> SystemNetwork:
    return SystemNetwork(
        tls_server=certificates.server(), tls_client=certificates.client(), handshakes_max=2 * HANDSHAKES_MAX
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handshake is closed for another."""
    monkeypatch.setattr(tls_server, "HANDSHAKE_MIN_S", LONG_S)


@pytest.fixture
async def reported() -> list[dict[str, Any]]:
    """The contexts of the event loop's exception handler."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    return heard


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def silent(network: SystemNetwork, listener: Listener, connections: RecordingConnections) -> RecordingProtocol:
    """A client that connects and sends nothing."""
    end = connections.near()
    await network.connect(Address("tcp", host="127.0.0.1", port=listener.address.port), lambda: end)
    return end


async def crowd(
    network: SystemNetwork, listener: Listener, connections: RecordingConnections
) -> list[RecordingProtocol]:
    """The maximum number of silent clients of one address, all with a handshake in progress."""
    those = [await silent(network, listener, connections) for _ in range(HANDSHAKES_MAX)]
    for _ in those:
        await connections.accepted.get()
    return those


async def serves(network: SystemNetwork, listener: Listener, connections: RecordingConnections) -> bool:
    near, far = await connections.connect(network, listener.address)
    near.open_transport.write(b"hello")
    await far.hear(b"hello")
    return True


@pytest.mark.usefixtures("patient")
async def test_handshakes_are_limited_per_listener(network: SystemNetwork, connections: RecordingConnections) -> None:
    crowded, plain = await connections.listen(network, LOCALHOST), await connections.listen(network, PLAIN)
    await crowd(network, crowded, connections)
    waiting = [await silent(network, crowded, connections) for _ in range(20)]
    for _ in range(3):
        assert await serves(network, plain, connections)
    assert connections.accepted.empty()
    assert not any(end.lost.done() for end in waiting)


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients on this host count by their address, like those of other hosts."""
    monkeypatch.setattr(sockets, "owner_uid", lambda sock: None)


async def silent_at(host: str, listener: Listener) -> socket.socket:
    """A client at this address of the loopback network that connects and sends nothing."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((host, 0))
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", listener.address.port))
    return sock


async def is_closed(sock: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.usefixtures("patient", "by_address")
async def test_handshakes_of_one_address_leave_half_of_the_places_to_others(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, LOCALHOST)
    with ExitStack() as crowd:
        for _ in range(20):
            crowd.enter_context(await silent_at("127.0.0.2", listener))
        for _ in range(HANDSHAKES_MAX):
            await connections.accepted.get()
        for _ in range(3):
            assert await serves(network, listener, connections)
        assert connections.accepted.empty()


@pytest.mark.usefixtures("by_address")
async def test_free_place_goes_to_the_waiting_address_with_the_fewest_handshakes(
    network: SystemNetwork, connections: RecordingConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "HANDSHAKE_MIN_S", 0.0)
    listener = await connections.listen(network, LOCALHOST)
    with ExitStack() as crowd:
        for host in ("127.0.0.2", "127.0.0.3"):
            for _ in range(20):
                crowd.enter_context(await silent_at(host, listener))
        near = connections.near()
        await network.connect(listener.address, lambda: near)


@pytest.mark.usefixtures("patient", "by_address")
async def test_waiting_connections_of_one_address_beyond_half_of_the_limit_are_closed(
    network: SystemNetwork, connections: RecordingConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "WAITING_MAX", 6)
    listener = await connections.listen(network, LOCALHOST)
    with ExitStack() as crowd:
        of_one = [crowd.enter_context(await silent_at("127.0.0.2", listener)) for _ in range(HANDSHAKES_MAX + 3 + 1)]
        assert await is_closed(of_one[-1])
        for _ in range(HANDSHAKES_MAX):
            await connections.accepted.get()
        of_another = [crowd.enter_context(await silent_at("127.0.0.3", listener)) for _ in range(HANDSHAKES_MAX + 3)]
        third = crowd.enter_context(await silent_at("127.0.0.4", listener))
        assert await is_closed(of_one[HANDSHAKES_MAX])
        await listener.close()
        for sock in (of_one[-2], of_another[-1], third):
            assert await is_closed(sock)


@pytest.mark.usefixtures("patient")
async def test_disconnecting_client_frees_its_handshake_slot(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, LOCALHOST)
    first, second = await crowd(network, listener, connections)
    first.open_transport.abort()
    assert await serves(network, listener, connections)
    assert not second.lost.done()


@pytest.mark.usefixtures("patient")
async def test_timed_out_handshake_frees_its_slot(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    network = SystemNetwork(
        tls_server=certificates.server(),
        tls_client=certificates.client(),
        handshakes_max=2 * HANDSHAKES_MAX,
        tls_handshake_timeout_s=0.2,
    )
    listener = await connections.listen(network, LOCALHOST)
    those = await crowd(network, listener, connections)
    assert await serves(network, listener, connections)
    assert await asyncio.shield(those[0].lost) is None


async def test_oldest_handshake_is_closed_after_its_minimum_time_when_slots_are_full(
    network: SystemNetwork, connections: RecordingConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "HANDSHAKE_MIN_S", 0.05)
    listener = await connections.listen(network, LOCALHOST)
    oldest, _ = await crowd(network, listener, connections)
    assert await serves(network, listener, connections)
    assert await asyncio.shield(oldest.lost) is None


async def test_silent_clients_only_delay_later_clients(
    network: SystemNetwork, connections: RecordingConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "HANDSHAKE_MIN_S", 0.0)
    listener = await connections.listen(network, LOCALHOST)
    for _ in range(50):
        await silent(network, listener, connections)
    near = connections.near()
    await network.connect(listener.address, lambda: near)
    near.open_transport.write(b"here I am")
    far = [await connections.accepted.get() for _ in range(51)][-1]
    await far.hear(b"here I am")


async def test_no_handshake_is_closed_early_while_slots_are_free(
    network: SystemNetwork, connections: RecordingConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "HANDSHAKE_MIN_S", 0.0)
    listener = await connections.listen(network, LOCALHOST)
    slow = await silent(network, listener, connections)
    await connections.accepted.get()
    for _ in range(3):
        assert await serves(network, listener, connections)
    assert not slow.lost.done()


async def test_failed_handshake_reports_only_the_end(network: SystemNetwork, connections: RecordingConnections) -> None:
    listener = await connections.listen(network, LOCALHOST)
    near = await silent(network, listener, connections)
    far = await connections.accepted.get()
    near.open_transport.abort()
    assert isinstance(await asyncio.shield(far.lost), OSError)
    assert not far.made.is_set()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_fails_keeps_no_memory(
    network: SystemNetwork, connections: RecordingConnections, said: bytes
) -> None:
    listener = await connections.listen(network, LOCALHOST)
    before = sum(isinstance(each, SSLProtocol) for each in gc.get_objects())
    for _ in range(10):
        near = await silent(network, listener, connections)
        near.open_transport.write(said)
        near.open_transport.write_eof()
        await asyncio.shield((await connections.accepted.get()).lost)
        await asyncio.shield(near.lost)
    assert sum(isinstance(each, SSLProtocol) for each in gc.get_objects()) - before <= 1


async def test_listener_reports_descriptor_exhaustion_and_recovers(
    network: SystemNetwork,
    connections: RecordingConnections,
    reported: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_server, "ACCEPT_RETRY_S", 0.0)
    sock = Exhausted()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    listener = connections.keep(await network.listen_on(sock, connections.far, tls=True))
    assert await serves(network, listener, connections)
    assert [str(error["exception"]) for error in reported] == ["[Errno 24] Too many open files"]


@pytest.mark.usefixtures("patient")
async def test_closed_listener_stays_closed_when_a_slot_is_free(
    network: SystemNetwork, connections: RecordingConnections, reported: list[dict[str, Any]]
) -> None:
    listener = await connections.listen(network, LOCALHOST)
    those = await crowd(network, listener, connections)
    await listener.close()
    assert listener.descriptors() == []
    for end in those:
        end.open_transport.abort()
        await asyncio.shield(end.lost)
    assert await serves(network, await connections.listen(network, PLAIN), connections)
    assert reported == []


async def test_running_handshake_continues_after_the_listener_is_closed(
    certificates: Certificates, network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, LOCALHOST)
    near = connections.near()
    with socket.create_connection(("127.0.0.1", listener.address.port)) as sock:
        far = await connections.accepted.get()
        await listener.close()
        await asyncio.get_running_loop().create_connection(
            lambda: near, sock=sock, ssl=certificates.client(), server_hostname="127.0.0.1"
        )
        near.open_transport.write(b"hello")
        await far.hear(b"hello")
