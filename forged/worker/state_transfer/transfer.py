"""The state transfer between two workers: one offers its training state, the other fetches it.

Invariants:
- A state is packed when it is offered, so it is the state after a whole step. It is offered for one attempt at a
  rescale: a newer attempt supersedes it at both ends, and a withdrawn offer sends nothing more.
- A fetch that is repeated resumes at the first part that is not verified; the state counts when all parts are.
- A fetcher that connects before the offer waits for it.
- While a state arrives, the daemon is told how much has, and which worker is out of reach.
- A fetch that fails is repeated, unless TLS refuses the source or the state does not fit.
- A state that cannot be packed fails the worker that fetches it, with the path of the value. Its giver trains on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random

import anyio
from anyio.abc import TaskGroup

from forged import retry
from forged.elastic.messages import RescaleSynchronising
from forged.elastic.model import WorkerId
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, describe, without_traceback
from forged.log import Log
from forged.net.transport.tls import TLS_FAILED
from forged.retry import RetryPolicy
from forged.worker.errors import is_temporary
from forged.worker.registration import Registration
from forged.worker.state_transfer.encoding import Arriving, pack
from forged.worker.transport.bulk_channel import THREADS_MAX, BulkChannel, BulkTransport, VerifiedParts
from forged.worker.transport.peer_link import AcceptedLink, DialledLink, Dialler, Inbox, PeerLink
from forged.worker.transport.peer_messages import (
    HEAD_BYTES_MAX,
    PARTS_MAX,
    Purpose,
    StateOffer,
    StateReady,
    StateWanted,
)
from forged.worker.worker_state.progress import TrainingProgress

OFFER_WAIT_S = 10.0
"""How long a fetcher waits for the offer."""
ANSWER_TIMEOUT_S = 5.0
"""How long the peer may take for an answer that needs no work."""
TURN_TIMEOUT_S = 600.0
"""How long a fetcher waits while the source serves other fetchers."""
FETCHING = RetryPolicy(attempts=8, delay_s=0.05, exponential=True, delay_max_s=1.0, jitter=0.5)

Into = Callable[[bytes], Sequence[memoryview]]
"""Takes a state's head, and returns memory for every part."""

_FINAL_CODES = frozenset({"state_not_offered", "attempt_over"})


@dataclass(slots=True, eq=False)
class _Offer:
    attempt: int
    head: bytes
    parts: list[memoryview]
    refusal: ForgedError | None = None
    """Why the state cannot be sent; a fetcher gets this error instead."""
    scopes: dict[PeerLink, anyio.CancelScope] = field(default_factory=dict)
    channels: dict[BulkChannel, None] = field(default_factory=dict)
    """In the order of the connections, in which they are cut."""

    @contextmanager
    def served(self, link: PeerLink, scope: anyio.CancelScope) -> Iterator[None]:
        """Serve a fetcher inside the block, until the scope is cancelled."""
        self.scopes[link] = scope
        try:
            yield
        finally:
            del self.scopes[link]

    def cut(self) -> None:
        """Stop all transfers of this offer."""
        for channel in self.channels:
            channel.cut()
        for scope in self.scopes.values():
            scope.cancel()


class StateServer:
    """Serves this worker's state to fetchers."""

    def __init__(self, carrier: BulkTransport, tasks: TaskGroup, log: Log, offer_wait_s: float = OFFER_WAIT_S) -> None:
        self._carrier = carrier
        self._tasks = tasks
        self._log = log
        self._offer_wait_s = offer_wait_s
        self._offer: _Offer | None = None
        self._newest = -1
        self._offered = anyio.Event()
        self._turns = anyio.CapacityLimiter(THREADS_MAX)

    def descriptors(self) -> list[int]:
        """The file descriptors of all transfers."""
        channels = self._offer.channels if self._offer is not None else ()
        return [fd for channel in channels if (fd := channel.descriptor()) is not None]

    @contextmanager
    def offering(
        self, attempt: int, head: bytes, parts: Sequence[memoryview | bytes], refusal: ForgedError | None = None
    ) -> Iterator[None]:
        """Offer a state for an attempt inside the block, in which its memory must not change; or refuse to send one."""
        offer = _Offer(attempt, head, _checked(head, parts), refusal)
        is_taken = attempt == self._newest and self._offer is not None
        if attempt < self._newest or is_taken:
            raise _over(attempt, self._newest)
        if self._offer is not None:
            self._offer.cut()
        self._offer, self._newest = offer, attempt
        self._notify()
        try:
            yield
        finally:
            offer.cut()
            if self._offer is offer:
                self._offer = None

    def admit(self, link: AcceptedLink, attempt: int, worker: str) -> None:
        """Take a fetcher's connection."""
        inbox = link.inbox = Inbox(unread_max=1)
        self._tasks.start_soon(self._serve, link, inbox, attempt, worker)

    async def _serve(self, link: AcceptedLink, inbox: Inbox, attempt: int, worker: str) -> None:
        try:
            offer = await self._offer_for(attempt)
            if offer.refusal is not None:
                raise without_traceback(offer.refusal)
            with anyio.CancelScope() as scope, offer.served(link, scope):
                await self._give(offer, link, inbox)
            if scope.cancelled_caught:
                link.refuse(_over(attempt, self._newest))
        except ForgedError as error:
            self._log.info(
                "another worker did not fetch this worker's state", worker=worker, attempt=attempt, reason=error.message
            )
            link.refuse(error)
        finally:
            link.close()

    async def _give(self, offer: _Offer, link: AcceptedLink, inbox: Inbox) -> None:
        link.send(StateOffer(offer.head, tuple(part.nbytes for part in offer.parts)))
        wanted = await inbox.next(ANSWER_TIMEOUT_S)
        if not isinstance(wanted, StateWanted) or wanted.part > len(offer.parts):
            raise PeerError("message_unexpected", "the fetcher does not request parts of the offer")
        async with self._turns:
            link.send(StateReady())
            channel = await self._carrier.open(_handed_over(link))
            offer.channels[channel] = None
            try:
                await channel.give(offer.parts[wanted.part :])
            finally:
                offer.channels.pop(channel, None)
                channel.close()

    @property
    def is_giving(self) -> bool:
        """Whether the state is being sent to a fetcher."""
        return self._offer is not None and bool(self._offer.channels)

    async def _offer_for(self, attempt: int) -> _Offer:
        with anyio.move_on_after(self._offer_wait_s):
            while self._newest < attempt:
                await self._offered.wait()
        if self._offer is not None and self._offer.attempt == attempt:
            return self._offer
        if self._newest >= attempt:
            raise _over(attempt, self._newest)
        raise Unavailable(
            "state_not_offered",
            f"the state source offered no state for attempt {attempt} within {self._offer_wait_s:g} s",
            "fetch again later",
        )

    def _notify(self) -> None:
        offered, self._offered = self._offered, anyio.Event()
        offered.set()


class StateFetch:
    """Fetches states from other workers."""

    def __init__(
        self, carrier: BulkTransport, dialler: Dialler, source: Random, offer_wait_s: float = OFFER_WAIT_S
    ) -> None:
        self._carrier = carrier
        self._dialler = dialler
        self._random = source
        self._offer_wait_s = offer_wait_s
        self._attempt = -1
        self._scope: anyio.CancelScope | None = None
        self._channel: BulkChannel | None = None
        self._received = 0
        self.unreached: Unavailable | None = None
        """Why the source was not reached the last time; None when it was."""

    @property
    def received(self) -> int:
        """The bytes of states that have arrived."""
        return self._received + (0 if self._channel is None else self._channel.received)

    def descriptors(self) -> list[int]:
        """The file descriptor of the present transfer."""
        descriptor = None if self._channel is None else self._channel.descriptor()
        return [] if descriptor is None else [descriptor]

    async def fetch(self, source: WorkerId, attempt: int, into: Into) -> None:
        """Fetch the source's state for an attempt into the memory that `into` returns; a newer fetch ends this one."""
        if attempt < self._attempt:
            raise _over(attempt, self._attempt)
        if self._scope is not None:
            self._scope.cancel()
        self._attempt, self.unreached = attempt, None
        arriving = _Arriving(into)
        with anyio.CancelScope() as scope:
            self._scope = scope
            try:
                await retry.run(
                    FETCHING,
                    lambda: self._try(source, attempt, arriving),
                    sleep=anyio.sleep,
                    random=self._random.random,
                    retryable=lambda error: (
                        retry.is_retryable(error) and getattr(error, "code", "") not in _FINAL_CODES
                    ),
                )
            finally:
                if self._scope is scope:
                    self._scope = None
        if scope.cancelled_caught:
            raise _over(attempt, self._attempt)

    async def _try(self, source: WorkerId, attempt: int, arriving: _Arriving) -> None:
        inbox = Inbox(unread_max=1)
        try:
            link = await self._dialler.dial(source, Purpose.STATE, attempt, inbox)
        except Unavailable as error:
            self.unreached = error
            raise
        self.unreached = None
        try:
            offer = await inbox.next(self._offer_wait_s + ANSWER_TIMEOUT_S)
            if not isinstance(offer, StateOffer):
                raise PeerError("message_unexpected", f"{source} offers no state")
            arriving.prepare(offer)
            link.send(StateWanted(arriving.verified.count))
            if not isinstance(await inbox.next(TURN_TIMEOUT_S), StateReady):
                raise PeerError("message_unexpected", f"{source} does not send its state")
            await self._take(link, arriving)
        finally:
            if not link.lost:
                link.abort()

    async def _take(self, link: DialledLink, arriving: _Arriving) -> None:
        channel = self._channel = await self._carrier.open(_handed_over(link))
        try:
            await channel.take(arriving.missing(), arriving.verified)
        finally:
            self._channel = None
            self._received += channel.received
            channel.close()


class _Arriving:
    """A state that is being received."""

    def __init__(self, into: Into) -> None:
        self.verified = VerifiedParts()
        self._into = into
        self._offer: StateOffer | None = None
        self._parts: list[memoryview] = []

    def prepare(self, offer: StateOffer) -> None:
        """Get memory for the offered state."""
        if self._offer == offer:
            return
        self.verified, self._offer = VerifiedParts(), offer
        self._parts = [memoryview(part).cast("B") for part in self._into(offer.head)]
        sizes = tuple(part.nbytes for part in self._parts)
        if sizes != offer.sizes or any(part.readonly for part in self._parts):
            raise RequestRefused(
                "state_room_unfit",
                f"memory for {len(sizes)} parts of {sum(sizes)} bytes was returned, and"
                f" {len(offer.sizes)} of {sum(offer.sizes)} are offered",
                "return writeable memory for every part, in their order",
            )

    def missing(self) -> list[memoryview]:
        """The parts that are not verified yet."""
        return self._parts[self.verified.count :]


def _handed_over(link: PeerLink) -> asyncio.Transport:
    """The transport of a connection whose messages are done; raises if the connection has ended."""
    if link.lost:
        raise Unavailable("state_broken_off", "the connection ended before the state was sent", "fetch it again")
    return link.hand_over()


def _checked(head: bytes, parts: Sequence[memoryview | bytes]) -> list[memoryview]:
    views = [memoryview(part).cast("B") for part in parts]
    if len(head) > HEAD_BYTES_MAX or len(views) > PARTS_MAX:
        raise RequestRefused(
            "state_too_large",
            f"a state must have at most {HEAD_BYTES_MAX} bytes beside its arrays and at most {PARTS_MAX} parts,"
            f" got {len(head)} and {len(views)}",
            "merge small arrays into larger ones",
        )
    return views


def _over(attempt: int, newest: int) -> Unavailable:
    return Unavailable(
        "attempt_over", f"attempt {attempt} is over, {newest} is the newest", "wait for the daemon's next fact"
    )


PAUSE_S = 0.2
"""The pause between two tries to fetch a state."""
TELLING_INTERVAL_S = 1.0
"""How often the daemon is told how much of a state has arrived."""


def _refused(code: str, what: str, error: Exception, fix: str) -> RequestRefused:
    """Why a state is not transferred, which no later try would change; `fix` is for an exception of the script's."""
    if isinstance(error, ForgedError):
        return RequestRefused(error.code, f"{what}: {error.message}", error.fix)
    where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, MemoryError):
        code, fix = "state_too_large", "free memory on that worker's host"
    return RequestRefused(code, f"{what}: {describe(error)}{where}", fix)


class StateExchange:
    """Offers and takes one worker's state."""

    def __init__(
        self,
        server: StateServer,
        fetch: StateFetch,
        registration: Registration,
        progress: TrainingProgress,
        tasks: TaskGroup,
        log: Log,
        *,
        group_rank: int = 0,
    ) -> None:
        self._server = server
        self._fetch = fetch
        self._group_rank = group_rank
        self._registration = registration
        self._progress = progress
        self._tasks = tasks
        self._log = log
        self._problem = ""
        """Why the last fetch of the present transfer failed; empty where none has."""

    def offering(self, attempt: int) -> AbstractContextManager[None]:
        """Offer the state for an attempt, until the block is left; if it cannot be packed, its fetchers are refused."""
        try:
            packed = pack(self._progress.transferable_state)
        except Exception as error:  # noqa: BLE001 - packing calls the script's own state
            what = f"the state of {self._registration.worker.id} cannot be transferred"
            refusal = _refused("state_unfit", what, error, "fix the exception in that worker's script")
            self._log.warning("this worker's state cannot be given to another worker", reason=str(refusal))
            return self._server.offering(attempt, b"", (), refusal)
        return self._server.offering(attempt, packed.head, packed.parts)

    async def take(self, settled: RescaleSynchronising) -> None:
        """Take the source's state; repeated until it is here."""
        telling = anyio.CancelScope()
        self._problem = ""
        self._tasks.start_soon(self._tell, settled, telling)
        try:
            while not await self._has_fetched(settled):
                await anyio.sleep(PAUSE_S)
        finally:
            telling.cancel()

    async def fetch(self, source: WorkerId, attempt: int) -> None:
        """Take the state that the source offers for this attempt; one try."""
        arrived: list[Arriving] = []

        def into(head: bytes) -> list[memoryview]:
            arrived.append(Arriving(head))
            return arrived[-1].parts

        await self._fetch.fetch(source, attempt, into)
        try:
            arrived[-1].adopt(self._progress.transferable_state)
        except Exception as error:
            what = f"the state of {source.id} cannot be loaded by {self._registration.worker.id}"
            raise _refused("state_not_loaded", what, error, "give the same kind of state at all workers") from error

    async def _has_fetched(self, settled: RescaleSynchronising) -> bool:
        source = settled.source_for(self._group_rank)
        try:
            await self.fetch(source, settled.attempt)
        except ForgedError as error:
            if not is_temporary(error) or error.code == TLS_FAILED:
                raise
            self._problem = error.message
            self._log.warning(
                "the training state could not be fetched; retrying", source=str(source), reason=str(error)
            )
            return False
        return True

    async def _tell(self, settled: RescaleSynchronising, scope: anyio.CancelScope) -> None:
        """A transfer may take longer than the daemon lets a worker be silent."""
        before, source = self._fetch.received, settled.source_for(self._group_rank)
        with scope:
            while True:
                await anyio.sleep(TELLING_INTERVAL_S)
                error = self._fetch.unreached
                unreachable = "" if error is None else source.id
                problem = self._problem if error is None else error.message
                received = self._fetch.received - before
                self._registration.receiving(settled.attempt, received, problem=problem, unreachable_peer=unreachable)
