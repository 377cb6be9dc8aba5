"""One connection between two workers, at either end.

Invariants:
- Either end tells nothing and reads nothing large before the peer has proven that it knows the job's key. A dialler
  that fails to is disconnected without a message.
- A proven peer may be silent and read nothing for any time: it may compute with the GIL held. The end of the connection
  tells that it is dead, and the kernel that its host is gone.

The kernel's user timeout of two seconds finds a gone host also while bytes are in flight. A large message may fill the
receive window of a peer that does not read just now, and the kernel counts that time, too. The sender may compute with
the GIL held right after, so a large message is sent with a long user timeout. The next sweep restores the short one,
unless the window is full and the peer's host answers.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from random import Random
from typing import Literal, Protocol

import anyio
import msgspec

from forged.clock import Clock
from forged.elastic.model import WorkerId
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, from_wire
from forged.net.protocol import frames
from forged.net.protocol.messages import TEXT_CHARS_MAX, Message
from forged.net.transport import tls
from forged.net.transport.connection import READ_BYTES, Connection, ConnectionLimits
from forged.net.transport.memory import Memory, MemoryLimits
from forged.net.transport.port import Address, Network
from forged.shares import Holder
from forged.worker.transport import peer_messages
from forged.worker.transport.peer_messages import (
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    STORE_CALLS_MAX,
    VERSION_MAX,
    VERSION_MIN,
    Accepted,
    Answer,
    Challenge,
    PeerHello,
    PeerMessage,
    Purpose,
    Refused,
)

PEER_LIMITS = ConnectionLimits(
    frame_bytes_max=MESSAGE_BYTES_MAX,
    hello_bytes_max=4 << 10,
    hello_timeout_s=5.0,
    frame_timeout_s=math.inf,
    ping_after_s=math.inf,
    silence_max_s=math.inf,
    linger_s=2.0,
)
UNREAD_MAX = 4
"""How many messages a peer sends at most without an answer to the first, with one to spare."""
UNREAD_IN_WORLD_MAX = UNREAD_MAX + 2 * STORE_CALLS_MAX
"""The same between members of a world, each of whose calls of the store may be followed by another message."""
PEER_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
"""The bytes of unfinished messages that one peer may send at once; further ones wait."""
UNFINISHED_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
"""The bytes of unfinished messages of all peers."""
SMALL_BYTES = 32 << 10
"""Fits into the receive window of a connection that is not read, which begins with twice as much."""


class Inbox:
    """The messages of one or several proven connections in the order of their arrival.

    A connection of which more than `unread_max` messages are unread is refused. The error with which a connection has
    ended follows its last message.
    """

    def __init__(self, unread_max: int = UNREAD_MAX) -> None:
        self._unread_max = unread_max
        self._items: deque[tuple[PeerLink, PeerMessage | ForgedError]] = deque()
        self._waiters: list[asyncio.Future[None]] = []

    def put(self, link: PeerLink, message: PeerMessage) -> None:
        """Add a message."""
        if link.unread >= self._unread_max:
            raise PeerError("message_unexpected", "the peer sent another message before an answer to the last one")
        link.unread += 1
        self._items.append((link, message))
        self.wake()

    def end(self, link: PeerLink, error: ForgedError) -> None:
        """Add the end of a connection."""
        self._items.append((link, error))
        self.wake()

    def pop(self) -> tuple[PeerLink, PeerMessage | ForgedError] | None:
        """The next message or end, with its connection; None where none has arrived."""
        if not self._items:
            return None
        link, item = self._items.popleft()
        link.unread -= not isinstance(item, ForgedError)
        return link, item

    async def wait(self) -> None:
        """Wait until something has arrived, or `wake` was called. Of several that wait, the last one is woken."""
        if self._items:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiters.remove(waiter)
            if self._items:
                self.wake()
            raise
        self._waiters.remove(waiter)

    def wake(self) -> None:
        """End the present `wait`."""
        if self._waiters and not self._waiters[-1].done():
            self._waiters[-1].set_result(None)

    async def next(self, timeout_s: float = math.inf) -> PeerMessage:
        """The next message of the only connection; raises the error with which that has ended, also again."""
        with anyio.move_on_after(timeout_s):
            while not self._items:
                await self.wait()
            _, item = self._items[0]
            if isinstance(item, ForgedError):
                raise item
            self.pop()
            return item
        raise Unavailable("peer_timeout", f"the peer sent nothing for {timeout_s:g} s", "connect again")


def memory_for_peers() -> Memory:
    """The memory for unfinished messages. No peer displaces another: messages take turns."""
    limits = MemoryLimits(UNFINISHED_BYTES_MAX, PEER_BYTES_MAX, PEER_BYTES_MAX)
    return Memory(limits, small_bytes=READ_BYTES, displaces=False)


class Door(Protocol):
    """Judges the proofs of peers that connect."""

    def on_hello(self, link: AcceptedLink, hello: PeerHello) -> None:
        """A peer has connected, and waits for the listener's proof."""
        ...

    def on_answer(self, link: AcceptedLink, answer: Answer) -> None:
        """A peer has answered the challenge."""
        ...

    def on_stranger_gone(self, link: AcceptedLink, reason: str) -> None:
        """The connection has ended before the peer was proven."""
        ...


class PeerLink(Connection):
    """What both ends have in common."""

    def __init__(self, clock: Clock, limits: ConnectionLimits, memory: Memory | None = None) -> None:
        super().__init__(clock, limits, memory)
        self.over: asyncio.Future[ForgedError] = asyncio.get_running_loop().create_future()
        self.unread = 0
        """How many messages of this connection its inbox holds."""

    def admits(self) -> bool:
        # If both ends waited for the other to read, both would wait forever; a peer may send one message unanswered.
        return True

    def send(self, message: Message) -> None:
        """Send a message at once."""
        self.write(frame_of(message))

    def write(self, frame: bytes) -> None:
        """Send a frame, which `frame_of` may have made for several links."""
        if self.closing or self.lost or self._transport is None:
            return
        if self._user_timeout is not None and len(frame) > SMALL_BYTES:
            self._user_timeout.extend()
        self._has_unacknowledged = True
        self._transport.write(frame)

    def fail(self, error: ForgedError) -> None:
        """Tell the peer the reason, and close."""
        self.refuse(error)

    def refuse(self, error: ForgedError) -> None:
        """Tell the peer the reason, and close."""
        self.send(Refused(error.kind, error.code, error.message[:TEXT_CHARS_MAX], error.fix[:TEXT_CHARS_MAX]))
        self.close(error)

    def ended(self, error: ForgedError) -> None:
        if not self.over.done():
            self.over.set_result(error)

    def _receive(self, payload: bytes) -> None:
        message = peer_messages.decode(payload)
        if isinstance(message, Refused):
            self.close(from_wire(message.kind, message.code, message.text, message.fix))
        else:
            self.received(message)


class AcceptedLink(PeerLink):
    """The listening end: it demands the proof."""

    def __init__(self, clock: Clock, limits: ConnectionLimits, memory: Memory, door: Door) -> None:
        super().__init__(clock, limits, memory)
        self.nonces = b""
        """Those of both ends; empty before the challenge."""
        self.inbox: Inbox | None = None
        """Where messages of the proven peer go; None while it has to wait."""
        self._is_proven = False
        self._door = door
        self._reason_unproven = "the peer closed it"
        self._is_answered = False

    def opened(self) -> None:
        # The dialler speaks first.
        pass

    def challenge(self, hello: PeerHello, challenge: Challenge) -> None:
        """Answer the dialler's hello with this challenge."""
        self.nonces = peer_messages.nonces_of(hello, challenge)
        self.send(challenge)

    def believe(self, accepted: Accepted, worker: str) -> None:
        """Accept the proof of this worker."""
        self._is_proven = True
        self.holder = Holder(worker, worker)
        self.established()
        self.send(accepted)

    def cut(self, reason: str) -> None:
        """Close without a message."""
        self._reason_unproven = reason
        self.abort()

    def fail(self, error: ForgedError) -> None:
        if self._is_proven:
            super().fail(error)
        else:
            self.cut(error.message)

    def sweep(self, now: float) -> None:
        if not self._is_proven and not self.lost and now - self._opened_at > self.limits.hello_timeout_s:
            self.cut("no authentication proof arrived in time")
        else:
            super().sweep(now)

    def received(self, message: PeerMessage) -> None:
        if self.inbox is not None:
            self.inbox.put(self, message)
        elif self._is_proven:
            raise PeerError("message_unexpected", f"{type(message).__name__} was sent before the world began")
        elif isinstance(message, PeerHello) and not self.nonces:
            self._door.on_hello(self, message)
        elif isinstance(message, Answer) and self.nonces and not self._is_answered:
            self._is_answered = True
            self._door.on_answer(self, message)
        else:
            self.cut("another message arrived instead of the authentication proof")

    def ended(self, error: ForgedError) -> None:
        super().ended(error)
        if not self._is_proven:
            self._door.on_stranger_gone(self, self._reason_unproven)
        elif self.inbox is not None:
            self.inbox.end(self, error)


class DialledLink(PeerLink):
    """The connecting end: it demands the listener's proof, and then gives its own."""

    def __init__(
        self,
        clock: Clock,
        limits: ConnectionLimits,
        memory: Memory,
        inbox: Inbox,
        key: bytes,
        hello: PeerHello,
        answer: Answer,
        target: str,
    ) -> None:
        super().__init__(clock, limits, memory)
        self.holder = Holder(answer.target, answer.target)
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._messages = inbox
        self._key = key
        self._hello = hello
        self._answer = answer
        self._target = target
        self._nonces = b""
        """Those of both ends; empty before the challenge."""

    def opened(self) -> None:
        self.send(self._hello)
        # A message of any size may arrive together with the acceptance.
        self.established()

    def received(self, message: PeerMessage) -> None:
        if self.accepted.done():
            self._messages.put(self, message)
        elif isinstance(message, Challenge) and not self._nonces:
            self._answer_to(message)
        elif isinstance(message, Accepted) and self._nonces:
            self._check(message)
        else:
            raise PeerError(
                "message_unexpected",
                f"{self._target} sent {type(message).__name__}, which the protocol does not allow there",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        # With TLS 1.3 the listener judges this end's certificate after the handshake, and refuses it by closing.
        if self._reason is None and not self.accepted.done() and isinstance(exc, ssl.SSLError):
            self._reason = tls.refusal(self._target, exc)
        super().connection_lost(exc)

    def ended(self, error: ForgedError) -> None:
        super().ended(error)
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # retrieved, so that asyncio does not log it
        elif not self.accepted.cancelled() and self.accepted.exception() is None:
            self._messages.end(self, error)

    def fail(self, error: ForgedError) -> None:
        # The listener may not be a worker, and need not know the reason.
        self.close(error)

    def _answer_to(self, challenge: Challenge) -> None:
        version = min(challenge.version_max, VERSION_MAX)
        if version < max(challenge.version_min, VERSION_MIN):
            raise PeerError(
                "version_mismatch",
                f"{self._target} supports versions {challenge.version_min} to {challenge.version_max},"
                f" this worker {VERSION_MIN} to {VERSION_MAX}",
                "upgrade the older of the two",
            )
        answer = msgspec.structs.replace(self._answer, version=version)
        if not peer_messages.is_challenge_proven(challenge, self._hello, self._key, answer.job, answer.target):
            raise self._unproven()
        self._nonces = peer_messages.nonces_of(self._hello, challenge)
        self._answer = peer_messages.answered(answer, self._key, self._nonces)
        self.send(self._answer)

    def _check(self, message: Accepted) -> None:
        if not peer_messages.is_accepted(message, self._answer, self._key, self._nonces):
            raise self._unproven()
        self.accepted.set_result(None)

    def _unproven(self) -> PeerError:
        text = f"{self._target} has not proven that it is this worker of job {self._answer.job}"
        return PeerError("peer_unproven", text, "see which process listens there")


class Dialler:
    """Connects one worker to its peers, and proves that it belongs to the job."""

    def __init__(
        self,
        job: str,
        worker_id: str,
        session_id: bytes,
        network: Network,
        scheme: Literal["tcp", "tls"],
        limits: ConnectionLimits,
        memory: Memory,
        clock: Clock,
        source: Random,
        links: dict[PeerLink, None],
        key: bytes,
    ) -> None:
        self.key = key
        """The key of the job's mesh; empty before it is known."""
        self._job = job
        self._worker_id = worker_id
        self._session_id = session_id
        self._network = network
        self._scheme: Literal["tcp", "tls"] = scheme
        self._limits = limits
        self._memory = memory
        self._clock = clock
        self._random = source
        self._links = links

    async def dial(
        self, target: WorkerId, purpose: Purpose, number: int, inbox: Inbox, *, rank: int = 0, world: bytes = b""
    ) -> DialledLink:
        """Connect and exchange proofs, within the hello timeout; messages go to the inbox from then on."""
        if not self.key:
            raise RequestRefused("mesh_not_ready", "the mesh has no key", "set the job's key")
        hello = PeerHello(self._random.randbytes(NONCE_BYTES))
        answer = Answer(
            VERSION_MAX, self._job, target.id, self._worker_id, self._session_id, purpose, number, rank, world
        )
        link = DialledLink(self._clock, self._limits, self._memory, inbox, self.key, hello, answer, str(target))
        self._links[link] = None
        link.over.add_done_callback(lambda _: self._links.pop(link, None))
        await self._connect(link, Address(self._scheme, host=target.hostname, port=target.port))
        return link

    async def _connect(self, link: DialledLink, address: Address) -> None:
        timeout_s = self._limits.hello_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                await self._network.connect(address, lambda: link)
                await link.accepted
        except BaseException as error:
            link.abort()
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    "peer_timeout",
                    f"{address} sent no authentication proof within {timeout_s:g} s",
                    "see whether a worker of this job listens there",
                ) from None
            raise


def frame_of(message: Message) -> bytes:
    """Encode a message as one frame."""
    return frames.encode(peer_messages.encode(message))
