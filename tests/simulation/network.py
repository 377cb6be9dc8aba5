"""The simulated network: hosts by name, doors on them, and connections that suffer.

Law: a `HostNetwork` is what one process sees, the port `forged.net.transport.port.Network`. When the process is
killed, or its host is, the object is dead for good: its doors and connections are gone and its protocols hear nothing;
whoever starts again on that host asks `SimulatedNetwork.host` for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from forged.errors import ConfigError, PeerError, Unavailable
from forged.net.transport.port import Address, Peer, ProtocolFactory
from tests.simulation.connection import Connection, End
from tests.simulation.links import CALM, Faults, Links, Trace
from tests.simulation.loop import Execution
from tests.simulation.transport import SimulatedTransport

FIRST_PORT = 40_000
SYN_REPEATS_AFTER_S = 1.0
THIS_HOST = ("localhost", "127.0.0.1", "::1")
ANY_HOST = ("", "0.0.0.0", "::")
UID = 0

Door = tuple[str, str | int]
"""A host, and a path or a port on it."""


class SimulatedListener:
    """An open door."""

    def __init__(
        self, process: HostNetwork, address: Address, factory: ProtocolFactory, close: Callable[[], None]
    ) -> None:
        self.process = process
        self.factory = factory
        self._address = address
        self._close = close

    @property
    def address(self) -> Address:
        """Where it listens: port 0 has become a port."""
        return self._address

    @property
    def local(self) -> bool:
        """Whether only its own host gets in."""
        return self._address.scheme == "unix" or self._address.host in THIS_HOST

    def descriptors(self) -> list[int]:
        """There are no sockets."""
        return []

    async def close(self) -> None:
        """Accept no more."""
        self._close()


class SimulatedNetwork:
    """All hosts and what is between them; `links` holds the faults and may be changed at any time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, random: Random, faults: Faults = CALM, trace: Trace | None = None
    ) -> None:
        self.links = Links(loop, random, faults, trace)
        self._processes: dict[HostNetwork, None] = {}
        self._doors: dict[Door, SimulatedListener] = {}
        self._connections: dict[Connection, None] = {}
        self._ports = FIRST_PORT
        self._names = 0

    def host(self, name: str) -> HostNetwork:
        """The network as a new process on this host sees it. A host that was gone is back."""
        self.links.gone.discard(name)
        self._links_changed()
        process = HostNetwork(self, name)
        self._processes[process] = None
        return process

    def partition(self, a: Iterable[str], b: Iterable[str], *, one_way: bool = False) -> None:
        """Let nothing pass from the hosts `a` to the hosts `b`, nor back unless `one_way`."""
        a, b = tuple(a), tuple(b)
        self.links.trace(f"partition {','.join(a)} {'>' if one_way else '|'} {','.join(b)}")
        self.links.block(a, b)
        if not one_way:
            self.links.block(b, a)

    def heal(self) -> None:
        """End all partitions; what was held back arrives."""
        self.links.trace("heal")
        self.links.unblock()
        self._links_changed()

    def calm(self) -> None:
        """End all partitions and all faults: from now on the network is good."""
        self.links.faults = CALM
        self.links.special.clear()
        self.heal()

    def crash(self, name: str, *, host_gone: bool = False) -> None:
        """Kill every process on a host; with `host_gone` the host itself falls silent, until somebody starts on it."""
        self.links.trace(f"crash {name}{' with its host' if host_gone else ''}")
        for process in [process for process in self._processes if process.name == name]:
            self._kill(process, host_gone=host_gone)
        if host_gone:
            self.links.gone.add(name)

    def kill(self, process: HostNetwork) -> None:
        """Kill one process: others on its host live on."""
        self.links.trace(f"kill a process on {process.name}")
        self._kill(process, host_gone=False)

    def _kill(self, process: HostNetwork, *, host_gone: bool) -> None:
        self._processes.pop(process, None)
        process.dead = True
        process.execution.resume()
        self._doors = {door: listener for door, listener in self._doors.items() if listener.process is not process}
        for connection in list(self._connections):
            connection.kill(process, host_gone=host_gone)

    def _links_changed(self) -> None:
        for connection in list(self._connections):
            connection.link_changed()

    def open_door(self, process: HostNetwork, address: Address, factory: ProtocolFactory) -> SimulatedListener:
        """Let connections to this address reach a process."""
        if address.scheme != "unix" and not address.port:
            address = replace(address, port=self.next_port())
        door = (process.name, address.path or address.port)
        if door in self._doors:
            code = "socket_in_use" if address.scheme == "unix" else "address_in_use"
            raise ConfigError(code, f"{address} is in use on {process.name}", "listen somewhere else")

        def close() -> None:
            if self._doors.get(door) is listener:
                del self._doors[door]

        listener = SimulatedListener(process, address, factory, close)
        self._doors[door] = listener
        self.links.trace(f"{process.name} listens at {address}")
        return listener

    def door(self, source: str, target: str, address: Address) -> SimulatedListener | None:
        """Who listens there for a connection from `source`."""
        listener = self._doors.get((target, address.path or address.port))
        return None if listener and listener.local and source != target else listener

    def connection(self, client: HostNetwork, listener: SimulatedListener, address: Address) -> Connection:
        """Lay a connection between two processes; neither knows of it yet."""
        server = listener.process
        self._names += 1
        name = f"#{self._names} {client.name}>{server.name}"
        connection = Connection(self.links, name, *_ends(client, server, address, self.next_port()), self._forget)
        self._connections[connection] = None
        self.links.trace(f"{name} is accepted at {listener.address}")
        return connection

    def next_port(self) -> int:
        """A port that nobody has."""
        self._ports += 1
        return self._ports

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)


class HostNetwork:
    """The port `forged.net.transport.port.Network`, for one process on a simulated host."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self.name = name
        self.dead = False
        self.execution = Execution(network.links.loop)
        self._network = network
        self._links = network.links

    async def listen(self, address: Address, factory: ProtocolFactory) -> SimulatedListener:
        """Call `factory` for every connection that arrives."""
        self._check_alive()
        if address.scheme != "unix" and address.host not in (self.name, *THIS_HOST, *ANY_HOST):
            raise ConfigError("address_not_available", f"{address} is not on {self.name}", "listen at an own one")
        return self._network.open_door(self, address, factory)

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        """Connect, or raise `Unavailable` with the code `connect_refused` or `connect_timeout`."""
        self._check_alive()
        here = address.scheme == "unix" or address.host in (*THIS_HOST, *ANY_HOST)
        target = self.name if here else address.host
        await self._reach(target, address)
        listener = self._network.door(self.name, target, address)
        if listener is None:
            await self._answer(target)
            self._links.trace(f"{self.name} is refused at {address}")
            raise Unavailable("connect_refused", f"nobody listens at {address}", "start it, or mend the address")
        if listener.address.scheme != address.scheme:
            raise PeerError("tls_refused", f"{listener.address} does not speak {address.scheme}", "mend the address")
        return await self._finish(self._network.connection(self, listener, address), listener, target, factory)

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """Who is at the other end."""
        assert isinstance(transport, SimulatedTransport)
        return transport.peer

    async def _reach(self, target: str, address: Address) -> None:
        """Knock until somebody hears it and could answer."""
        links = self._links
        deadline_s = links.loop.time() + links.faults_of(self.name, target).connect_timeout_s
        await asyncio.sleep(links.latency_s(self.name, target))
        self._check_alive()
        while not (links.reaches(self.name, target) and links.reaches(target, self.name)):
            if links.loop.time() >= deadline_s:
                links.trace(f"{self.name} gets no answer from {address}")
                raise Unavailable("connect_timeout", f"{address} does not answer", "try again later")
            await asyncio.sleep(min(SYN_REPEATS_AFTER_S, deadline_s - links.loop.time()))
            self._check_alive()

    async def _answer(self, target: str) -> None:
        """Wait as long as whatever the target says takes."""
        await asyncio.sleep(self._links.latency_s(target, self.name))
        self._check_alive()

    async def _finish(
        self, connection: Connection, listener: SimulatedListener, target: str, factory: ProtocolFactory
    ) -> asyncio.Transport:
        """The server has accepted; the client learns of it later, or never."""
        accepting = listener.process.execution.context.copy()
        self._links.loop.call_soon(connection.server.start, listener.factory, context=accepting)
        try:
            await self._answer(target)
            connection.client.start(factory)
            await asyncio.sleep(0)  # until connection_made has been called
        except BaseException:
            connection.client.die(reset=False)
            raise
        return connection.client

    def _check_alive(self) -> None:
        if self.dead:
            raise Unavailable("process_killed", f"this process on {self.name} was killed", "it cannot go on")


def _ends(client: HostNetwork, server: HostNetwork, address: Address, port: int) -> tuple[End, End]:
    """How the two ends of a connection to `address` look to each other."""
    loopback = client.name == server.name
    if address.scheme == "unix":
        peer = Peer("unix", str(address), loopback=True, uid=UID)
        names = {"peername": address.path, "sockname": ""}
        return End(client, client.name, peer, names), End(server, server.name, peer, {"peername": "", "sockname": ""})
    there, here = (server.name, address.port), (client.name, port)
    seen_by_client = Peer(address.scheme, f"{server.name}:{address.port}", loopback=loopback)
    seen_by_server = Peer(address.scheme, f"{client.name}:{port}", loopback=loopback)
    return (
        End(client, client.name, seen_by_client, {"peername": there, "sockname": here}),
        End(server, server.name, seen_by_server, {"peername": here, "sockname": there}),
    )
