"""The daemon's end of a connection: hello, requests, streams, signals.

Law: nothing is heard before the hello is accepted, and what a hello may cost is bounded. A request is decoded into its
type or refused by field; its answer is sent when it is durable, in whatever order answers come, and is not even encoded
while the client does not read. Rights are looked up again about once a second, so a token that was revoked or has
expired ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
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
from forged.net.transport.port import Peer
from forged.rate_limit import RateLimit
from forged.version import VERSION

R = TypeVar("R")

TIMEOUT_MAX_S = 3600.0


@dataclass(frozen=True, slots=True)
class SessionHost:
    """What every session of a daemon needs to know of it."""

    bus: Bus
    journal: Journal
    clock: Clock
    history: str
    identify: Callable[[Peer, str | None], Principal]
    limits: ConnectionLimits
    side_connection: Callable[[Session, Hello], None]
    admit: Callable[[Session], None]
    """Raises `Unavailable` when there is no room."""
    greeted: Callable[[Session], None]
    left: Callable[[Session], None]
    streaming: dict[Session, None]
    """Those who have streams."""
    pump_soon: Callable[[Iterable[Session]], None]
    resume_when_clear: Callable[[Session], None]
    log: Log
    complaints: RateLimit
    """Keeps those who are sent away from filling the log."""


class Session(Connection):
    """One client, from its hello to its end."""

    def __init__(self, house: SessionHost, peer_of: Callable[[Any], Peer]) -> None:
        super().__init__(house.clock, house.limits)
        self.house = house
        self.peer: Peer | None = None
        self.principal: Principal | None = None
        self.client = b""
        self.calls = OutgoingCalls(house.clock)
        self.in_flight = 0
        self._log = house.log
        self._peer_of = peer_of
        self._token: str | None = None
        self._origin = ""
        self._signalling: Call | None = None
        self._streams = OutgoingStreams(house.journal)
        self._answers: list[tuple[int, Pending]] = []
        """What is answered and waits until the client reads; it counts as in flight."""

    @property
    def greeted(self) -> bool:
        """Whether the hello was accepted."""
        return self.principal is not None

    async def request(self, request: Request[R], timeout_s: float = TIMEOUT_S, *, fence: Fence | None = None) -> R:
        """Ask the client, which may answer, refuse, or say nothing until the time is up.

        It is asked once, on this connection: when that is lost, `Unavailable` tells that nobody knows what was done.
        """
        if not self.greeted or self.closing or self.lost:
            raise Unavailable("connection_lost", "this client is not connected", "ask when it is back")
        if len(self.calls) >= self.limits.in_flight_max:
            raise Unavailable("client_busy", f"{len(self.calls)} requests wait for this client", "ask later")
        number, answer = self.calls.open(request, timeout_s, fence)
        self.send(self.calls.message(number))
        try:
            reply: R = await answer
        finally:
            if self.calls.abandon(number):
                self.send(Cancel(number))
        return reply

    def pump(self) -> bool:
        """Send what has come up for the streams, by turns; tells whether there is more to send at once."""
        if self.clogged or self.closing:
            return False
        for messages in self._streams.turn():
            for message in messages:
                self.send(message)
            if self.clogged or self.closing:
                return False
        return self._streams.due

    # From Connection.

    def opened(self) -> None:
        assert self._transport is not None
        self.peer = self._peer_of(self._transport)
        self._log = self.house.log.bind(peer=self.peer.address, door=self.peer.scheme)
        self._log.debug("a connection was opened")
        try:
            self.house.admit(self)
        except Unavailable as error:
            self.fail(error)

    def admits(self) -> bool:
        if self.clogged or self.in_flight >= self.limits.in_flight_max:
            return False
        if self.house.bus.congested and self.greeted:
            self.house.resume_when_clear(self)
            return False
        return True

    def received(self, message: Any) -> None:
        if type(message) is RequestMessage and self.principal is not None:
            self._request(message)
        elif self.principal is None:
            self._hello(message)
        else:
            act = _ACTS.get(type(message))
            if act is None:
                raise PeerError("message_unexpected", f"{type(message).__name__} is not for a daemon to receive")
            act(self, message)

    def unclogged(self) -> None:
        answers, self._answers = self._answers, []
        for index, (number, pending) in enumerate(answers):
            if self.clogged:
                self._answers = answers[index:]
                break
            self.in_flight -= 1
            self._send_outcome(number, pending)
        self.house.pump_soon([self])

    def sweep(self, now: float) -> None:
        if not self.greeted and not self.closing and now - self._opened_at > self.limits.hello_timeout_s:
            self.fail(PeerError("hello_late", f"no hello within {self.limits.hello_timeout_s} s", "say hello first"))
        elif self.greeted and not self.closing and self._token is not None:
            self.check_rights()
        super().sweep(now)

    def check_rights(self) -> None:
        """Close unless who is at the other end still has the rights it came with."""
        assert self.peer is not None
        try:
            self.principal = self.house.identify(self.peer, self._token)
        except ForgedError as error:
            self.fail(error)

    def fail(self, error: ForgedError) -> None:
        if not (self.closing or self.lost) and self.house.complaints.admits(self._clock.monotonic()):
            self._log.warning("a peer was sent away", code=error.code, why=error.message)
        super().fail(error)

    def ended(self, error: ForgedError) -> None:
        self._log.debug("a connection has ended", code=error.code, why=error.message)
        self._streams.clear()
        self._answers.clear()
        self.calls.fail_all(error)
        self.house.left(self)

    # Messages.

    def _hello(self, hello: Any) -> None:
        if type(hello) is not Hello:
            raise PeerError("hello_expected", "the first message must be a hello", "see docs/protocol.md")
        if hello.version_max < VERSION_MIN or hello.version_min > VERSION_MAX:
            spoken = f"{VERSION_MIN} to {VERSION_MAX}"
            theirs = f"{hello.version_min} to {hello.version_max}"
            fix = "upgrade the older of the two"
            raise PeerError("version_mismatch", f"this end speaks versions {spoken}, the other {theirs}", fix)
        if len(hello.client) != CLIENT_ID_BYTES:
            raise PeerError("client_invalid", f"a client's id has {CLIENT_ID_BYTES} bytes, not {len(hello.client)}")
        if hello.ticket is not None:
            self.house.side_connection(self, hello)
            return
        assert self.peer is not None
        self.principal = self.house.identify(self.peer, hello.token)
        self._token = hello.token
        self.client = hello.client
        self._origin = f"{self.principal.name} at {self.peer.address}"
        self._log = self._log.bind(client=self.client.hex(), principal=self.principal.name)
        self.established()
        self.house.greeted(self)
        self.send(self.welcome(min(hello.version_max, VERSION_MAX)))

    def welcome(self, version: int, size: int = 0) -> Welcome:
        """What holds on this connection."""
        house, principal = self.house, self.principal
        return Welcome(
            version=version,
            agent=f"forged/{VERSION}",
            principal=principal.name if principal else "",
            role=principal.role if principal else "",
            history=house.history,
            latest=house.journal.last,
            term=house.bus.ledger.term,
            frame_bytes_max=self.limits.frame_bytes_max,
            in_flight_max=self.limits.in_flight_max,
            size=size,
        )

    def _request(self, message: RequestMessage) -> None:
        number, body = message.number, message.body
        self.house.bus.ledger.replies.note(self.client, message.acknowledged, number, message.waiting)
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
        pending = self.house.bus.submit(request, call)
        if pending.done:
            self._send_outcome(number, pending)
        else:
            self.in_flight += 1
            pending.when_done(partial(self._answer_later, number))

    def _answer_later(self, number: int, pending: Pending) -> None:
        if self.clogged and not self.lost:
            self._answers.append((number, pending))
            return
        self.in_flight -= 1
        self._send_outcome(number, pending)
        if self._paused:
            self.work()

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
            # A plugin's handler may answer anything, and others wait behind this answer.
            reason = f"its answer cannot be sent: {type(error).__name__}: {error}"
            self.send(failure(number, ForgedError("handler_broken", reason, "report it as a bug")))

    def _subscribe(self, message: Subscribe) -> None:
        assert self.principal is not None
        try:
            for job in message.jobs:
                authorise(self.principal, Role.VIEWER, job)
            self._streams.open(message, self.house.history, self.principal.jobs)
        except RequestRefused as error:
            self.send(ending(message.stream, error))
            return
        self.house.streaming[self] = None
        self.house.pump_soon([self])

    def _credit(self, message: Credit) -> None:
        self._streams.grant(message.stream, message.facts)
        self.house.pump_soon([self])

    def _unsubscribe(self, message: Unsubscribe) -> None:
        self._streams.close(message.stream)
        if not self._streams:
            self.house.streaming.pop(self, None)

    def _cancel(self, message: Cancel) -> None:
        self.house.bus.dispatcher.cancel(self.client, message.number)

    def _signal(self, message: SignalMessage) -> None:
        cls = SIGNALS.get(message.name)
        if cls is None or not cls.external or self.principal is None or not self.principal.role.covers(cls.needs):
            return
        try:
            signal = decode_body(message.body, cls)
        except msgspec.ValidationError as error:
            raise PeerError("signal_invalid", f"{message.name}: {error}") from error
        # As for requests: with `ANY_JOB` its handler looks at the sender's jobs itself.
        if cls.job_field != ANY_JOB and not self.principal.may(cls.needs, signal.about):
            return
        call = self._signalling
        if call is None or call.principal is not self.principal:
            # The same for all signals, of which many come and which cost little besides.
            call = self._signalling = Call(self.principal, self._origin, client=self.client)
        self.house.bus.signal(signal, call)

    def _bye(self, message: Bye) -> None:
        self.house.bus.ledger.replies.acknowledge(self.client, message.acknowledged)
        self.close()

    def _outcome(self, message: Reply | Failure) -> None:
        self.calls.outcome(message)


def _decode_request(method: str, body: msgspec.Raw) -> Any:
    cls = REQUESTS.get(method)
    if cls is None:
        raise RequestRefused("request_unknown", f"nobody here answers {method[:80]!r}", "compare versions of both ends")
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
