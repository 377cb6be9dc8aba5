"""The connections of torch's process groups in one world, which are shut down when the world is over.

Gloo releases no rank that waits for a lost one: its `abort`, `shutdown` and `destroy_process_group` return, and the
collective waits until its timeout. A connection that is shut down ends the wait at both of its ends. A rank that makes
a group may also wait for a connection that a lost rank does not make any more, for five times the timeout; a connection
to its listening socket in the place of that rank, which is closed at once, ends this wait.

Invariants:
- Only connections of the world's groups and of its store are shut down: their own port, or that of the other end, is
  one at which a rank's groups listen. They are looked up when they are shut down, so no descriptor is stale.
- A group's listening socket is left alone: gloo aborts the process if that is shut down.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Address = tuple[str, int]

CONNECT_TIMEOUT_S = 0.2
"""How long a connection to a listening socket of this process may take."""
PAIR_BYTES = 8
"""What gloo sends first over a connection: the number of the pair of ranks, at the rank that accepts it."""
_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_MAPPED = "::ffff:"
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


class TcpSocket(NamedTuple):
    """A TCP socket of this process."""

    own: Address
    peer: Address | None
    """None for a socket that listens or is not connected."""
    listens: bool


class GroupSockets:
    """What is known of the sockets of one world's process groups.

    `made_before` are the listening sockets of the process before the first group was made.
    """

    def __init__(self, store: frozenset[Address], world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._made_before = {one.own for one in _tcp_sockets() if one.listens}
        self._peers: frozenset[Address] = frozenset()
        """Where the groups of the other ranks listen."""

    def listeners(self) -> list[Address]:
        """Where this rank's groups listen."""
        return sorted({one.own for one in _tcp_sockets() if one.listens} - self._made_before)

    def learn(self, peers: Iterable[Address]) -> None:
        """The groups of the other ranks listen at these addresses."""
        self._peers = frozenset(peers)

    def shut_down(self) -> int:
        """Shut down all connections of the groups and of the store's client; returns how many there were."""
        own = {port for _, port in self.listeners()}
        count = 0
        for end in _open_sockets():
            with end, contextlib.suppress(OSError):
                one = _described(end)
                if one.peer is not None and self._is_of_the_world(one.own, one.peer, own):
                    end.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def release_maker(self) -> None:
        """Release this rank from waiting, while it makes a group, for the connections of lost ranks."""
        for listener in self.listeners():
            with contextlib.suppress(OSError):
                for pair in range(self._world_size):
                    with socket.create_connection(listener, CONNECT_TIMEOUT_S) as end:
                        end.sendall(pair.to_bytes(PAIR_BYTES, sys.byteorder))

    def _is_of_the_world(self, own: Address, peer: Address, own_listeners: set[int]) -> bool:
        return own[1] in own_listeners or peer in self._peers or peer in self._store


def addresses_of(host: str, port: int) -> frozenset[Address]:
    """The addresses at which a connection to this host and port may be."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset((str(address[0]), port) for *_, address in found)


def interface_of(host: str) -> str:
    """The network interface that has an address of this host; empty if this machine has none, or cannot tell."""
    with contextlib.suppress(OSError):
        addresses = {address for address, _ in addresses_of(host, 0)}
        for _, name in socket.if_nameindex():
            if addresses & _addresses_at(name):
                return name
    return ""


def _addresses_at(interface: str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.add(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _tcp_sockets() -> Iterator[TcpSocket]:
    for end in _open_sockets():
        with end, contextlib.suppress(OSError):
            yield _described(end)


def _open_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each as a duplicate: another thread may close the original at any moment."""
    for descriptor in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            end = socket.socket(fileno=os.dup(int(descriptor.name)))
            if end.family in _INTERNET and end.type == socket.SOCK_STREAM:
                yield end
            else:
                end.close()


def _described(end: socket.socket) -> TcpSocket:
    listens = bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    peer = None
    with contextlib.suppress(OSError):
        peer = _address(end.getpeername())
    return TcpSocket(_address(end.getsockname()), peer, listens)


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """An address as it is compared: an IPv4 address that is mapped into IPv6 is that IPv4 address."""
    return name[0].removeprefix(_MAPPED), name[1]
