"""Sockets that the service manager opened for the daemon, as `man sd_listen_fds` says.

Law: what was passed to this process is used, and what was passed to another is not touched. The daemon knows nothing of
it: it is told where it listens, and its network has some of these doors open already.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from forged.config import Config
from forged.errors import ConfigError
from forged.net.transport.port import Address, Listener, Peer, ProtocolFactory
from forged.net.transport.sockets import IP_FAMILIES, SystemNetwork
from forged.systemd.environment import Environment, nonsense, take, whole_number
from forged.systemd.listeners import InheritedListener, divide

FIRST_DESCRIPTOR = 3
SOCKETS_MAX = 64
"""How many sockets may be passed."""


@dataclass(frozen=True, slots=True)
class InheritedSocket:
    """A socket, and what its unit calls it (`FileDescriptorName=`)."""

    sock: socket.socket
    name: str

    @property
    def door(self) -> InheritedListener:
        """Where it listens, if it does at all."""
        where = self.sock.getsockname()
        if self.sock.family != socket.AF_UNIX:
            return InheritedListener(Address("tcp", host=where[0], port=where[1]), self.name)
        if not isinstance(where, str) or not where:
            # The file's mode is what keeps others out, and an abstract socket has no file.
            raise ConfigError(
                "socket_without_path",
                f"descriptor {self.sock.fileno()} is a Unix socket without a path",
                "give ListenStream= a path",
            )
        return InheritedListener(Address("unix", path=where), self.name)


class ActivatedNetwork:
    """The network of a machine on which some doors are open already; those it opens again are opened anew."""

    def __init__(self, network: SystemNetwork, inherited: Iterable[tuple[Address, socket.socket]]) -> None:
        self._network = network
        self._inherited = list(inherited)

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Adopt the socket that listens there already, or else open one."""
        for index, (where, sock) in enumerate(self._inherited):
            if where == address:
                listener = await self._network.listen_on(sock, factory, tls=address.scheme == "tls")
                del self._inherited[index]
                return listener
        return await self._network.listen(address, factory)

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        """Connect as without activation."""
        return await self._network.connect(address, factory)

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """Who is at the other end, as without activation."""
        return self._network.peer(transport)


def inherited_sockets(environment: Environment, pid: int) -> list[InheritedSocket]:
    """The sockets that were passed to this process; what the environment says of them is gone then."""
    given_pid, given_count, names = (take(environment, name) for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    addressee, count = whole_number("LISTEN_PID", given_pid), whole_number("LISTEN_FDS", given_count)
    if addressee != pid or not count:
        return []
    if count > SOCKETS_MAX:
        raise nonsense("LISTEN_FDS", given_count, f"at most {SOCKETS_MAX}")
    named = names.split(":") if names else [""] * count
    if len(named) != count:
        raise nonsense("LISTEN_FDNAMES", names, f"{count} names with colons between them")
    return [InheritedSocket(_adopt(FIRST_DESCRIPTOR + index), name) for index, name in enumerate(named)]


def activated(
    config: Config, network: SystemNetwork, inherited: Sequence[InheritedSocket]
) -> tuple[Config, SystemNetwork | ActivatedNetwork]:
    """The settings and the network for a daemon to which these sockets were passed."""
    if not inherited:
        return config, network
    doors = divide([each.door for each in inherited], config.socket, config.listen, Config().listen)
    pairs = zip(doors.inherited, (each.sock for each in inherited), strict=True)
    return replace(config, socket=doors.socket, listen=doors.listen), ActivatedNetwork(network, pairs)


def _adopt(descriptor: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _not_ours(descriptor, error.strerror or str(error)) from error
    sock.set_inheritable(False)
    if sock.family not in (socket.AF_UNIX, *IP_FAMILIES):
        family = sock.family
        sock.close()
        raise _not_ours(descriptor, f"it is a socket of family {family!r}")
    return sock


def _not_ours(descriptor: int, reason: str) -> ConfigError:
    return ConfigError(
        "descriptor_unusable",
        f"descriptor {descriptor} is neither a TCP nor a Unix socket: {reason}",
        "pass TCP or Unix sockets that listen (systemd: ListenStream=, Accept=no)",
    )
