from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from forged.errors import ConfigError, Unavailable
from forged.net.transport import tcp
from forged.net.transport.port import Address
from forged.net.transport.tcp import EXTENDED_USER_TIMEOUT_S, Liveness, UserTimeout, is_unread

BACKLOG = 4
PIECE_BYTES = 64 << 10
HELD_S = 4.0
LOOK_INTERVAL_S = 1.0
ESTABLISHED = 1
"""The state in the first byte of `struct tcp_info`."""


async def test_a_host_with_several_addresses_listens_at_one_port_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.2", "127.0.0.3")
    sockets = await tcp.listen(Address("tcp", host="several"), BACKLOG, Liveness())
    names = [sock.getsockname() for sock in sockets]
    for sock in sockets:
        sock.close()
    assert [host for host, _ in names] == ["127.0.0.2", "127.0.0.3"]
    assert names[0][1] == names[1][1] != 0


async def test_an_address_listed_twice_is_listened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.2", "127.0.0.2")
    [sock] = await tcp.listen(Address("tcp", host="twice"), BACKLOG, Liveness())
    sock.close()


async def test_an_address_of_a_family_that_is_switched_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "192.0.2.1", "127.0.0.2")
    [sock] = await tcp.listen(Address("tcp", host="half"), BACKLOG, Liveness())
    with sock:
        assert sock.getsockname()[0] == "127.0.0.2"


async def test_an_address_that_the_machine_does_not_have_yet_is_unavailable() -> None:
    with pytest.raises(Unavailable) as raised:
        await tcp.listen(Address("tcp", host="192.0.2.1"), BACKLOG, Liveness())
    assert raised.value.code == "address_not_available"


async def test_a_name_to_listen_at_that_is_unknown_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as raised:
        await tcp.listen(Address("tcp", host="host.invalid"), BACKLOG, Liveness())
    assert raised.value.code == "host_not_found"


async def test_a_port_that_is_not_permitted_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_sock: socket.socket, _where: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError) as raised:
        await tcp.listen(Address("tcp", host="127.0.0.1", port=80), BACKLOG, Liveness())
    assert raised.value.code == "address_not_permitted"


async def test_an_address_in_use_closes_those_already_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        resolve(monkeypatch, "127.0.0.2", "127.0.0.3")
        with pytest.raises(ConfigError, match=str(port)) as raised:
            await tcp.listen(Address("tcp", host="several", port=port), BACKLOG, Liveness())
    assert raised.value.code == "address_in_use"
    socket.create_server(("127.0.0.2", port)).close()


async def test_a_dial_goes_on_to_the_address_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.3", 0)) as listener:
        resolve(monkeypatch, "127.0.0.2", "127.0.0.3")
        where = Address("tcp", host="several", port=listener.getsockname()[1])
        with await tcp.dial(where, Liveness()) as sock:
            assert sock.getpeername() == listener.getsockname()


async def test_failed_connect_raises_the_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.3", 0))
        resolve(monkeypatch, "127.0.0.2", "127.0.0.3")
        with pytest.raises(ConnectionRefusedError):
            await tcp.dial(Address("tcp", host="several", port=bound.getsockname()[1]), Liveness())


async def test_a_port_is_free_again_at_once_after_its_connections_were_closed_here() -> None:
    [sock] = await tcp.listen(Address("tcp", host="127.0.0.1"), BACKLOG, Liveness())
    with sock, socket.create_connection(sock.getsockname()):
        port = sock.getsockname()[1]
        sock.accept()[0].close()
    [again] = await tcp.listen(Address("tcp", host="127.0.0.1", port=port), BACKLOG, Liveness())
    again.close()


def resolve(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Resolve every name to these addresses."""

    def getaddrinfo(_host: str, port: int, **_options: Any) -> list[tcp.AddressInfo]:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@contextmanager
def unread(liveness: Liveness) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection with a full window to a peer that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as near:
        for sock in (listener, near):
            liveness.apply(sock)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            near.settimeout(0)
            while not is_unread(near):
                with suppress(BlockingIOError):
                    near.send(bytes(PIECE_BYTES))
            yield near, far


def user_timeout_s(sock: socket.socket) -> float:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000


def test_a_connection_is_unread_only_while_its_window_is_full() -> None:
    with unread(Liveness()) as (near, far):
        assert is_unread(near)
        far.settimeout(0)
        while is_unread(near):
            with suppress(BlockingIOError):
                far.recv(PIECE_BYTES)
        assert not is_unread(far)


def test_user_timeout_is_long_while_the_peer_does_not_read_and_normal_otherwise() -> None:
    with unread(Liveness()) as (near, far):
        user_timeout, other = UserTimeout(near), UserTimeout(far)
        assert not user_timeout.update(), "bytes are in flight"
        assert other.update(), "it has sent nothing"
        assert (user_timeout_s(near), user_timeout_s(far)) == (EXTENDED_USER_TIMEOUT_S, Liveness().user_timeout_s)
        far.settimeout(0)
        while is_unread(near):
            with suppress(BlockingIOError):
                far.recv(PIECE_BYTES)
        user_timeout.update()
        assert user_timeout_s(near) == Liveness().user_timeout_s


def test_connection_without_user_timeout_gets_none() -> None:
    with unread(Liveness(user_timeout_s=0)) as (near, _):
        UserTimeout(near).update()
        assert user_timeout_s(near) == 0


def test_peer_that_reads_nothing_for_four_seconds_is_kept_only_with_timeout_adjustment() -> None:
    with unread(Liveness()) as (kept, slow), unread(Liveness()) as (lost, _):
        user_timeout = UserTimeout(kept)
        ended = select.poll()
        for sock in (kept, lost):
            ended.register(sock, 0)  # errors and hang-ups are always reported
        began = time.monotonic()
        gone = set()
        while (left_s := began + HELD_S - time.monotonic()) > 0:
            user_timeout.update()
            for descriptor, _ in ended.poll(min(left_s, LOOK_INTERVAL_S) * 1000):
                gone.add(descriptor)
                ended.unregister(descriptor)
        assert gone == {lost.fileno()}
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        assert slow.recv(1) == b"\0"
