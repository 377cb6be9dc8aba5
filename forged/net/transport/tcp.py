"""TCP sockets: where they listen, how they connect, and how the kernel watches over them.

Law: a host that is gone is found by the kernel. It says nothing, so the kernel is told to ask: by keepalive on idle
connections, by the user timeout on those with bytes under way. Measured between two network namespaces, with the
defaults: an idle connection is lost after 1.0 to 2.0 s, one with bytes under way after about 2.2 s. Bytes that are
sent into the silence, before keepalive has given up, start the user timeout then: up to 2 s more. So the daemon, whose
connections are idle mostly, should have lost a host before its peers complain of it and there is news to be sent; with
1.6 s for the user timeout the peers were first at times, and it took 3.9 s in all.

The kernel applies the user timeout also to a peer that lives and does not read, once its receive window is full, though
its host answers every probe: measured on Linux 6.18, such a connection is lost after 2.1 to 2.5 s. A process that holds
Python's lock, or is stopped, is such a peer. So `Patience` looks at the connection now and then, and lengthens the user
timeout for as long as the host answers and the window is full. The movers of bulk bytes set their own.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from forged.errors import ConfigError, ForgedError, Unavailable
from forged.net.transport.port import Address

UNAVAILABLE_FAMILY = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What binding says when a name has an address of a family that this machine has switched off."""

PATIENT_USER_TIMEOUT_S = 300.0
"""How long a peer whose host answers may leave unread what was sent."""
PROBES_UNANSWERED_MAX = 2
"""So many probes of a full window may go unanswered: hosts answer them at most twice a second."""

TCP_INFO_BYTES = 148
PROBES, UNACKNOWLEDGED, UNSENT = struct.Struct("3xB"), struct.Struct("24xI"), struct.Struct("144xI")
"""Where `struct tcp_info` has what is asked for here."""

INTEGER = struct.Struct("i")

AddressInfo = tuple[int, int, int, str, Any]


@dataclass(frozen=True, slots=True)
class Liveness:
    """How soon the kernel notices that a host is gone; by default in two seconds. A user timeout of 0 is none."""

    keepalive_idle_s: int = 1
    keepalive_interval_s: int = 1
    keepalive_probes: int = 2
    user_timeout_s: float = 1.8

    def apply(self, sock: socket.socket) -> None:
        """Set it on a socket, and send small messages at once. What a listener accepts inherits all of it."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, self.keepalive_idle_s),
            (socket.TCP_KEEPINTVL, self.keepalive_interval_s),
            (socket.TCP_KEEPCNT, self.keepalive_probes),
            (socket.TCP_USER_TIMEOUT, round(self.user_timeout_s * 1000)),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Options(Protocol):
    """A socket, or what asyncio gives for one."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """The bytes of an option."""
        ...

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option."""
        ...


class Patience:
    """The user timeout of one connection: the usual one, and a long one while the peer lives and reads nothing."""

    def __init__(self, sock: Options) -> None:
        self._sock = sock
        self._usual = INTEGER.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, INTEGER.size))[0]
        self._is_long = False

    def look(self) -> bool:
        """Go by how the connection is now; tells whether all that was sent has arrived.

        A look a second comes before a user timeout of two. Where all has arrived, none is needed before the next write.
        """
        flight = Flight.of(self._sock)
        if flight.is_unread:
            self.lengthen()
        elif self._is_long:
            self._set(self._usual)
            self._is_long = False
        return not (flight.unsent or flight.unacknowledged or self._is_long)

    def lengthen(self) -> None:
        """Have the long one until the next look."""
        if self._usual and not self._is_long:
            self._set(round(PATIENT_USER_TIMEOUT_S * 1000))
            self._is_long = True

    def _set(self, timeout_ms: int) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


class Flight(NamedTuple):
    """What of a connection is on its way, as its kernel sees it."""

    probes: int
    unacknowledged: int
    unsent: int

    @classmethod
    def of(cls, sock: Options) -> Flight:
        """As it is now."""
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        probes, unacknowledged, unsent = (field.unpack_from(info)[0] for field in (PROBES, UNACKNOWLEDGED, UNSENT))
        return cls(probes, unacknowledged, unsent)

    @property
    def is_unread(self) -> bool:
        """Whether the host answers and its program does not read: all is acknowledged, and the rest finds no room."""
        return bool(self.unsent) and not self.unacknowledged and self.probes <= PROBES_UNANSWERED_MAX


def is_unread(sock: Options) -> bool:
    """Whether the host at the other end answers and its program does not read."""
    return Flight.of(sock).is_unread


async def listen(address: Address, backlog: int, liveness: Liveness) -> list[socket.socket]:
    """Listening sockets, as `bind` makes them; an address that cannot be used is a `ForgedError`."""
    try:
        return await bind(address, backlog, liveness)
    except OSError as error:
        raise _not_listening(address, error) from error


async def bind(address: Address, backlog: int, liveness: Liveness | None = None) -> list[socket.socket]:
    """Listening sockets on every address that the host has. Port 0 becomes the same port on each of them.

    Raises the system's `OSError`. From Python 3.13 on, asyncio's `create_server(host, port)` drops its errno.
    """
    return _listen_all(await _resolve(address, socket.AI_PASSIVE), address.port, backlog, liveness)


async def dial(address: Address, liveness: Liveness) -> socket.socket:
    """A socket connected to the first address of the host that answers. Raises what the system says of the last."""
    failure: OSError | None = None
    for info in await _resolve(address):
        try:
            return await _dial_one(info, liveness)
        except OSError as error:
            failure = error
    assert failure is not None, "a name resolves to one address at least"
    raise failure


async def _dial_one(info: AddressInfo, liveness: Liveness) -> socket.socket:
    family, _, proto, _, where = info
    sock = socket.socket(family, socket.SOCK_STREAM, proto)
    try:
        sock.settimeout(0)
        liveness.apply(sock)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(address: Address, flags: int = 0) -> list[AddressInfo]:
    """The host's addresses, each once. Only a name is looked up in a thread; a number needs none."""
    host = address.host or None
    try:
        try:
            found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, address.port, type=socket.SOCK_STREAM, flags=flags
            )
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
    return list(dict.fromkeys(found))


def _listen_all(
    infos: Iterable[AddressInfo], port: int, backlog: int, liveness: Liveness | None
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, _, proto, _, where in infos:
            try:
                sock = _listen_one(family, proto, (where[0], port, *where[2:]), backlog, liveness)
            except OSError as error:
                if error.errno not in UNAVAILABLE_FAMILY:
                    raise
                failure = error
            else:
                sockets.append(sock)
                port = sock.getsockname()[1]
        if failure is not None and not sockets:
            raise failure
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen_one(
    family: int, proto: int, where: tuple[Any, ...], backlog: int, liveness: Liveness | None
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if liveness is not None:
            liveness.apply(sock)
        sock.bind(where)
        # Two that reuse an address may both bind it; only listening decides.
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _not_listening(address: Address, error: OSError) -> ForgedError:
    reason = f"cannot listen at {address}: {error.strerror or error}"
    if isinstance(error, socket.gaierror):
        return ConfigError("host_not_found", reason, "use a name or an address of this machine")
    if isinstance(error, PermissionError):
        return ConfigError("address_not_permitted", reason, "use a port over 1023, or grant CAP_NET_BIND_SERVICE")
    if error.errno == errno.EADDRINUSE:
        return ConfigError("address_in_use", reason, "stop the process that listens there, or use another port")
    # The world's, and passing: when a machine starts, its addresses may come later than its daemons.
    return Unavailable("address_not_available", reason, "use an address of this machine, or 0.0.0.0 or [::] for all")
