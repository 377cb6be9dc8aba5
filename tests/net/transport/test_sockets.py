from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from forged.errors import ConfigError, Unavailable
from forged.net.transport import tcp
from forged.net.transport.port import Address, Peer, Scheme
from forged.net.transport.sockets import SystemNetwork
from forged.net.transport.tcp import Liveness
from tests.net.recording_connections import Certificates, RecordingConnections

ANY_PORT = Address("tcp", host="127.0.0.1")


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def network(certificates: Certificates) -> SystemNetwork:
    return SystemNetwork(tls_server=certificates.server(), tls_client=certificates.client())


@pytest.fixture(params=["unix", "tcp", "tls"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    scheme: Scheme = request.param
    return Address("unix", path=str(tmp_path / "socket")) if scheme == "unix" else Address(scheme, host="127.0.0.1")


@pytest.fixture
def full_tcp() -> Iterator[Address]:
    """A listener with a full queue."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname()):
            yield Address("tcp", host="127.0.0.1", port=listener.getsockname()[1])


@pytest.fixture
def full_unix(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(tmp_path / "full"))
        listener.listen(0)
        waiting.connect(str(tmp_path / "full"))
        yield listener


async def test_bytes_travel_both_ways(
    network: SystemNetwork, address: Address, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, address)
    near, far = await connections.connect(network, listener.address)
    near.open_transport.write(b"there")
    await far.hear(b"there")
    far.open_transport.write(b"and back")
    await near.hear(b"and back")


async def test_port_0_becomes_the_port_that_was_given(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, ANY_PORT)
    assert listener.address.host == "127.0.0.1"
    assert listener.address.port != 0


async def test_unix_listener_has_the_requested_path(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    address = Address("unix", path=str(tmp_path / "socket"))
    assert (await connections.listen(network, address)).address == address


async def test_closing_a_listener_leaves_connections_standing(
    network: SystemNetwork, address: Address, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, address)
    near, far = await connections.connect(network, listener.address)
    await listener.close()
    near.open_transport.write(b"still here")
    await far.hear(b"still here")


async def test_closed_listener_refuses_connections(
    network: SystemNetwork, address: Address, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, address)
    await listener.close()
    with pytest.raises(Unavailable) as raised:
        await network.connect(listener.address, connections.near)
    assert raised.value.code == ("no_socket" if address.scheme == "unix" else "connect_refused")


async def test_closing_a_listener_twice_changes_nothing(
    network: SystemNetwork, address: Address, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, address)
    await listener.close()
    await listener.close()


async def test_closing_does_not_remove_a_file_that_took_the_place(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    listener = await connections.listen(network, Address("unix", path=str(path)))
    path.unlink()
    path.write_text("other content")
    await listener.close()
    assert path.read_text() == "other content"


async def test_the_socket_mode_is_an_argument(connections: RecordingConnections, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    await connections.listen(SystemNetwork(socket_mode=0o600), Address("unix", path=str(path)))
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_port_in_use_is_a_config_error_that_names_the_address(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, ANY_PORT)
    with pytest.raises(ConfigError, match=str(listener.address)) as raised:
        await network.listen(listener.address, connections.far)
    assert raised.value.code == "address_in_use"


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_port_without_listener_is_connect_refused(
    network: SystemNetwork, connections: RecordingConnections, scheme: Scheme
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(Unavailable, match=str(bound.getsockname()[1])) as raised:
            await network.connect(Address(scheme, host="127.0.0.1", port=bound.getsockname()[1]), connections.near)
    assert raised.value.code == "connect_refused"
    assert "daemon or worker" in raised.value.fix, "either may be meant"


async def test_a_dead_unix_socket_is_connect_refused(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(Unavailable) as raised:
        await network.connect(Address("unix", path=str(tmp_path / "dead")), connections.near)
    assert raised.value.code == "connect_refused"


@pytest.mark.parametrize("path", ["missing", "missing/socket", "file/socket"])
async def test_no_file_at_the_path_is_no_socket(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path, path: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable) as raised:
        await network.connect(Address("unix", path=str(tmp_path / path)), connections.near)
    assert raised.value.code == "no_socket"


async def test_a_host_that_does_not_answer_is_connect_timeout(
    full_tcp: Address, connections: RecordingConnections
) -> None:
    with pytest.raises(Unavailable) as raised:
        await SystemNetwork(connect_timeout_s=0.05).connect(full_tcp, connections.near)
    assert raised.value.code == "connect_timeout"


async def test_a_unix_listener_that_does_not_accept_is_connect_timeout(
    full_unix: socket.socket, connections: RecordingConnections
) -> None:
    with pytest.raises(Unavailable) as raised:
        await SystemNetwork(connect_timeout_s=0.05).connect(
            Address("unix", path=full_unix.getsockname()), connections.near
        )
    assert raised.value.code == "connect_timeout"


async def test_a_unix_connect_waits_for_room_in_the_queue(
    network: SystemNetwork, full_unix: socket.socket, connections: RecordingConnections
) -> None:
    near = connections.near()
    async with asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(network.connect(Address("unix", path=full_unix.getsockname()), lambda: near))
        await asyncio.sleep(0)
        assert not connecting.done()
        full_unix.accept()[0].close()
    with full_unix.accept()[0] as far:
        far.sendall(b"welcome")
        await near.hear(b"welcome")


async def test_a_tls_server_that_says_nothing_is_connect_timeout(
    certificates: Certificates, connections: RecordingConnections
) -> None:
    network = SystemNetwork(tls_client=certificates.client(), connect_timeout_s=0.05)
    listener = await connections.listen(network, ANY_PORT)
    with pytest.raises(Unavailable) as raised:
        await network.connect(Address("tls", host="127.0.0.1", port=listener.address.port), connections.near)
    assert raised.value.code == "connect_timeout"


async def test_a_server_that_hangs_up_during_the_handshake_is_connect_reset(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, ANY_PORT)

    async def hang_up() -> None:
        far = await connections.accepted.get()
        await far.made.wait()
        far.open_transport.abort()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hang_up())
        with pytest.raises(Unavailable) as raised:
            await network.connect(Address("tls", host="127.0.0.1", port=listener.address.port), connections.near)
    assert raised.value.code == "connect_reset"


@pytest.mark.parametrize("host", ["host.invalid", "no..name", "x" * 70])
async def test_a_name_without_an_address_is_host_not_found(
    network: SystemNetwork, connections: RecordingConnections, host: str
) -> None:
    with pytest.raises(Unavailable) as raised:
        await network.connect(Address("tcp", host=host, port=1), connections.near)
    assert raised.value.code == "host_not_found"


async def test_socket_without_permission_is_a_config_error(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_sock: socket.socket, _path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ConfigError) as raised:
        await network.connect(Address("unix", path=str(tmp_path / "socket")), connections.near)
    assert raised.value.code == "connect_not_permitted"


async def test_a_cancelled_connect_leaves_no_descriptor_behind(
    full_tcp: Address, connections: RecordingConnections
) -> None:
    before = open_descriptors()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await SystemNetwork().connect(full_tcp, connections.near)
    assert open_descriptors() == before


@pytest.mark.parametrize("verb", ["listen", "connect"])
async def test_tls_without_a_context_is_a_config_error(connections: RecordingConnections, verb: str) -> None:
    with pytest.raises(ConfigError) as raised:
        await getattr(SystemNetwork(), verb)(Address("tls", host="127.0.0.1"), connections.near)
    assert raised.value.code == "tls_not_configured"


async def test_an_adopted_tcp_socket_serves(network: SystemNetwork, connections: RecordingConnections) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    listener = connections.keep(await network.listen_on(sock, connections.far))
    assert listener.address == Address("tcp", host="127.0.0.1", port=sock.getsockname()[1])
    near, far = await connections.connect(network, listener.address)
    near.open_transport.write(b"hello")
    await far.hear(b"hello")


async def test_an_adopted_tcp_socket_can_speak_tls(network: SystemNetwork, connections: RecordingConnections) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    listener = connections.keep(await network.listen_on(sock, connections.far, tls=True))
    assert listener.address.scheme == "tls"
    near, far = await connections.connect(network, listener.address)
    near.open_transport.write(b"hello")
    await far.hear(b"hello")


async def test_the_file_of_an_adopted_unix_socket_stays(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "socket"))
    sock.listen()
    listener = connections.keep(await network.listen_on(sock, connections.far))
    assert listener.address == Address("unix", path=str(tmp_path / "socket"))
    await connections.connect(network, listener.address)
    await listener.close()
    assert (tmp_path / "socket").is_socket()


async def test_an_adopted_socket_is_not_inherited_by_children(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.set_inheritable(True)
    connections.keep(await network.listen_on(sock, connections.far))
    assert not sock.get_inheritable()


def datagrams() -> socket.socket:
    return socket.socket(type=socket.SOCK_DGRAM)


def packets() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind("")
    sock.listen()
    return sock


def connected() -> socket.socket:
    near, far = socket.socketpair()
    far.close()
    return near


@pytest.mark.parametrize("make", [datagrams, packets, connected, socket.socket])
async def test_a_socket_that_is_no_listening_stream_is_refused_and_stays_the_callers(
    network: SystemNetwork, connections: RecordingConnections, make: Any
) -> None:
    with make() as sock:
        with pytest.raises(ConfigError) as raised:
            await network.listen_on(sock, connections.far)
        assert raised.value.code == "socket_not_listening"
        assert sock.fileno() != -1


async def test_both_ends_of_a_tcp_connection_are_watched_over_by_the_kernel(connections: RecordingConnections) -> None:
    network = SystemNetwork(liveness=Liveness(3, 4, 5, user_timeout_s=6.5))
    listener = await connections.listen(network, ANY_PORT)
    for end in await connections.connect(network, listener.address):
        sock = end.open_transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [1, 3, 4, 5]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6500


async def test_unix_peers_are_identified_by_user(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    listener = await connections.listen(network, Address("unix", path=str(tmp_path / "socket")))
    for end in await connections.connect(network, listener.address):
        assert network.peer(end.open_transport) == Peer("unix", f"pid {os.getpid()}", uid=os.getuid())


async def test_a_unix_peer_that_is_gone_keeps_its_user(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    listener = await connections.listen(network, Address("unix", path=str(tmp_path / "socket")))
    near, far = await connections.connect(network, listener.address)
    near.open_transport.abort()
    assert network.peer(far.open_transport).uid == os.getuid()


async def test_a_closed_unix_transport_has_no_user(
    network: SystemNetwork, connections: RecordingConnections, tmp_path: Path
) -> None:
    listener = await connections.listen(network, Address("unix", path=str(tmp_path / "socket")))
    near, _ = await connections.connect(network, listener.address)
    near.open_transport.abort()
    await asyncio.shield(near.lost)
    assert network.peer(near.open_transport) == Peer("unix", "unknown")


async def test_a_tcp_peer_of_this_machine_is_on_loopback(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, ANY_PORT)
    near, far = await connections.connect(network, listener.address)
    port = near.open_transport.get_extra_info("sockname")[1]
    assert network.peer(far.open_transport) == Peer("tcp", f"127.0.0.1:{port}", loopback=True, uid=os.getuid())


class Remote:
    """A transport with a remote address."""

    def __init__(self, peername: tuple[Any, ...] | None) -> None:
        with socket.socket(socket.AF_INET6) as closed:
            self._extra = {"peername": peername, "socket": closed}

    def get_extra_info(self, name: str) -> Any:
        return self._extra.get(name)


@pytest.mark.parametrize(
    ("peername", "address", "loopback"),
    [
        (("192.0.2.7", 5), "192.0.2.7:5", False),
        (("127.8.9.1", 5), "127.8.9.1:5", True),
        (("::1", 5, 0, 0), "[::1]:5", True),
        (("::ffff:127.0.0.1", 5, 0, 0), "127.0.0.1:5", True),
        (("::ffff:192.0.2.7", 5, 0, 0), "192.0.2.7:5", False),
        (("fe80::1%eth0", 5, 0, 2), "[fe80::1%eth0]:5", False),
        (None, "unknown", False),
    ],
)
def test_loopback_is_recognised_by_address(
    network: SystemNetwork, peername: tuple[Any, ...] | None, address: str, loopback: bool
) -> None:
    transport = cast("asyncio.BaseTransport", Remote(peername))
    assert network.peer(transport) == Peer("tcp", address, loopback=loopback)


# Probes.


@pytest.mark.parametrize("seen_at", ["127.0.0.1:4000", "[::1]:4000", "pid 7"])
async def test_closed_port_of_the_host_that_the_peer_was_seen_at_refuses(network: SystemNetwork, seen_at: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        assert not await network.refuses(Address("tcp", host="127.0.0.1", port=port), seen_at)
    assert await network.refuses(Address("tcp", host="127.0.0.1", port=port), seen_at)
    assert await network.refuses(Address("tcp", host="localhost", port=port), seen_at)


@pytest.mark.parametrize("seen_at", ["192.0.2.7:4000", "[2001:db8::7]:4000", "unknown", ""])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_port_of_another_host_than_the_peer_s_is_not_asked(
    network: SystemNetwork, monkeypatch: pytest.MonkeyPatch, seen_at: str, host: str
) -> None:
    async def dial(info: Any, liveness: Liveness) -> socket.socket:
        raise AssertionError(info)

    monkeypatch.setattr(tcp, "_dial_one", dial)
    assert not await network.refuses(Address("tcp", host=host, port=1), seen_at)


async def test_host_name_that_does_not_resolve_refuses_nothing(network: SystemNetwork) -> None:
    assert not await network.refuses(Address("tcp", host="no host", port=1), "127.0.0.1:4000")


# Users of loopback connections.

OTHER_UID = 65534


@pytest.mark.parametrize(("scheme", "host"), [("tcp", "127.0.0.1"), ("tcp", "::1"), ("tls", "127.0.0.1")])
async def test_loopback_peer_has_the_uid_of_its_process(
    network: SystemNetwork, connections: RecordingConnections, scheme: Scheme, host: str
) -> None:
    listener = await connections.listen(network, Address(scheme, host=host))
    _, far = await connections.connect(network, listener.address)
    peer = network.peer(far.open_transport)
    assert (peer.loopback, peer.uid) == (True, os.getuid())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
async def test_loopback_peer_of_another_user_has_that_uid(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, ANY_PORT)
    os.seteuid(OTHER_UID)
    try:
        stranger = socket.socket()
    finally:
        os.seteuid(0)
    with stranger:
        stranger.connect((listener.address.host, listener.address.port))
        far = await connections.accepted.get()
        await far.made.wait()
        assert network.peer(far.open_transport).uid == OTHER_UID


async def test_peer_that_has_closed_its_end_has_no_uid(
    network: SystemNetwork, connections: RecordingConnections
) -> None:
    listener = await connections.listen(network, ANY_PORT)
    socket.create_connection((listener.address.host, listener.address.port)).close()
    far = await connections.accepted.get()
    await far.made.wait()
    assert network.peer(far.open_transport).uid is None
