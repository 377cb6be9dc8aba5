"""A simulated connection: two transports and the wires between them.

A reset or kill reaches each end at its own time, and only if packets can reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forged.net.transport.port import Peer
from tests.simulation.environment.links import Links
from tests.simulation.environment.loop import Execution
from tests.simulation.environment.transport import SimulatedTransport, reset_by_peer, timed_out
from tests.simulation.environment.wire import Mark, Wire

RESET_AT_DEATH = 0.5
"""The probability that the kernel of a killed process resets a connection instead of closing it."""


class Process(Protocol):
    """The owner of an end of a connection."""

    execution: Execution


@dataclass(frozen=True, slots=True)
class End:
    """One end of a connection: its process, and its peer."""

    process: Process
    host: str
    peer: Peer
    extra: Mapping[str, Any]


class Connection:
    """A connection between two processes."""

    def __init__(
        self, links: Links, name: str, client: End, server: End, on_closed: Callable[[Connection], None]
    ) -> None:
        self._links = links
        self._on_closed = on_closed
        self.client_host = client.host
        self._ends = (client, server)
        self.client, self.server = (
            SimulatedTransport(links.loop, end.process.execution, end.peer, end.extra, self._end_closed)
            for end in (client, server)
        )
        there = Wire(links, client.host, server.host, f"{name} >", self.client, self.server, self)
        back = Wire(links, server.host, client.host, f"{name} <", self.server, self.client, self)
        self.client.attach(there, back)
        self.server.attach(back, there)
        self._wires = (there, back)

    def reset(self) -> None:
        """Reset the connection; each end is told at its own time."""
        self._links.trace(f"{self._wires[0].name} is reset")
        for wire in self._wires:
            wire.cut()
            noticed_after_s = self._links.latency_s(wire.source, wire.target)
            self._later(noticed_after_s, wire, reset_by_peer())

    def gave_up(self, wire: Wire) -> None:
        """The wire's sender ends the connection; the other end is told if it can be reached."""
        self._silence(wire)
        wire.sender.end(timed_out())
        wire.mark(Mark.RESET)

    def kill(self, process: object, *, host_gone: bool, unwritten: float = 0.0) -> None:
        """Close the ends of a killed process; the peers are told unless the host is gone.

        `unwritten`: the probability that the process was killed just before it wrote what is in flight.
        """
        for end, transport, wire in zip(self._ends, (self.client, self.server), self._wires, strict=True):
            if end.process is process:
                if host_gone:
                    self._silence(wire)
                if self._links.chance(unwritten):
                    wire.drop_flight()
                transport.die(reset=self._links.chance(RESET_AT_DEATH))

    def link_changed(self) -> None:
        """A partition began or ended."""
        for wire in self._wires:
            wire.link_changed()

    def _silence(self, wire: Wire) -> None:
        """Cut the wire; its receiver may detect it by keepalive."""
        wire.cut()
        keepalive_s = self._links.faults_of(wire.source, wire.target).keepalive_s
        if keepalive_s:
            self._later(self._links.draw(keepalive_s), wire, timed_out())

    def _later(self, seconds: float, wire: Wire, error: Exception) -> None:
        self._links.loop.call_later(seconds, wire.receiver.end, error, context=self._links.context)

    def _end_closed(self) -> None:
        if self.client.closed and self.server.closed:
            self._on_closed(self)
