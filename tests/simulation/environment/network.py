"""The simulated network: hosts, listeners and connections with faults.

A `HostNetwork` implements `forged.net.transport.port.Network` for one process. When the process or its host is killed,
its listeners and connections are gone and its protocols are not called again; a new process on that host uses another
`HostNetwork` from `SimulatedNetwork.host`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from forged.errors import ConfigError, PeerError, Unavailable
from forged.net.transport.port import Address, Peer, ProtocolFactory
from tests.simulation.environment.connection import Connection, End
from tests.simulation.environment.links import CALM, Faults, Links, Trace
from tests.simulation.environment.loop import Execution
from tests.simulation.environment.transport import SimulatedTransport

FIRST_PORT = 40_000
SYN_REPEATS_AFTER_S = 1.0
THIS_HOST = ("localhost", "127.0.0.1", "::1")
ANY_HOST = ("", "0.0.0.0", "::")
UID = 0

ListenKey = tuple[str, str | int]
"""A host, and a path or port on it."""


class SimulatedListener:
    """A listening address."""

    def __init__(
        self, process: HostNetwork, address: Address, factory: ProtocolFactory, close: Callable[[], None]
    ) -> None:
        self.process = process
        self.factory = factory
        self._address = address
        self._close = close

    @property
    def address(self) -> Address:
        """The actual address; port 0 is replaced."""
        return self._address

    @property
    def local(self) -> bool:
        """Whether only its own host can connect."""
        return self._address.scheme == "unix" or self._address.host in THIS_HOST

    def descriptors(self) -> list[int]:
        """None: there are no sockets."""
        return []

    async def close(self) -> None:
        """Stop accepting."""
        self._close()


class SimulatedNetwork:
    """All hosts and links; the faults in `links` may be changed at any time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, random: Random, faults: Faults = CALM, trace: Trace | None = None
    ) -> None:
        self.links = Links(loop, random, faults, trace)
        self._processes: dict[HostNetwork, None] = {}
        self._listeners: dict[ListenKey, SimulatedListener] = {}
        self.connections: dict[Connection, None] = {}
        """Those that an end still has open."""
        self._ports = FIRST_PORT
        self._names = 0

    def host(self, name: str) -> HostNetwork:
        """The network of a new process on this host. A host that was gone is back."""
        self.links.gone.discard(name)
        self._links_changed()
        process = HostNetwork(self, name)
        self._processes[process] = None
        return process

    def partition(self, a: Iterable[str], b: Iterable[str], *, one_way: bool = False) -> None:
        """Block the links from hosts `a` to hosts `b`, and back unless `one_way`."""
        a, b = tuple(a), tuple(b)
        self.links.trace(f"partition {','.join(a)} {'>' if one_way else '|'} {','.join(b)}")
        self.links.block(a, b)
        if not one_way:
            self.links.block(b, a)

    def heal(self) -> None:
        """End all partitions; held bytes arrive."""
        self.links.trace("heal")
        self.links.unblock()
        self._links_changed()

    def calm(self) -> None:
        """End all partitions and faults."""
        self.links.faults = CALM
        self.links.special.clear()
        self.heal()

    def crash(self, name: str, *, host_gone: bool = False) -> None:
        """Kill all processes on a host; with `host_gone` the host is silent until a process starts on it."""
        self.links.trace(f"crash {name}{' with its host' if host_gone else ''}")
        for process in [process for process in self._processes if process.name == name]:
            self._kill(process, host_gone=host_gone)
        if host_gone:
            self.links.gone.add(name)

    def kill(self, process: HostNetwork, *, unwritten: float = 0.0) -> None:
        """Kill one process, at so many of its connections just before it wrote what is in flight there."""
        self.links.trace(f"kill a process on {process.name}")
        self._kill(process, host_gone=False, unwritten=unwritten)

    def _kill(self, process: HostNetwork, *, host_gone: bool, unwritten: float = 0.0) -> None:
        self._processes.pop(process, None)
        process.dead = True
        process.execution.resume()
        self._listeners = {
            key: listener for key, listener in self._listeners.items() if listener.process is not process
        }
        for connection in list(self.connections):
            connection.kill(process, host_gone=host_gone, unwritten=unwritten)

    def _links_changed(self) -> None:
        for connection in list(self.connections):
            connection.link_changed()

    def listen(self, process: HostNetwork, address: Address, factory: ProtocolFactory) -> SimulatedListener:
        """Listen at an address for a process."""
        if address.scheme != "unix" and not address.port:
            address = replace(address, port=self.next_port())
        key = (process.name, address.path or address.port)
        if key in self._listeners:
            code = "socket_in_use" if address.scheme == "unix" else "address_in_use"
            raise ConfigError(code, f"{address} is in use on {process.name}", "use another address")

        def close() -> None:
            if self._listeners.get(key) is listener:
                del self._listeners[key]

        listener = SimulatedListener(process, address, factory, close)
        self._listeners[key] = listener
        self.links.trace(f"{process.name} listens at {address}")
        return listener

    def listener(self, source: str, target: str, address: Address) -> SimulatedListener | None:
        """The listener that a connection from `source` reaches."""
        listener = self._listeners.get((target, address.path or address.port))
        return None if listener and listener.local and source != target else listener

    def connection(self, client: HostNetwork, listener: SimulatedListener, address: Address) -> Connection:
        """Make a connection between two processes, which are not told yet."""
        server = listener.process
        self._names += 1
        name = f"#{self._names} {client.name}>{server.name}"
        connection = Connection(self.links, name, *_ends(client, server, address, self.next_port()), self._forget)
        self.connections[connection] = None
        self.links.trace(f"{name} is accepted at {listener.address}")
        return connection

    def next_port(self) -> int:
        """An unused port."""
        self._ports += 1
        return self._ports

    def _forget(self, connection: Connection) -> None:
        self.connections.pop(connection, None)


class HostNetwork:
    """Implements `forged.net.transport.port.Network` for one process on a simulated host."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self.name = name
        self.dead = False
        self.execution = Execution(network.links.loop)
        self._network = network
        self._links = network.links

    async def listen(self, address: Address, factory: ProtocolFactory) -> SimulatedListener:
        """Listen, and call `factory` for every new connection."""
        self._check_alive()
        if address.scheme != "unix" and address.host not in (self.name, *THIS_HOST, *ANY_HOST):
            raise ConfigError(
                "address_not_available", f"{address} is not an address of {self.name}", "use its own address"
            )
        return self._network.listen(self, address, factory)

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        """Connect, or raise `Unavailable` with the code `connect_refused` or `connect_timeout`."""
        self._check_alive()
        here = address.scheme == "unix" or address.host in (*THIS_HOST, *ANY_HOST)
        target = self.name if here else address.host
        await self._reach(target, address)
        listener = self._network.listener(self.name, target, address)
        if listener is None:
            await self._answer(target)
            self._links.trace(f"{self.name} is refused at {address}")
            raise Unavailable("connect_refused", f"no process listens at {address}", "start it, or correct the address")
        if listener.address.scheme != address.scheme:
            raise PeerError("tls_refused", f"{listener.address} does not use {address.scheme}", "correct the address")
        return await self._finish(self._network.connection(self, listener, address), listener, target, factory)

    async def refuses(self, address: Address, seen_at: str) -> bool:
        """Whether the host that a peer was seen at refuses connections to this address, if it is its own."""
        if seen_at.rpartition(":")[0] != address.host:
            return False
        try:
            transport = await self.connect(address, asyncio.Protocol)
        except Unavailable as error:
            return error.code == "connect_refused"
        transport.abort()
        return False

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """The peer of a transport."""
        assert isinstance(transport, SimulatedTransport)
        return transport.peer

    async def _reach(self, target: str, address: Address) -> None:
        """Repeat the SYN until packets pass in both directions."""
        links = self._links
        deadline_s = links.loop.time() + links.faults_of(self.name, target).connect_timeout_s
        await asyncio.sleep(links.latency_s(self.name, target))
        self._check_alive()
        while not (links.reaches(self.name, target) and links.reaches(target, self.name)):
            if links.loop.time() >= deadline_s:
                links.trace(f"{self.name} gets no answer from {address}")
                raise Unavailable("connect_timeout", f"{address} does not answer", "retry later")
            await asyncio.sleep(min(SYN_REPEATS_AFTER_S, deadline_s - links.loop.time()))
            self._check_alive()

    async def _answer(self, target: str) -> None:
        """Wait for the target's answer."""
        await asyncio.sleep(self._links.latency_s(target, self.name))
        self._check_alive()

    async def _finish(
        self, connection: Connection, listener: SimulatedListener, target: str, factory: ProtocolFactory
    ) -> asyncio.Transport:
        """The server has accepted; the client is told later, or never."""
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
            raise Unavailable("process_killed", f"this process on {self.name} was killed", "")


def _ends(client: HostNetwork, server: HostNetwork, address: Address, port: int) -> tuple[End, End]:
    """The two ends of a connection to `address`."""
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
