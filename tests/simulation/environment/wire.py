"""One direction of a simulated connection.

Invariants:
- Bytes arrive in the order in which they were sent, perhaps in other pieces. Nothing arrives after a lost write.
- While the link is blocked bytes wait, as TCP retransmits them, until the sender gives up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Protocol

from tests.simulation.environment.links import Faults, Links

PIECES_MAX = 4


class Mark(Enum):
    """Events in the stream besides bytes."""

    EOF = "the end of the stream"
    RESET = "a reset"
    HOLE = "a hole"


Content = bytes | Mark


class Side(Protocol):
    """One end of the connection."""

    def room(self) -> None:
        """The peer has read bytes."""
        ...

    def receive(self, content: Content) -> None:
        """Content has arrived."""
        ...

    def end(self, error: Exception) -> None:
        """The connection has ended with this error."""
        ...


class Ends(Protocol):
    """The connection that the wire belongs to."""

    def reset(self) -> None:
        """Reset the connection."""
        ...

    def gave_up(self, wire: Wire) -> None:
        """The sender gave up retransmitting."""
        ...


class Wire:
    """Carries what one end sends to the other."""

    def __init__(
        self, links: Links, source: str, target: str, name: str, sender: Side, receiver: Side, ends: Ends
    ) -> None:
        self.source = source
        self.target = target
        self.sender = sender
        self.receiver = receiver
        self.pending_bytes = 0
        self._links = links
        self.name = name
        self._ends = ends
        self._flight: deque[tuple[float, Content]] = deque()
        """The content in flight with its earliest arrival time, in order."""
        self._arrival: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._cut = False
        self._sent_s = 0.0

    def copies(self) -> int:
        """The number of copies of the next write."""
        duplicated = self._links.chance(self._faults.duplicate)
        return 2 if duplicated else 1

    def send(self, data: bytes) -> None:
        """Send bytes, with the link's faults."""
        if self._cut:
            return
        self._trace(f"sends {len(data)} bytes")
        if self._links.chance(self._faults.reset):
            self._ends.reset()
            return
        if self._links.chance(self._faults.drop):
            self._launch(Mark.HOLE)
            self._begin_giving_up()
        for piece in self._pieces(data):
            self._launch(piece)

    def mark(self, mark: Mark) -> None:
        """Send a mark after the sent bytes. A reset also passes a cut wire."""
        if not self._cut or mark is Mark.RESET:
            self._launch(mark)

    def read(self, size: int) -> None:
        """The receiver has read `size` bytes, which makes room in the window."""
        if not self._cut:
            self.pending_bytes -= size
        self._links.loop.call_soon(self.sender.room, context=self._links.context)

    def cut(self) -> None:
        """Drop the content in flight and all later content."""
        self._cut = True
        self.drop_flight()
        self.pending_bytes = 0

    def drop_flight(self) -> None:
        """Drop the content in flight, as if it had not been sent."""
        self.pending_bytes -= sum(len(content) for _, content in self._flight if isinstance(content, bytes))
        self._flight.clear()
        self._stop_giving_up()
        if self._arrival:
            self._arrival.cancel()
            self._arrival = None

    def link_changed(self) -> None:
        """Retransmit after a partition; stop the give-up timer if packets pass in both directions."""
        if self._answered and all(content is not Mark.HOLE for _, content in self._flight):
            self._stop_giving_up()
        if self._flight and not self._arrival and self._links.reaches(self.source, self.target):
            _, content = self._flight.popleft()
            self._flight.appendleft((self._links.loop.time() + self._latency_s(), content))
            self._await_arrival()

    @property
    def _faults(self) -> Faults:
        return self._links.faults_of(self.source, self.target)

    @property
    def _answered(self) -> bool:
        """Whether packets pass in both directions."""
        return self._links.reaches(self.source, self.target) and self._links.reaches(self.target, self.source)

    def _latency_s(self) -> float:
        return self._links.latency_s(self.source, self.target)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        if len(data) < 2 or not self._links.chance(self._faults.split):
            yield data
            return
        random = self._links.random
        cuts = sorted({0, len(data), *(random.randrange(1, len(data)) for _ in range(random.randrange(1, PIECES_MAX)))})
        for begin, end in pairwise(cuts):
            yield data[begin:end]

    def _launch(self, content: Content) -> None:
        size = len(content) if isinstance(content, bytes) else 0
        self.pending_bytes += size
        self._sent_s = max(self._sent_s, self._links.loop.time()) + size / self._faults.bytes_per_s
        self._flight.append((self._sent_s + self._latency_s(), content))
        self._await_arrival()

    def _await_arrival(self) -> None:
        if self._flight and not self._arrival and self._flight[0][1] is not Mark.HOLE:
            self._arrival = self._links.loop.call_at(self._flight[0][0], self._arrive, context=self._links.context)

    def _arrive(self) -> None:
        self._arrival = None
        if not self._answered:
            self._begin_giving_up()
        if self._links.reaches(self.source, self.target):
            self._hand_over(self._flight.popleft()[1])
            self._await_arrival()
        elif self._flight[0][1] is Mark.RESET:
            self._flight.popleft()  # a reset is not retransmitted
        else:
            self._trace("is blocked")

    def _hand_over(self, content: Content) -> None:
        behind = self._flight[0] if self._flight else (0.0, Mark.HOLE)
        if isinstance(content, bytes) and isinstance(behind[1], bytes) and self._links.chance(self._faults.merge):
            self._flight[0] = (behind[0], content + behind[1])
            return
        self._trace(f"brings {content.value if isinstance(content, Mark) else f'{len(content)} bytes'}")
        self.receiver.receive(content)

    def _begin_giving_up(self) -> None:
        if not self._giving_up and not self._cut:
            after_s = self._links.draw(self._faults.give_up_after_s)
            self._giving_up = self._links.loop.call_later(after_s, self._give_up, context=self._links.context)

    def _stop_giving_up(self) -> None:
        if self._giving_up:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._trace("gives up")
        self._ends.gave_up(self)

    def _trace(self, what: str) -> None:
        self._links.trace(f"{self.name} {what}")
