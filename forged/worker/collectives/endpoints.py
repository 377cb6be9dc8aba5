"""How a rank reaches the hub: rank 0 within its process, every other rank over one connection.

Invariants:
- A rank that leaves says so. A rank whose connection ends without that is lost, and the world ends at all ranks with
  the name of the lost worker.
- The hub receives the messages of all members in one task. Only large sums are computed in a thread, so that
  heartbeats continue meanwhile.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, describe
from forged.worker.collectives import arrays
from forged.worker.collectives.hub import Collected, Hub
from forged.worker.collectives.store import StoreCalls, StoreValues
from forged.worker.errors import ABORTED, STEP_VOIDED, CollectiveAborted, CollectiveMismatch
from forged.worker.transport.peer_link import UNREAD_IN_WORLD_MAX, AcceptedLink, Inbox, PeerLink, frame_of
from forged.worker.transport.peer_messages import (
    Aborted,
    Answer,
    CollectiveCall,
    Contribution,
    Kind,
    Left,
    PeerMessage,
    Result,
    Started,
    StoreAnswer,
    StoreCall,
    Value,
)

LEAVE_TIMEOUT_S = 1.0
"""How long the last message may take to be sent."""
APART_BYTES = 16 << 20
"""Sums over more bytes are computed in a thread; this many take under half a millisecond from warm memory."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a world has ended."""

    code: str
    reason: str
    peer: str = ""
    fix: str = ""
    is_departure: bool = False
    """Whether a member has left in good order."""

    def error(self) -> ForgedError:
        """The error of every later call."""
        if self.code in (ABORTED, STEP_VOIDED):
            return CollectiveAborted(self.reason, self.peer, self.code)
        return CollectiveMismatch(self.code, self.reason, self.fix)


def aborted(reason: str, peer: str = "") -> Ending:
    """The ending of an aborted world."""
    return Ending(ABORTED, reason, peer)


def departed(who: str) -> Ending:
    """The ending of a world that a member has left in good order."""
    return Ending(ABORTED, f"{who} left the world in good order", is_departure=True)


class Endpoint(ABC):
    """One rank's part in a world: its present call, and how the world has ended."""

    def __init__(self, generation: int, rank: int, names: Sequence[str], tasks: TaskGroup) -> None:
        self.generation = generation
        self.rank = rank
        self.names = tuple(names)
        """The ids of the workers, by rank."""
        self.ending: Ending | None = None
        """Why the world has ended, the first reason; None while it has not."""
        self.on_over: Callable[[Ending], object] = lambda ending: None
        """Called at once when no further collective will complete. The hub calls it when a member has left, too, though
        the world ends with the next collective only."""
        self._tasks = tasks
        self._inbox = Inbox(UNREAD_IN_WORLD_MAX)
        self.store_calls = StoreCalls(self._send_store_call)
        self._receiving = anyio.CancelScope()
        """The task that handles messages between two calls; it ends with the world."""
        self._number = 0
        self._is_calling = False
        self._result: Result | None = None
        """The result of the present call, once it is there."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    async def call(
        self, call: CollectiveCall, value: Value | None, stop_wanted: int, timeout_s: float | None
    ) -> Result:
        """Take part in a collective; the result of the hub."""
        if self._is_calling:
            raise RequestRefused(
                "collective_in_progress",
                f"{call} was called while another collective waits",
                "await the other collective first",
            )
        self._number += 1
        self._is_calling, self._result = True, None
        try:
            # What has arrived before this call counts before it.
            self._handle_arrived()
            if self.ending is None:
                self._contribute(Contribution(self._number, call, value, stop_wanted))
            return await self._answered(call, timeout_s)
        finally:
            self._is_calling = False

    async def _answered(self, call: CollectiveCall, timeout_s: float | None) -> Result:
        try:
            if self._result is not None:
                # The other tasks of the loop get a turn, though the result was there at once.
                await asyncio.sleep(0)
            with anyio.move_on_after(timeout_s):
                while self._result is None and self.ending is None:
                    await self._inbox.wait()
                    self._handle_arrived()
        except asyncio.CancelledError:
            if self._result is None:
                self._give_up(call, "was cancelled")
            raise
        if self._result is not None:
            return self._result
        if self.ending is None:
            self._give_up(call, f"was not answered within {timeout_s:g} s")
        assert self.ending is not None
        raise self.ending.error()

    def _give_up(self, call: CollectiveCall, why: str) -> None:
        missing = self._missing()
        waiting_for = f", waiting for {missing}" if missing else ""
        self.abort(f"{call} #{self._number} of {self.names[self.rank]} (rank {self.rank}) {why}{waiting_for}")

    def abort(self, reason: str, peer: str = "") -> None:
        """Abort the world at all ranks."""
        if self.ending is None:
            self._end(aborted(reason, peer))

    def void(self, reason: str) -> None:
        """End the world at all ranks, because its step is void; no worker is to blame."""
        if self.ending is None:
            self._end(Ending(STEP_VOIDED, reason))

    async def leave(self) -> None:
        """Leave; the world ends for the other ranks at their next collective."""
        if self.ending is None:
            self._over(departed("this worker"))
            await self._leave()

    async def _receive(self) -> None:
        with self._receiving:
            while self.ending is None:
                await self._inbox.wait()
                self._handle_arrived()

    def _handle_arrived(self) -> None:
        while self.ending is None and (arrived := self._inbox.pop()) is not None:
            link, message = arrived
            try:
                self._handle(link, message)
            except ForgedError as error:
                link.fail(error)
            except Exception as error:  # noqa: BLE001 - memory for example: this world ends, and not the worker
                self._end(aborted(f"a message of this world could not be handled: {describe(error)}"))

    def _deliver(self, result: Result) -> None:
        if self._is_calling and self._result is None and self.ending is None and result.number == self._number:
            self._result = result
            self._inbox.wake()

    def _over(self, ending: Ending) -> None:
        """The world has ended here; the first reason counts."""
        if self.ending is not None:
            return
        self.ending = ending
        self._receiving.cancel()
        self._inbox.wake()
        self.store_calls.end(ending.error())
        self.on_over(ending)

    @abstractmethod
    def _handle(self, link: PeerLink, message: PeerMessage | ForgedError) -> None:
        """Act on a message, or on the end of a connection."""

    @abstractmethod
    def _contribute(self, contribution: Contribution) -> None:
        """Send the rank's part of a collective; the result is delivered later, or at once."""

    @abstractmethod
    def _send_store_call(self, call: StoreCall) -> None:
        """Bring a call of the store to the hub."""

    @abstractmethod
    def _missing(self) -> str:
        """The ranks that have not called yet, in words; empty where that is unknown."""

    @abstractmethod
    def _end(self, ending: Ending) -> None:
        """End the world at all ranks."""

    @abstractmethod
    async def _leave(self) -> None:
        """Tell the other ranks that this one leaves."""


class HubEndpoint(Endpoint):
    """Rank 0's endpoint, to which all other ranks connect."""

    def __init__(self, generation: int, names: Sequence[str], digest: bytes, tasks: TaskGroup) -> None:
        super().__init__(generation, 0, names, tasks)
        self.settled = anyio.Event()
        """Set when all members are connected, or the world has ended."""
        self._digest = digest
        self._hub = Hub(names)
        self._values = StoreValues()
        self._links: dict[int, AcceptedLink] = {}
        self._session_ids: dict[int, bytes] = {}
        self._ranks: dict[PeerLink, int] = {}
        self._left: list[int] = []
        self._is_started = False
        tasks.start_soon(self._receive)
        self._start_if_complete()

    @property
    def absent(self) -> str:
        """The members that have not connected yet, in words."""
        return self._hub.listed(self._absentees)

    @property
    def first_absent(self) -> str:
        """The id of a member that has not connected yet; empty when all have."""
        return next((self.names[rank] for rank in self._absentees), "")

    @property
    def _absentees(self) -> list[int]:
        return [] if self._is_started else [rank for rank in range(1, self.size) if rank not in self._links]

    def admit(self, link: AcceptedLink, answer: Answer) -> None:
        """Take a member's connection, or refuse it."""
        self._check(answer)
        earlier = self._links.pop(answer.rank, None)
        if earlier is not None:
            del self._ranks[earlier]
            earlier.abort()
        link.inbox = self._inbox
        self._links[answer.rank] = link
        self._session_ids[answer.rank] = answer.session_id
        self._ranks[link] = answer.rank
        self._start_if_complete()

    def _check(self, answer: Answer) -> None:
        name = self.names[answer.rank] if 0 < answer.rank < self.size else None
        if answer.worker != name or answer.world != self._digest:
            raise RequestRefused(
                "topology_differs",
                f"{answer.worker} has another topology for generation {answer.number}",
                "ask the daemon for the topology",
            )
        if self._is_started or self.ending is not None:
            raise Unavailable(
                "generation_over", f"the world of generation {answer.number} has begun without this worker"
            )
        if self._session_ids.get(answer.rank, answer.session_id) != answer.session_id:
            raise RequestRefused(
                "session_differs",
                f"another session of {answer.worker} is connected already",
                "end one of them",
            )

    def _start_if_complete(self) -> None:
        if len(self._links) < self.size - 1:
            return
        self._is_started = True
        frame = frame_of(Started(self.generation))
        for link in self._links.values():
            link.write(frame)
        self.settled.set()

    # Messages of members.

    def _handle(self, link: PeerLink, message: PeerMessage | ForgedError) -> None:
        rank = self._ranks.get(link)
        if rank is None:
            # An earlier connection of a member that has connected again.
            return
        if isinstance(message, ForgedError):
            self._lose(rank, link, message)
        elif isinstance(message, Contribution) and self._is_started:
            self._take(rank, message)
        elif isinstance(message, StoreCall) and self._is_started:
            self._take_store_call(rank, message)
        elif isinstance(message, Aborted):
            self._end(self._ending_of(message))
        elif isinstance(message, Left):
            self._left.append(rank)
            self.on_over(departed(self._hub.describe(rank)))
            if self._hub.is_waiting:
                self._end_without_those_who_left()
        else:
            raise PeerError("message_unexpected", f"{type(message).__name__} is not for a hub to receive")

    def _ending_of(self, message: Aborted) -> Ending:
        if message.code == STEP_VOIDED:
            return Ending(STEP_VOIDED, message.reason)
        missing = f"; {self._hub.missing()} had not called" if self._hub.is_waiting else ""
        # A member that gives up waiting for the world does not know which member is missing.
        peer = message.peer or self.first_absent
        return Ending(message.code, f"{message.reason}{missing}", peer, message.fix)

    def _lose(self, rank: int, link: PeerLink, error: ForgedError) -> None:
        """A member's connection has ended."""
        del self._ranks[link]
        if rank in self._left:
            return
        if self._is_started:
            self._end(aborted(f"{self._hub.describe(rank)} was lost: {error.message}", self.names[rank]))
        else:
            del self._links[rank], self._session_ids[rank]

    def _end_without_those_who_left(self) -> None:
        self._end(aborted(f"{self._hub.listed(self._left)} left the world in good order"))

    def _take_store_call(self, rank: int, call: StoreCall) -> None:
        for to, answer in self._values.take(rank, call):
            if to == 0:
                self.store_calls.take(answer)
            else:
                self._links[to].send(answer)

    # Rank 0 itself.

    def _send_store_call(self, call: StoreCall) -> None:
        self._take_store_call(0, call)

    def _contribute(self, contribution: Contribution) -> None:
        self._take(0, contribution)

    def _missing(self) -> str:
        return self._hub.missing() if self._hub.is_waiting else ""

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            # The other ranks are told before the subscribers of this one are called.
            self._dismiss(frame_of(Aborted(ending.code, ending.reason, ending.peer, ending.fix)))
            self._over(ending)

    async def _leave(self) -> None:
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
            self._end(Ending(error.code, error.message, fix=error.fix))
        except PeerError as error:
            self._end(aborted(error.message))
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
            self._told_of(collected, _reduced(collected, self.names[0]))

    async def _reduce_apart(self, collected: Collected) -> None:
        self._told_of(collected, await to_thread.run_sync(_reduced, collected, self.names[0]))

    def _told_of(self, collected: Collected, outcome: Result | Ending) -> None:
        if isinstance(outcome, Ending):
            self._end(outcome)
        elif self.ending is None:
            self._tell(collected, outcome)

    def _tell(self, collected: Collected, full: Result) -> None:
        frames: dict[bool, bytes] = {}
        for rank, link in self._links.items():
            is_full = collected.call.receives(rank)
            if is_full not in frames:
                frames[is_full] = frame_of(full if is_full else collected.bare)
            link.write(frames[is_full])
        self._deliver(full if collected.call.receives(0) else collected.bare)


class MemberEndpoint(Endpoint):
    """The endpoint of every other rank."""

    link: PeerLink | None = None
    """The connection to the hub, once it has accepted this rank."""

    async def start(self, link: PeerLink, inbox: Inbox) -> None:
        """Wait until all members are connected to the hub; raises if the world ends before, or the connection does."""
        self.link, self._inbox = link, inbox
        try:
            while not isinstance(message := await inbox.next(), Started):
                self._handle(link, message)
                if self.ending is not None:
                    raise self.ending.error()
        except ForgedError:
            link.close()
            raise
        self._tasks.start_soon(self._receive)

    def _handle(self, link: PeerLink, message: PeerMessage | ForgedError) -> None:
        if isinstance(message, Result):
            self._deliver(message)
        elif isinstance(message, StoreAnswer):
            self.store_calls.take(message)
        elif isinstance(message, ForgedError):
            self._over(aborted(f"{self._hub_name} was lost: {message.message}", self.names[0]))
        elif isinstance(message, Aborted):
            self._over(Ending(message.code, message.reason, message.peer, message.fix))
            link.close()
        elif isinstance(message, Left):
            self._over(departed(self._hub_name))
            link.close()
        else:
            raise PeerError("message_unexpected", f"{type(message).__name__} is not for a member to receive")

    @property
    def _hub_name(self) -> str:
        return f"{self.names[0]} (rank 0)"

    def _contribute(self, contribution: Contribution) -> None:
        assert self.link is not None
        self.link.send(contribution)

    def _send_store_call(self, call: StoreCall) -> None:
        assert self.link is not None
        self.link.send(call)

    def _missing(self) -> str:
        return ""

    def _end(self, ending: Ending) -> None:
        if self.link is not None:
            self.link.send(Aborted(ending.code, ending.reason, ending.peer, ending.fix))
            self.link.close()
        self._over(ending)

    async def _leave(self) -> None:
        if self.link is not None:
            self.link.send(Left())
            self.link.close()
            await gone([self.link])


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
