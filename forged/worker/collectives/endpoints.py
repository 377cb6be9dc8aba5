"""How a rank reaches the hub: rank 0 within its process, every other rank over one connection.

Invariants:
- A rank that leaves says so. A rank whose connection ends without that is lost, and the world ends at all ranks with
  the name of the lost worker.
- The hub keeps one connection per member and no task. Only large sums are computed in a thread, so that heartbeats
  continue meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, describe
from forged.worker.collectives import arrays
from forged.worker.collectives.hub import Collected, Hub, receives
from forged.worker.collectives.world import Ending, World, aborted
from forged.worker.transport.peer_link import AcceptedLink, PeerLink, frame_of
from forged.worker.transport.peer_messages import (
    Aborted,
    Answer,
    Contribution,
    Kind,
    Left,
    PeerMessage,
    Result,
    Started,
)

LEAVE_TIMEOUT_S = 1.0
"""How long the last message may take to be sent."""
APART_BYTES = 16 << 20
"""Sums over more bytes are computed in a thread; this many take under half a millisecond from warm memory."""


class HubEndpoint:
    """Rank 0's endpoint, to which all other ranks connect."""

    def __init__(self, world: World, digest: bytes, tasks: TaskGroup) -> None:
        self.settled = anyio.Event()
        """Set when all members are connected, or the world has ended."""
        self._world = world
        self._digest = digest
        self._tasks = tasks
        self._hub = Hub(world.names)
        self._links: dict[int, AcceptedLink] = {}
        self._incarnations: dict[int, bytes] = {}
        self._ranks: dict[PeerLink, int] = {}
        self._left: list[int] = []
        self._is_started = False
        self._start_if_complete()

    @property
    def absent(self) -> str:
        """The members that have not connected yet, in words."""
        return self._hub.listed(self._absentees)

    @property
    def first_absent(self) -> str:
        """The id of a member that has not connected yet; empty when all have."""
        return next((self._world.names[rank] for rank in self._absentees), "")

    @property
    def _absentees(self) -> list[int]:
        return [] if self._is_started else [rank for rank in range(1, self._world.size) if rank not in self._links]

    def admit(self, link: AcceptedLink, answer: Answer) -> None:
        """Take a member's connection, or refuse it."""
        self._check(answer)
        earlier = self._links.pop(answer.rank, None)
        if earlier is not None:
            del self._ranks[earlier]
            earlier.abort()
        link.receiver = self
        self._links[answer.rank] = link
        self._incarnations[answer.rank] = answer.incarnation
        self._ranks[link] = answer.rank
        self._start_if_complete()

    def _check(self, answer: Answer) -> None:
        name = self._world.names[answer.rank] if 0 < answer.rank < self._world.size else None
        if answer.worker != name or answer.world != self._digest:
            raise RequestRefused(
                "topology_differs",
                f"{answer.worker} has another topology for generation {answer.number}",
                "ask the daemon for the topology",
            )
        if self._is_started or self._world.ending is not None:
            raise Unavailable(
                "generation_over", f"the world of generation {answer.number} has begun without this worker"
            )
        if self._incarnations.get(answer.rank, answer.incarnation) != answer.incarnation:
            raise RequestRefused(
                "incarnation_differs", f"another incarnation of {answer.worker} is connected already", "end one of them"
            )

    def _start_if_complete(self) -> None:
        if len(self._links) < self._world.size - 1:
            return
        self._is_started = True
        frame = frame_of(Started(self._world.generation))
        for link in self._links.values():
            link.write(frame)
        self.settled.set()

    # Messages of members.

    def on_message(self, link: PeerLink, message: PeerMessage) -> None:
        """A member has sent a message."""
        rank = self._ranks.get(link)
        if rank is None or self._world.ending is not None:
            return
        if isinstance(message, Contribution) and self._is_started:
            self._take(rank, message)
        elif isinstance(message, Aborted):
            missing = f"; {self._hub.missing()} had not called" if self._hub.is_waiting else ""
            # A member that gives up waiting for the world does not know which member is missing.
            peer = message.peer or self.first_absent
            self.end(Ending(message.code, f"{message.reason}{missing}", peer, message.fix))
        elif isinstance(message, Left):
            self._leave(rank)
        else:
            raise PeerError("message_unexpected", f"{type(message).__name__} is not for a hub to receive")

    def on_end(self, link: PeerLink, error: ForgedError) -> None:
        """A member's connection has ended."""
        rank = self._ranks.pop(link, None)
        if rank is None or rank in self._left:
            return
        if self._is_started:
            self.end(aborted(f"{self._hub.describe(rank)} was lost: {error.message}", self._world.names[rank]))
        else:
            del self._links[rank], self._incarnations[rank]

    def _leave(self, rank: int) -> None:
        self._left.append(rank)
        if self._hub.is_waiting:
            self._end_without_those_who_left()

    def _end_without_those_who_left(self) -> None:
        self.end(aborted(f"{self._hub.listed(self._left)} left the world in good order"))

    # Rank 0 itself.

    def contribute(self, contribution: Contribution) -> None:
        """Take rank 0's own part of a collective."""
        self._take(0, contribution)

    def waiting_for(self) -> str:
        """The ranks that have not called yet, in words."""
        return self._hub.missing() if self._hub.is_waiting else ""

    def end(self, ending: Ending) -> None:
        """Abort the world at all ranks."""
        if self._world.ending is not None:
            return
        frame = frame_of(Aborted(ending.code, ending.reason, ending.peer, ending.fix))
        self._world.on_over(ending)
        self._dismiss(frame)

    async def leave(self) -> None:
        """Tell all members that the hub leaves."""
        links = list(self._links.values())
        self._dismiss(frame_of(Left()))
        await gone(links)

    def _dismiss(self, frame: bytes) -> None:
        for link in self._links.values():
            link.write(frame)
            link.close()
        self.settled.set()

    # Collectives.

    def _take(self, rank: int, contribution: Contribution) -> None:
        try:
            collected = self._hub.take(rank, contribution)
        except RequestRefused as error:
            self.end(Ending(error.code, error.message, fix=error.fix))
        except PeerError as error:
            self.end(aborted(error.message))
        else:
            if collected is not None:
                self._finish(collected)
            elif self._left:
                self._end_without_those_who_left()

    def _finish(self, collected: Collected) -> None:
        if collected.call.kind is not Kind.ALL_REDUCE:
            self._tell(collected, collected.full)
        elif collected.brought_bytes > APART_BYTES:
            self._tasks.start_soon(self._reduce_apart, collected)
        else:
            self._told_of(collected, _reduced(collected, self._world.names[0]))

    async def _reduce_apart(self, collected: Collected) -> None:
        self._told_of(collected, await to_thread.run_sync(_reduced, collected, self._world.names[0]))

    def _told_of(self, collected: Collected, outcome: Result | Ending) -> None:
        if isinstance(outcome, Ending):
            self.end(outcome)
        elif self._world.ending is None:
            self._tell(collected, outcome)

    def _tell(self, collected: Collected, full: Result) -> None:
        frames: dict[bool, bytes] = {}
        for rank, link in self._links.items():
            is_full = receives(collected.call, rank)
            if is_full not in frames:
                frames[is_full] = frame_of(full if is_full else collected.bare)
            link.write(frames[is_full])
        self._world.on_result(full if receives(collected.call, 0) else collected.bare)


class MemberEndpoint:
    """The endpoint of every other rank."""

    def __init__(self, world: World) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.link: PeerLink | None = None
        """The connection to the hub, once it has accepted this rank."""
        self._world = world

    def await_start(self) -> None:
        """Begin another try to connect to the hub."""
        self.started, self.link = asyncio.get_running_loop().create_future(), None

    def on_message(self, link: PeerLink, message: PeerMessage) -> None:
        """The hub has sent a message."""
        if isinstance(message, Result):
            self._world.on_result(message)
        elif isinstance(message, Started):
            if not self.started.done():
                self.started.set_result(None)
        elif isinstance(message, Aborted):
            self._over(Ending(message.code, message.reason, message.peer, message.fix))
            link.close()
        elif isinstance(message, Left):
            self._over(aborted(f"{self._hub_name} left the world in good order"))
            link.close()
        else:
            raise PeerError("message_unexpected", f"{type(message).__name__} is not for a member to receive")

    def on_end(self, link: PeerLink, error: ForgedError) -> None:
        """The connection to the hub has ended."""
        if link is not self.link and self.link is not None:
            return
        if not self.started.done():
            self._fail_start(error)
        elif self._world.ending is None:
            self._world.on_over(aborted(f"{self._hub_name} was lost: {error.message}", self._world.names[0]))

    def contribute(self, contribution: Contribution) -> None:
        """Send the rank's part of a collective to the hub."""
        assert self.link is not None
        self.link.send(contribution)

    def waiting_for(self) -> str:
        """Empty: only the hub knows."""
        return ""

    def end(self, ending: Ending) -> None:
        """Abort the world, through the hub."""
        self._over(ending)
        if self.link is not None:
            self.link.send(Aborted(ending.code, ending.reason, ending.peer, ending.fix))
            self.link.close()

    async def leave(self) -> None:
        """Tell the hub, and close the connection."""
        if self.link is not None:
            self.link.send(Left())
            self.link.close()
            await gone([self.link])

    @property
    def _hub_name(self) -> str:
        return f"{self._world.names[0]} (rank 0)"

    def _over(self, ending: Ending) -> None:
        self._world.on_over(ending)
        if not self.started.done():
            self._fail_start(ending.error())

    def _fail_start(self, error: ForgedError) -> None:
        self.started.set_exception(error)
        self.started.exception()  # retrieved, so that asyncio does not log it


async def gone(links: Iterable[PeerLink]) -> None:
    """Wait until the last messages have been sent, for a moment at most."""
    over = [link.over for link in links]
    if over:
        await asyncio.wait(over, timeout=LEAVE_TIMEOUT_S)


def _reduced(collected: Collected, hub: str) -> Result | Ending:
    assert collected.call.operation is not None
    try:
        value = arrays.reduce(collected.call.operation, collected.brought)
    except Exception as error:  # noqa: BLE001 - whatever fails, memory for example, all ranks must be told
        return aborted(f"{collected.call} #{collected.number} could not be computed: {describe(error)}", hub)
    return Result(collected.number, (value,))
