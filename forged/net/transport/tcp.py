"""TCP sockets: listen, connect, and detect hosts that are gone.

A host that is gone is detected by the kernel: by keepalive on idle connections, by TCP_USER_TIMEOUT on connections with
unacknowledged bytes. Measured between two network namespaces with the defaults: an idle connection is lost after 1.0 to
2.0 s, one with bytes in flight after about 2.2 s. Bytes that are sent after the host is gone, before keepalive gives
up, start the user timeout then: up to 2 s more. So the daemon, whose connections are mostly idle, should lose a host
before other workers report it, which makes the daemon send. With a user timeout of 1.6 s the reports sometimes came
first, and detection took 3.9 s.

The kernel applies the user timeout also to a live peer that does not read, once its receive window is full, although
its host acknowledges every probe: measured on Linux 6.18, such a connection is lost after 2.1 to 2.5 s. A process that
holds the GIL, or is stopped, is such a peer. `UserTimeout` therefore extends the timeout while the host answers and the
window is full. Bulk transfers set their own timeout.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple, Protocol

from forged.errors import ConfigError, ForgedError, Unavailable
from forged.net.transport.port import Address

UNAVAILABLE_FAMILY = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Errors of a bind to an address of a family that is disabled on this machine."""

EXTENDED_USER_TIMEOUT_S = 300.0
"""The user timeout while the peer's host answers and its process does not read."""
PROBES_UNANSWERED_MAX = 2
"""Unanswered probes of a full window that still count as a live host: hosts answer at most two per second."""

TCP_INFO_BYTES = 148
PROBES, UNACKNOWLEDGED, UNSENT = struct.Struct("3xB"), struct.Struct("24xI"), struct.Struct("144xI")
"""The offsets of these fields in `struct tcp_info`."""

INTEGER = struct.Struct("i")

AddressInfo = tuple[int, int, int, str, Any]


@dataclass(frozen=True, slots=True)
class Liveness:
    """Kernel timeouts for detecting a host that is gone, by default within about 2 s; user timeout 0 disables it."""

    keepalive_idle_s: int = 1
    keepalive_interval_s: int = 1
    keepalive_probes: int = 2
    user_timeout_s: float = 1.8

    def apply(self, sock: socket.socket) -> None:
        """Set the timeouts and TCP_NODELAY; accepted sockets inherit them from the listening socket."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, self.keepalive_idle_s),
            (socket.TCP_KEEPINTVL, self.keepalive_interval_s),
            (socket.TCP_KEEPCNT, self.keepalive_probes),
            (socket.TCP_USER_TIMEOUT, round(self.user_timeout_s * 1000)),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class SocketOptions(Protocol):
    """A socket, or asyncio's wrapper of one."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """The bytes of an option."""
        ...

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option."""
        ...


class UserTimeout:
    """The user timeout of one connection, extended while the peer's host answers and its process does not read."""

    def __init__(self, sock: SocketOptions) -> None:
        self._sock = sock
        self._usual = INTEGER.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, INTEGER.size))[0]
        self._is_extended = False

    def update(self) -> bool:
        """Extend or restore the timeout; returns whether everything sent has been acknowledged.

        To be called once per second while bytes are in flight, which is before a user timeout of 1.8 s ends.
        """
        in_flight = InFlight.of(self._sock)
        if in_flight.is_unread:
            self.extend()
        elif self._is_extended:
            self._set(self._usual)
            self._is_extended = False
        return not (in_flight.unsent or in_flight.unacknowledged or self._is_extended)

    def extend(self) -> None:
        """Use the extended timeout until the next `update`."""
        if self._usual and not self._is_extended:
            self._set(round(EXTENDED_USER_TIMEOUT_S * 1000))
            self._is_extended = True

    def _set(self, timeout_ms: int) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


class InFlight(NamedTuple):
    """The bytes in flight of a connection, from `struct tcp_info`."""

    probes: int
    unacknowledged: int
    unsent: int

    @classmethod
    def of(cls, sock: SocketOptions) -> InFlight:
        """Read the current values."""
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        probes, unacknowledged, unsent = (field.unpack_from(info)[0] for field in (PROBES, UNACKNOWLEDGED, UNSENT))
        return cls(probes, unacknowledged, unsent)

    @property
    def is_unread(self) -> bool:
        """Whether the peer's host answers and its process does not read: all bytes sent are acknowledged, more wait."""
        return bool(self.unsent) and not self.unacknowledged and self.probes <= PROBES_UNANSWERED_MAX


def is_unread(sock: SocketOptions) -> bool:
    """Whether the peer's host answers and its process does not read."""
    return InFlight.of(sock).is_unread


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
    """Connect to the first address of the host that answers. Raises the `OSError` of the last address."""
    failure: OSError | None = None
    for info in await _resolve(address):
        try:
            return await _dial_one(info, liveness)
        except OSError as error:
            failure = error
    assert failure is not None, "a name resolves to at least one address"
    raise failure


async def refuses(address: Address, host: IPv4Address | IPv6Address | None, liveness: Liveness) -> bool:
    """Whether this host refuses connections to the address. Raises `OSError`.

    False, without a connection attempt, if the address is not the host's: otherwise a worker could use the daemon to
    scan the ports of other hosts.
    """
    refused = False
    for info in await _resolve(address):
        if host is None or not _is_at(ip_address(info[4][0]), host):
            continue
        try:
            sock = await _dial_one(info, liveness)
        except ConnectionRefusedError:
            refused = True
        else:
            sock.close()
            return False
    return refused


def _is_at(found: IPv4Address | IPv6Address, host: IPv4Address | IPv6Address) -> bool:
    return found == host or (_is_own(found) and _is_own(host))


def _is_own(host: IPv4Address | IPv6Address) -> bool:
    """Whether the address is one of this machine's: its own addresses are reached from themselves."""
    if host.is_loopback:
        return True
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    try:
        # Connecting a datagram socket sends nothing.
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((str(host), 1))
            return ip_address(sock.getsockname()[0]) == host
    except OSError:
        return False


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
    """The host's addresses without duplicates. Only a name is resolved in a thread."""
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
        # With SO_REUSEADDR two processes may bind the same address; only listen fails for the second.
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
    # Retryable: when a machine boots, its addresses may appear after the daemon starts.
    return Unavailable("address_not_available", reason, "use an address of this machine, or 0.0.0.0 or [::] for all")
