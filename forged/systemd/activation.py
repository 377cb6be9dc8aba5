"""Socket activation, as described in `man sd_listen_fds`.

Invariants:
- Sockets passed to this process are all used; sockets passed to another process are not touched.
- The daemon does not know about activation: `ActivatedNetwork.listen` returns inherited sockets for their addresses.
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
from forged.systemd.environment import Environment, invalid_variable, take, whole_number
from forged.systemd.listeners import InheritedListener, assign_listeners

FIRST_DESCRIPTOR = 3
SOCKETS_MAX = 64
"""The most sockets that may be passed."""


@dataclass(frozen=True, slots=True)
class InheritedSocket:
    """An inherited socket and its `FileDescriptorName=`."""

    sock: socket.socket
    name: str

    @property
    def listener(self) -> InheritedListener:
        where = self.sock.getsockname()
        if self.sock.family != socket.AF_UNIX:
            return InheritedListener(Address("tcp", host=where[0], port=where[1]), self.name)
        if not isinstance(where, str) or not where:
            # Access is controlled by the file mode, and an abstract socket has no file.
            raise ConfigError(
                "socket_without_path",
                f"descriptor {self.sock.fileno()} is a Unix socket without a path",
                "give ListenStream= a path",
            )
        return InheritedListener(Address("unix", path=where), self.name)


class ActivatedNetwork:
    """A network that adopts inherited sockets, each at the first `listen` for its address."""

    def __init__(self, network: SystemNetwork, inherited: Iterable[tuple[Address, socket.socket]]) -> None:
        self._network = network
        self._inherited = list(inherited)

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Adopt the inherited socket of the address, or open a new one."""
        for index, (where, sock) in enumerate(self._inherited):
            if where == address:
                listener = await self._network.listen_on(sock, factory, tls=address.scheme == "tls")
                del self._inherited[index]
                return listener
        return await self._network.listen(address, factory)

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        return await self._network.connect(address, factory)

    async def refuses(self, address: Address, seen_at: str) -> bool:
        return await self._network.refuses(address, seen_at)

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        return self._network.peer(transport)


def inherited_sockets(environment: Environment, pid: int) -> list[InheritedSocket]:
    """The sockets passed to this process; removes their environment variables."""
    given_pid, given_count, names = (take(environment, name) for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    addressed_pid, count = whole_number("LISTEN_PID", given_pid), whole_number("LISTEN_FDS", given_count)
    if addressed_pid != pid or not count:
        return []
    if count > SOCKETS_MAX:
        raise invalid_variable("LISTEN_FDS", given_count, f"at most {SOCKETS_MAX}")
    named = names.split(":") if names else [""] * count
    if len(named) != count:
        raise invalid_variable(
            "LISTEN_FDNAMES", names, f"{count} names separated by colons, because LISTEN_FDS is {count}"
        )
    return [InheritedSocket(_adopt(FIRST_DESCRIPTOR + index), name) for index, name in enumerate(named)]


def activated(
    config: Config, network: SystemNetwork, inherited: Sequence[InheritedSocket]
) -> tuple[Config, SystemNetwork | ActivatedNetwork]:
    """The settings and the network of a daemon with inherited sockets."""
    if not inherited:
        return config, network
    listeners = assign_listeners([each.listener for each in inherited], config.socket, config.listen, Config().listen)
    pairs = zip(listeners.inherited, (each.sock for each in inherited), strict=True)
    return replace(config, socket=listeners.socket, listen=listeners.listen), ActivatedNetwork(network, pairs)


def _adopt(descriptor: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _unusable(descriptor, error.strerror or str(error)) from error
    sock.set_inheritable(False)
    if sock.family not in (socket.AF_UNIX, *IP_FAMILIES):
        family = sock.family
        sock.close()
        raise _unusable(descriptor, f"it is a socket of family {family!r}")
    return sock


def _unusable(descriptor: int, reason: str) -> ConfigError:
    return ConfigError(
        "descriptor_unusable",
        f"descriptor {descriptor} is neither a TCP nor a Unix socket: {reason}",
        "pass TCP or Unix sockets that listen (systemd: ListenStream=, Accept=no)",
    )
