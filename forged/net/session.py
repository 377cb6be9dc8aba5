"""The daemon's side of a client connection: hello, requests, fact streams, signals.

Invariants:
- Before the hello is accepted only a hello is processed, within small limits.
- A request is decoded to its type or refused with the invalid field. Its reply is sent when it is durable, in any
  order, and is not encoded while the client does not read.
- The client's rights are checked again about once per second: a revoked or expired token ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar
from zlib import crc32

import msgspec

from forged.auth.access import authorise
from forged.auth.model import Principal, Role
from forged.clock import Clock
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.ids import CLIENT_ID_BYTES
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.messages import ANY_JOB, REQUESTS, SIGNALS, Call, Fence, Request
from forged.kernel.pending import Pending
from forged.log import Log
from forged.net.protocol.calls import TIMEOUT_S, OutgoingCalls
from forged.net.protocol.messages import (
    VERSION_MAX,
    VERSION_MIN,
    Bye,
    Cancel,
    Credit,
    Failure,
    Hello,
    Reply,
    ReplyOut,
    RequestMessage,
    SignalMessage,
    Subscribe,
    Unsubscribe,
    Welcome,
    decode_body,
    ending,
    failure,
)
from forged.net.protocol.streams import OutgoingStreams
from forged.net.transport.connection import Connection, ConnectionLimits
from forged.net.transport.memory import Memory
from forged.net.transport.port import Peer
from forged.net.turns import Turns
from forged.rate_limit import RateLimit
from forged.shares import Shares
from forged.version import VERSION

R = TypeVar("R")

TIMEOUT_MAX_S = 3600.0
REQUEST_BYTES = 4096
"""What a request in flight holds besides its body, about."""


class SessionHost(Protocol):
    """What a session needs of its server."""

    bus: Bus
    journal: Journal
    clock: Clock
    history: str
    limits: ConnectionLimits
    log: Log
    identify: Callable[[Peer, str | None], Principal]
    """Returns the principal of a peer and token, or raises."""
    side_connection: Callable[[Session, Hello], None]
    """Takes over a connection with a ticket in its hello."""
    streaming: dict[Session, None]
    """The sessions that have streams."""
    disconnect_log: RateLimit
    """Limits the log lines about disconnected peers."""
    memory: Memory
    """The bytes that the sessions hold."""
    requests: Shares
    """The requests in flight."""
    turns: Turns
    """How many messages each principal may have processed in one turn of the loop."""

    def admit(self, session: Session, peer: Peer) -> None:
        """Raise `Unavailable` if there is no room for another connection from this address."""
        ...

    def greet(self, session: Session, principal: Principal) -> None:
        """Raise `Unavailable` if there is no room for another connection of this principal."""
        ...

    def greeted(self, session: Session) -> None:
        """The session's hello was accepted."""
        ...

    def left(self, session: Session) -> None:
        """The session has ended."""
        ...

    def pump_soon(self, sessions: Iterable[Session]) -> None:
        """Send the streams of these sessions in the next turn of the loop."""
        ...

    def resume_when_clear(self, session: Session) -> None:
        """Let the session process requests again when the bus is not congested."""
        ...


class Session(Connection):
    """One client connection, from its hello to its end."""

    def __init__(self, host: SessionHost, peer_of: Callable[[Any], Peer]) -> None:
        super().__init__(host.clock, host.limits, host.memory)
        self.host = host
        self.peer: Peer | None = None
        self.principal: Principal | None = None
        self.client = b""
        self.calls = OutgoingCalls(host.clock)
        self.in_flight = 0
        self._log = host.log
        self._peer_of = peer_of
        self._token: str | None = None
        self._origin = ""
        self._signalling: Call | None = None
        self._unread_bytes_held = 0
        """The unread bytes that count as held while the client does not read."""
        self._streams = OutgoingStreams(host.journal)
        self._answers: list[tuple[int, int, Pending]] = []
        """Replies that wait until the client reads; they count as in flight."""

    @property
    def greeted(self) -> bool:
        """Whether the hello was accepted."""
        return self.principal is not None

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait: the daemon is congested, or the requests in flight hold too many bytes."""
        host, holder = self.host, self.holder
        if host.bus.congested and self.greeted and not holder.is_operator:
            return True
        # Reads are mostly answered at once, so that no request is in flight.
        return host.requests.used > 0 and not (host.requests.fits(holder) and host.memory.has_room(self))

    async def request(self, request: Request[R], timeout_s: float = TIMEOUT_S, *, fence: Fence | None = None) -> R:
        """Send a request to the client and wait for its reply.

        The request is sent once, on this connection; if the connection is lost, `Unavailable` is raised and the outcome
        is unknown.
        """
        if not self.greeted or self.closing or self.lost:
            raise Unavailable("connection_lost", "this client is not connected", "retry when it has reconnected")
        if len(self.calls) >= self.limits.in_flight_max:
            raise Unavailable(
                "client_busy",
                f"{len(self.calls)} requests wait for this client; limit {self.limits.in_flight_max}",
                "retry later",
            )
        number, answer = self.calls.open(request, timeout_s, fence)
        self.send(self.calls.message(number))
        try:
            reply: R = await answer
        finally:
            if self.calls.abandon(number):
                self.send(Cancel(number))
        return reply

    def pump(self) -> bool:
        """Send pending facts of the streams in turn; returns whether more can be sent at once."""
        if self.write_paused or self.closing:
            return False
        for messages in self._streams.turn():
            for message in messages:
                self.send(message)
            if self.write_paused or self.closing:
                return False
        return self._streams.due

    # From Connection.

    def opened(self) -> None:
        assert self._transport is not None
        self.peer = self._peer_of(self._transport)
        self._log = self.host.log.bind(peer=self.peer.address, transport=self.peer.scheme)
        self._log.debug("connection opened")
        try:
            self.host.admit(self, self.peer)
        except Unavailable as error:
            self.fail(error)

    def admits(self) -> bool:
        if self.write_paused or self.in_flight >= self.limits.in_flight_max:
            return False
        if self.is_blocked:
            self.host.resume_when_clear(self)
            return False
        return True

    def _work(self) -> None:
        inbox, turns = self._inbox, self.host.turns
        quota = turns.quota(self) if inbox else 0
        done = 0
        try:
            while done < quota and inbox and self.admits():
                done += 1
                self._receive(inbox.popleft())
        finally:
            turns.spend(self, done)
        if inbox and 0 < quota == done:
            turns.wait(self)

    def received(self, message: Any) -> None:
        if type(message) is RequestMessage and self.principal is not None:
            self._request(message)
        elif self.principal is None:
            self._hello(message)
        else:
            act = _ACTS.get(type(message))
            if act is None:
                raise PeerError("message_unexpected", f"a daemon does not accept the message {type(message).__name__}")
            act(self, message)

    def pause_writing(self) -> None:
        super().pause_writing()
        memory, transport = self.host.memory, self._transport
        if transport is None or self.closing:
            return
        self._unread_bytes_held = transport.get_write_buffer_size()
        memory.charge(self, self._unread_bytes_held)
        if not memory.has_room(self):
            self.fail(Unavailable("not_reading", f"unread messages: {memory.shortage(self)}", "reconnect and read"))
            self.abort()

    def write_resumed(self) -> None:
        if not self.closing:
            self.host.memory.give_back(self, self._unread_bytes_held)
        answers, self._answers = self._answers, []
        for index, (number, held, pending) in enumerate(answers):
            if self.write_paused:
                self._answers = answers[index:]
                break
            self._answer(number, held, pending)
        self.host.pump_soon([self])

    def sweep(self, now: float) -> None:
        if not self.greeted and not self.closing and now - self._opened_at > self.limits.hello_timeout_s:
            self.fail(PeerError("hello_late", f"no hello within {self.limits.hello_timeout_s} s", "send a hello first"))
        elif self.greeted and not self.closing and self._token is not None:
            self.check_rights()
        super().sweep(now)

    def check_rights(self) -> None:
        """Close the connection unless the client still has a principal."""
        assert self.peer is not None
        try:
            self.principal = self.host.identify(self.peer, self._token)
        except ForgedError as error:
            self.fail(error)

    def fail(self, error: ForgedError) -> None:
        if not (self.closing or self.lost) and self.host.disconnect_log.admits(self._clock.monotonic()):
            self._log.warning("a peer was disconnected", code=error.code, reason=error.message)
        super().fail(error)

    def ended(self, error: ForgedError) -> None:
        self._log.debug("connection ended", code=error.code, reason=error.message)
        self._streams.clear()
        self.host.requests.give_back(self.holder, len(self._answers))
        self._answers.clear()
        self.calls.fail_all(error)
        self.host.left(self)

    # Messages.

    def _hello(self, hello: Any) -> None:
        if type(hello) is not Hello:
            raise PeerError("hello_expected", "the first message must be a hello", "see docs/protocol.md")
        if hello.version_max < VERSION_MIN or hello.version_min > VERSION_MAX:
            spoken = f"{VERSION_MIN} to {VERSION_MAX}"
            theirs = f"{hello.version_min} to {hello.version_max}"
            fix = "upgrade the older of the two"
            raise PeerError("version_mismatch", f"this end supports protocol versions {spoken}, the peer {theirs}", fix)
        if len(hello.client) != CLIENT_ID_BYTES:
            raise PeerError("client_invalid", f"a client id must have {CLIENT_ID_BYTES} bytes, got {len(hello.client)}")
        if hello.ticket is not None:
            self.host.side_connection(self, hello)
            return
        assert self.peer is not None
        principal = self.host.identify(self.peer, hello.token)
        self.host.greet(self, principal)
        self.principal, self._token, self.holder = principal, hello.token, principal.holder
        self.client = hello.client
        self._origin = f"{principal.name} at {self.peer.address}"
        self._log = self._log.bind(client=self.client.hex(), principal=principal.name)
        self.established()
        self.host.greeted(self)
        self.send(self.welcome(min(hello.version_max, VERSION_MAX)))

    def welcome(self, version: int, size: int = 0) -> Welcome:
        """The welcome message with the parameters of this connection."""
        host, principal = self.host, self.principal
        return Welcome(
            version=version,
            agent=f"forged/{VERSION}",
            principal=principal.name if principal else "",
            role=principal.role if principal else "",
            history=host.history,
            latest=host.journal.last,
            term=host.bus.ledger.term,
            frame_bytes_max=self.limits.frame_bytes_max,
            in_flight_max=self.limits.in_flight_max,
            size=size,
        )

    def _request(self, message: RequestMessage) -> None:
        number, body = message.number, message.body
        self.host.bus.ledger.replies.note(self.client, message.acknowledged, number, message.waiting)
        assert self.principal is not None
        try:
            request = _decode_request(message.method, body)
        except RequestRefused as error:
            self.send(failure(number, error))
            return
        call = Call(
            self.principal,
            self._origin,
            client=self.client,
            number=number,
            acknowledged=message.acknowledged,
            digest=crc32(body, crc32(message.method.encode())),
            timeout_s=TIMEOUT_MAX_S if message.timeout_s is None else min(message.timeout_s, TIMEOUT_MAX_S),
            fence=message.fence,
        )
        pending = self.host.bus.submit(request, call)
        if pending.done:
            self._send_outcome(number, pending)
        else:
            self.in_flight += 1
            self.host.requests.charge(self.holder, 1)
            held = REQUEST_BYTES + len(bytes(body))
            self.host.memory.charge(self, held)
            pending.when_done(partial(self._answer_later, number, held))

    def _answer_later(self, number: int, held: int, pending: Pending) -> None:
        if self.write_paused and not self.lost:
            self._answers.append((number, held, pending))
            return
        self._answer(number, held, pending)
        if self._paused:
            self.work()

    def _answer(self, number: int, held: int, pending: Pending) -> None:
        self.in_flight -= 1
        self.host.requests.give_back(self.holder)
        if not (self.closing or self.lost):
            self.host.memory.give_back(self, held)
        self._send_outcome(number, pending)

    def _send_outcome(self, number: int, pending: Pending) -> None:
        try:
            if pending.error is not None:
                self.send(failure(number, pending.error))
            elif pending.encoded:
                self.send(Reply(number, msgspec.Raw(pending.encoded)))
            else:
                self.send(ReplyOut(number, pending.reply))
        except RequestRefused as error:
            self.send(failure(number, error))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # A plugin's handler may return anything; this must not affect other replies.
            reason = f"the reply cannot be encoded: {type(error).__name__}: {error}"
            self.send(failure(number, ForgedError("handler_broken", reason, "report this bug")))

    def _subscribe(self, message: Subscribe) -> None:
        assert self.principal is not None
        try:
            for job in message.jobs:
                authorise(self.principal, Role.VIEWER, job)
            if not self.host.memory.has_room(self):
                raise RequestRefused(
                    "too_many_streams", self.host.memory.shortage(self), "end streams, or read what was sent"
                )
            self.host.memory.charge(self, self._streams.open(message, self.host.history, self.principal.jobs))
        except RequestRefused as error:
            self.send(ending(message.stream, error))
            return
        self.host.streaming[self] = None
        self.host.pump_soon([self])

    def _credit(self, message: Credit) -> None:
        self._streams.grant(message.stream, message.facts)
        self.host.pump_soon([self])

    def _unsubscribe(self, message: Unsubscribe) -> None:
        self.host.memory.give_back(self, self._streams.close(message.stream))
        if not self._streams:
            self.host.streaming.pop(self, None)

    def _cancel(self, message: Cancel) -> None:
        self.host.bus.dispatcher.cancel(self.client, message.number)

    def _signal(self, message: SignalMessage) -> None:
        cls = SIGNALS.get(message.name)
        if cls is None or not cls.external or self.principal is None or not self.principal.role.covers(cls.needs):
            return
        try:
            signal = decode_body(message.body, cls)
        except msgspec.ValidationError as error:
            raise PeerError("signal_invalid", f"{message.name}: {error}") from error
        # As for requests: with `ANY_JOB` the handler checks the sender's jobs.
        if cls.job_field != ANY_JOB and not self.principal.may(cls.needs, signal.about):
            return
        call = self._signalling
        if call is None or call.principal is not self.principal:
            # One call object for all signals: they are frequent and otherwise cheap.
            call = self._signalling = Call(self.principal, self._origin, client=self.client)
        self.host.bus.signal(signal, call)

    def _bye(self, message: Bye) -> None:
        self.host.bus.ledger.replies.acknowledge(self.client, message.acknowledged)
        self.close()

    def _outcome(self, message: Reply | Failure) -> None:
        self.calls.outcome(message)


def _decode_request(method: str, body: msgspec.Raw) -> Any:
    cls = REQUESTS.get(method)
    if cls is None:
        raise RequestRefused(
            "request_unknown",
            f"this daemon has no handler for request {method[:80]!r}",
            "compare the versions of both ends",
        )
    try:
        return decode_body(body, cls)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestRefused("request_invalid", f"{method}: {error}", "see docs/protocol.md") from error


_ACTS: dict[type[Any], Callable[[Session, Any], None]] = {
    Subscribe: Session._subscribe,
    Credit: Session._credit,
    Unsubscribe: Session._unsubscribe,
    Cancel: Session._cancel,
    SignalMessage: Session._signal,
    Bye: Session._bye,
    Reply: Session._outcome,
    Failure: Session._outcome,
}
