"""Two simulated transports and the wires between them.

Law: what befalls a connection as a whole is told to each end apart, at its own time and only if it can be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forged.net.transport.port import Peer
from tests.simulation.links import Links
from tests.simulation.loop import Execution
from tests.simulation.transport import SimulatedTransport, reset_by_peer, timed_out
from tests.simulation.wire import Mark, Wire

RESET_AT_DEATH = 0.5
"""How often the kernel of a killed process resets what it could as well have closed in order."""


class Process(Protocol):
    """What holds an end of a connection."""

    execution: Execution


@dataclass(frozen=True, slots=True)
class End:
    """Whose an end of a connection is, and what it sees of the other."""

    process: Process
    host: str
    peer: Peer
    extra: Mapping[str, Any]


class Connection:
    """What the network knows of two ends that talk."""

    def __init__(
        self, links: Links, name: str, client: End, server: End, on_closed: Callable[[Connection], None]
    ) -> None:
        self._links = links
        self._on_closed = on_closed
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
        """Break in the middle: both ends notice, each at its own time."""
        self._links.trace(f"{self._wires[0].name} is reset")
        for wire in self._wires:
            wire.cut()
            noticed_after_s = self._links.latency_s(wire.source, wire.target)
            self._later(noticed_after_s, wire, reset_by_peer())

    def gave_up(self, wire: Wire) -> None:
        """Its sender takes the other end for dead. The other end learns of it if that can still be told."""
        self._silence(wire)
        wire.sender.end(timed_out())
        wire.mark(Mark.RESET)

    def kill(self, process: object, *, host_gone: bool) -> None:
        """Take the ends that belong to a process: its kernel tells the other end, unless it is gone with the host."""
        for end, transport, wire in zip(self._ends, (self.client, self.server), self._wires, strict=True):
            if end.process is process:
                if host_gone:
                    self._silence(wire)
                transport.die(reset=self._links.chance(RESET_AT_DEATH))

    def link_changed(self) -> None:
        """A partition came or went."""
        for wire in self._wires:
            wire.link_changed()

    def _silence(self, wire: Wire) -> None:
        """Nothing more comes over this wire, which its receiver may notice by keepalive."""
        wire.cut()
        keepalive_s = self._links.faults_of(wire.source, wire.target).keepalive_s
        if keepalive_s:
            self._later(self._links.draw(keepalive_s), wire, timed_out())

    def _later(self, seconds: float, wire: Wire, error: Exception) -> None:
        self._links.loop.call_later(seconds, wire.receiver.end, error, context=self._links.context)

    def _end_closed(self) -> None:
        if self.client.closed and self.server.closed:
            self._on_closed(self)
