"""The network port on this machine's sockets: TCP, TLS and Unix, with asyncio.

OS errors are translated here and in the modules below: an address that cannot be listened at is a `ConfigError`, a peer
that does not answer is `Unavailable`, a peer that fails the TLS handshake is a `PeerError`.

With TLS 1.3 a server checks the client's certificate after the client's handshake has finished. So a client without a
certificate is connected first and then loses the connection with an `ssl.SSLError`, which `tls.refusal` translates.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any

from forged.errors import ConfigError, ForgedError, Unavailable
from forged.net.transport import tcp, unix
from forged.net.transport.port import Address, Listener, Peer, ProtocolFactory
from forged.net.transport.socket_owner import owner_uid
from forged.net.transport.tcp import Liveness
from forged.net.transport.tls_server import TlsLimits, TlsServer

if TYPE_CHECKING:
    import ssl

SERVER_NEEDS = "set tls_certificate and tls_key"
CLIENT_NEEDS = "pass a context: SystemNetwork(tls_client=...)"
BACKLOG = 1024
SOCKET_MODE = 0o660
CONNECT_TIMEOUT_S = 5.0
TLS_HANDSHAKE_TIMEOUT_S = 10.0
TLS_SHUTDOWN_TIMEOUT_S = 2.0
HANDSHAKES_MAX = 256
"""The maximum number of TLS handshakes in progress per listening socket; each needs 256 KiB. One address has half of
them at most; there is no reserve for operators, who have the Unix socket, which needs no handshake."""

CREDENTIALS = struct.Struct("iII")
"""`struct ucred`: process, user, group."""

IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)

UNKNOWN = "unknown"
"""The address of a peer that disconnected before it could be read."""

UNIX_PEER = "pid "
"""Begins the address of a Unix socket's peer."""

LOOPBACK = ip_address("127.0.0.1")

CONNECT_FAILURES: tuple[tuple[type[OSError], str, str], ...] = (
    (TimeoutError, "connect_timeout", "check that the host is up and no firewall blocks it"),
    (ConnectionRefusedError, "connect_refused", "check that the daemon or worker runs and listens there"),
    (ConnectionError, "connect_reset", "check that a daemon or worker listens there, with the same TLS setting"),
    (FileNotFoundError, "no_socket", "check that the daemon runs and listens there"),
    (NotADirectoryError, "no_socket", "check the path"),
    (socket.gaierror, "host_not_found", "check the host name and the name service"),
    (OSError, "connect_failed", "check the address and the network"),
)
"""The first matching class gives the error code and the fix."""


class SystemNetwork:
    """The network of this machine. `tls_server` and `tls_client` are needed for `tls://` addresses only."""

    def __init__(
        self,
        *,
        tls_server: ssl.SSLContext | None = None,
        tls_client: ssl.SSLContext | None = None,
        backlog: int = BACKLOG,
        socket_mode: int = SOCKET_MODE,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls_handshake_timeout_s: float = TLS_HANDSHAKE_TIMEOUT_S,
        tls_shutdown_timeout_s: float = TLS_SHUTDOWN_TIMEOUT_S,
        handshakes_max: int = HANDSHAKES_MAX,
        liveness: Liveness | None = None,
    ) -> None:
        self._tls_server = tls_server
        self._tls_client = tls_client
        self._backlog = backlog
        self._socket_mode = socket_mode
        self._connect_timeout_s = connect_timeout_s
        self._tls_limits = TlsLimits(handshakes_max, tls_handshake_timeout_s, tls_shutdown_timeout_s)
        self._liveness = liveness or Liveness()

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Call `factory` for every new connection.

        With TLS also for handshakes that fail later; then only `connection_lost` is called on the protocol.
        """
        context = _required(self._tls_server, address, SERVER_NEEDS) if address.scheme == "tls" else None
        if address.scheme == "unix":
            sock, file = unix.listen(address.path, self._socket_mode, self._backlog)
            return await self._serve([sock], factory, address, file=file)
        sockets = await tcp.listen(address, self._backlog, self._liveness)
        bound = Address(address.scheme, host=address.host, port=sockets[0].getsockname()[1])
        return await self._serve(sockets, factory, bound, context=context)

    async def listen_on(self, sock: socket.socket, factory: ProtocolFactory, *, tls: bool = False) -> Listener:
        """Listen on a socket that was opened by another process, such as systemd; a Unix socket's file is not removed.

        If this raises, the socket still belongs to the caller.
        """
        address = _address_of(sock, tls=tls)
        context = _required(self._tls_server, address, SERVER_NEEDS) if address.scheme == "tls" else None
        if sock.family in IP_FAMILIES:
            self._liveness.apply(sock)
        sock.set_inheritable(False)
        return await self._serve([sock], factory, address, context=context)

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        """Connect within `connect_timeout_s`, including the TLS handshake."""
        context = _required(self._tls_client, address, CLIENT_NEEDS) if address.scheme == "tls" else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                sock = await (
                    unix.dial(address.path) if address.scheme == "unix" else tcp.dial(address, self._liveness)
                )
                return await self._attach(sock, factory, context, address.host)
        except OSError as error:
            raise _not_connected(address, error) from error

    async def refuses(self, address: Address, seen_at: str) -> bool:
        """Whether the host that a peer was seen at refuses connections to this address; false if it is not its own."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await tcp.refuses(address, _seen_host(seen_at), self._liveness)
        except OSError:
            return False

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """The peer of a transport. A certificate's name is returned only if the certificate was verified."""
        sock: socket.socket = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            return _unix_peer(sock)
        peer = tcp_peer(sock, transport.get_extra_info("peername"))
        if transport.get_extra_info("ssl_object") is None:
            return peer
        name = _certificate_name(transport.get_extra_info("peercert") or {})
        return replace(peer, scheme="tls", certificate_name=name)

    async def _serve(
        self,
        sockets: Sequence[socket.socket],
        factory: ProtocolFactory,
        address: Address,
        *,
        context: ssl.SSLContext | None = None,
        file: unix.SocketFile | None = None,
    ) -> Listener:
        servers = [await self._server(sock, factory, context) for sock in sockets]
        listener = _SocketListener(address, servers, file)
        try:
            for server in servers:
                await server.start_serving()
        except BaseException:
            await listener.close()
            raise
        return listener

    async def _server(
        self, sock: socket.socket, factory: ProtocolFactory, context: ssl.SSLContext | None
    ) -> asyncio.Server | TlsServer:
        if context is not None:
            return TlsServer(sock, factory, context, self._backlog, self._tls_limits, _source)
        # Also for Unix sockets: from Python 3.13 on, `create_unix_server` removes the file of a socket passed to it.
        return await asyncio.get_running_loop().create_server(
            factory, sock=sock, backlog=self._backlog, start_serving=False
        )

    async def _attach(
        self, sock: socket.socket, factory: ProtocolFactory, context: ssl.SSLContext | None, host: str
    ) -> asyncio.Transport:
        transport, _ = await asyncio.get_running_loop().create_connection(
            factory,
            sock=sock,
            ssl=context,
            server_hostname=host if context else None,
            ssl_shutdown_timeout=self._tls_limits.shutdown_timeout_s if context else None,
        )
        return transport


class _SocketListener:
    """A listener with one asyncio server per socket."""

    def __init__(
        self, address: Address, servers: Iterable[asyncio.Server | TlsServer], file: unix.SocketFile | None
    ) -> None:
        self._address = address
        self._servers = tuple(servers)
        self._file = file

    @property
    def address(self) -> Address:
        return self._address

    def descriptors(self) -> list[int]:
        return [sock.fileno() for server in self._servers for sock in server.sockets]

    async def close(self) -> None:
        # Remove the file first: while the socket listens, no process replaces it.
        if self._file is not None:
            self._file.remove()
            self._file = None
        # Not `wait_closed`: from Python 3.12 on it waits until all connections are closed.
        for server in self._servers:
            server.close()


def _required(context: ssl.SSLContext | None, address: Address, fix: str) -> ssl.SSLContext:
    if context is None:
        raise ConfigError("tls_not_configured", f"{address} needs TLS, which is not configured", fix)
    return context


def _address_of(sock: socket.socket, *, tls: bool) -> Address:
    """The address of an inherited socket; raises `ConfigError` if it does not listen."""
    streams = sock.family in (socket.AF_UNIX, *IP_FAMILIES) and sock.type == socket.SOCK_STREAM
    if not streams or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ConfigError(
            "socket_not_listening",
            f"descriptor {sock.fileno()} is not a listening stream socket",
            "pass listening TCP or Unix sockets (systemd: ListenStream=, Accept=no)",
        )
    if sock.family == socket.AF_UNIX:
        return Address("unix", path=str(sock.getsockname()))
    host, port, *_ = sock.getsockname()
    return Address("tls" if tls else "tcp", host=host, port=port)


def _not_connected(address: Address, error: OSError) -> ForgedError:
    if address.scheme == "tls":
        import ssl

        from forged.net.transport import tls

        if isinstance(error, ssl.SSLError):
            return tls.refusal(address, error)
    # The text of asyncio is "Connect call failed", without the reason.
    number = None if isinstance(error, socket.gaierror) else error.errno
    reason = os.strerror(number) if number else error.strerror or str(error) or "no answer in time"
    if isinstance(error, PermissionError):
        return ConfigError(
            "connect_not_permitted", f"cannot connect to {address}: {reason}", "check its owner and mode"
        )
    code, fix = next((code, fix) for kind, code, fix in CONNECT_FAILURES if isinstance(error, kind))
    return Unavailable(code, f"cannot connect to {address}: {reason}", fix)


def _unix_peer(sock: socket.socket) -> Peer:
    """The peer of a Unix socket by SO_PEERCRED, unknown if the socket is closed already."""
    try:
        pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    except OSError:
        return Peer("unix", UNKNOWN)
    return Peer("unix", f"{UNIX_PEER}{pid}", uid=uid)


def tcp_peer(sock: socket.socket, peername: tuple[Any, ...] | None) -> Peer:
    """The peer of a TCP connection; its user, if it is on this host."""
    host, where = _ip_peer(peername)
    loopback = host is not None and host.is_loopback
    return Peer("tcp", where, loopback=loopback, uid=owner_uid(sock) if loopback else None)


def _source(sock: socket.socket, peername: tuple[Any, ...]) -> str:
    return tcp_peer(sock, peername).source


def _ip_peer(peername: tuple[Any, ...] | None) -> tuple[IPv4Address | IPv6Address | None, str]:
    """The peer's address, and address with port as text. A mapped IPv4 address is returned as IPv4."""
    if peername is None:
        return None, UNKNOWN
    host = ip_address(peername[0])
    if isinstance(host, IPv6Address):
        host = host.ipv4_mapped or host
    port = peername[1]
    return host, f"[{host}]:{port}" if isinstance(host, IPv6Address) else f"{host}:{port}"


def _seen_host(seen_at: str) -> IPv4Address | IPv6Address | None:
    """The host in a `Peer.address`; this host for a Unix socket's peer, None if it is unknown."""
    if seen_at.startswith(UNIX_PEER):
        return LOOPBACK
    try:
        return ip_address(seen_at.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


def _certificate_name(certificate: Mapping[str, Any]) -> str | None:
    """The common name, or the first DNS name."""
    common = (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName")
    names = (value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
    # A certificate without a name must not count as no certificate.
    return next(common, None) or next(names, "" if certificate else None)
